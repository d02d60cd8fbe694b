"""Tell whoever wants to know what happens to locks: logging, metrics, traces, tests.

A hook is called in the thread, and the task, where the event happens, must be quick, and cannot change the outcome:
what it raises is logged. Only the loss of a lease, and what happens to that lease afterwards, is told in a thread of
its own, where a hook delays no renewal. Events that nobody has subscribed to cost nothing that could be measured.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeVar, get_args

from dlock_core.scheduler import is_own_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.errors import DLockError

__all__ = ["KINDS", "Event", "Kind", "emit", "emit_conflict", "subscribe", "unsubscribe"]

E = TypeVar("E", bound="DLockError")

logger = logging.getLogger("dlock")

Kind = Literal["acquired", "timeout", "unavailable", "released", "lost", "forced", "conflict", "retry"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a lock, or to a row with a version.

    `name` is the lock's; of a conflict the object's, such as "Order(42)"; of a retry that of its conflict, or empty.
    `seconds`: how long the acquire took (acquired, timeout, unavailable), how long the lease was held (released, lost,
    forced), the pause to come (retry). `reason`: how a release went (released, expired, stolen), why a lease was lost,
    what the store said; of a conflict or retry a class of errors or a trouble of the database, such as "deadlock".
    """

    kind: Kind
    name: str
    token: int = 0
    seconds: float = 0.0
    reason: str = ""
    contended: bool = False
    """Others held the lock: the acquire had to wait, or waited in vain."""
    lease: object | None = None
    """The same object for all events of one grant, to be compared or to be a weak key, and not to be used."""


_hooks: tuple[Callable[[Event], None], ...] = ()


def subscribe(hook: Callable[[Event], None]) -> None:
    """Call `hook` with every event from now on.

    What it raises is logged and goes no further, also an exception of a signal handler that comes while it runs; what
    is no Exception, such as KeyboardInterrupt, reaches the caller.
    """
    global _hooks  # noqa: PLW0603 - replaced as a whole, so that emit needs no lock
    _hooks = (*_hooks, hook)


def unsubscribe(hook: Callable[[Event], None]) -> None:
    """Stop calling `hook`."""
    global _hooks  # noqa: PLW0603
    _hooks = tuple(known for known in _hooks if known != hook)  # a bound method is a new object every time


def emit(  # noqa: PLR0917 - by position where it costs
    kind: Kind,
    name: str,
    token: int = 0,
    seconds: float = 0.0,
    reason: str = "",
    contended: bool = False,  # noqa: FBT001, FBT002
    lease: object | None = None,
) -> None:
    """Tell every hook; costs next to nothing when there is none."""
    for hook in _hooks:
        try:
            hook(Event(kind, name, token, seconds, reason, contended, lease))
        except BaseException as error:  # In a caller's thread it may be the caller's own Ctrl-C.
            if not isinstance(error, Exception | SystemExit) and not is_own_thread():
                raise
            logger.exception("dlock: a hook failed on %s of lock %r", kind, name)


def emit_conflict(error: E) -> E:
    """Tell every hook of a write, or COMMIT, that is refused; gives the error back, to be raised."""
    emit("conflict", error.name, getattr(error, "token", 0), reason=type(error).__name__)
    return error
