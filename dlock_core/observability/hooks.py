"""Events of locks, for logging, metrics, traces and tests: subscribe a hook, and it is called with each event.

A hook runs in the thread and the task in which the event happens. It must be quick and cannot change the outcome: an
exception that it raises is logged. Only the loss of a lease, later events of that lease, and a release that was
repeated in the background are reported in a dedicated thread, so that a slow hook delays no renewal. Without a
subscriber, events cost nothing that could be measured.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeVar, get_args

from dlock_core.late import kind_of_late
from dlock_core.options import check_callback
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

    Attributes:
        kind: One of `KINDS`.
        name: The lock's name. For a conflict, the object's, such as "Order(42)"; for a retry, that of its conflict, or
            an empty string.
        token: The fencing token of the lease; 0 where there is none.
        seconds: How long the acquire took (acquired, timeout, unavailable), how long the lease was held (released,
            lost, forced), or the pause before the next attempt (retry).
        reason: How a release went (released, expired, stolen), why a lease was lost, or what the store answered. For a
            conflict or a retry, the class of the error, or a failure of the database such as "deadlock".
    """

    kind: Kind
    name: str
    token: int = 0
    seconds: float = 0.0
    reason: str = ""
    contended: bool = False
    """Others held the lock, so that the acquire had to wait, or waited in vain."""
    lease: object | None = None
    """An object that all events of one grant share: compare it, or use it as a weak key, and for nothing else."""


subscribed: tuple[Callable[[Event], None], ...] = ()
"""The hooks; code on a hot path looks here first, and makes no event when there is none."""


def subscribe(hook: Callable[[Event], None]) -> None:
    """Call `hook` with each event from now on.

    An Exception that it raises is logged and goes no further, even if a signal handler raised it while the hook ran.
    Other exceptions, such as KeyboardInterrupt, reach the caller.

    Raises TypeError for a hook that cannot be called with an event, and for a coroutine function.
    """
    check_callback("hook", hook, None)
    global subscribed  # noqa: PLW0603 - replaced as a whole, so that emit needs no lock
    subscribed = (*subscribed, hook)


def unsubscribe(hook: Callable[[Event], None]) -> None:
    """Stop calling `hook`."""
    global subscribed  # noqa: PLW0603
    subscribed = tuple(known for known in subscribed if known != hook)  # a bound method is a new object every time


def emit(  # noqa: PLR0917 - by position where it costs
    kind: Kind,
    name: str,
    token: int = 0,
    seconds: float = 0.0,
    reason: str = "",
    contended: bool = False,  # noqa: FBT001, FBT002
    lease: object | None = None,
) -> None:
    """Call all hooks with an event; costs next to nothing if there are none."""
    for hook in subscribed:
        try:
            answer: object = hook(Event(kind, name, token, seconds, reason, contended, lease))
        except BaseException as error:  # In a caller's thread it may be the caller's own Ctrl-C.
            if not isinstance(error, Exception | SystemExit) and not is_own_thread():
                raise
            logger.exception("dlock: a hook failed on %s of lock %r", kind, name)
        else:
            if late := kind_of_late(answer):
                logger.error("dlock: a hook did nothing on %s of lock %r: it returned a %s", kind, name, late)


def emit_conflict(error: E) -> E:
    """Emit the event of a write or COMMIT that is refused, and return its error for the caller to raise."""
    emit("conflict", error.name, getattr(error, "token", 0), reason=type(error).__name__)
    return error
