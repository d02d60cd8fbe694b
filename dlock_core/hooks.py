"""Tell whoever wants to know what happens to leases: logging, metrics, tests.

A hook is called in the thread where the event happens, must be quick, and cannot change the outcome: what it raises
is logged.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Event", "emit", "subscribe", "unsubscribe"]

logger = logging.getLogger("dlock")

Kind = Literal["acquired", "released", "lost", "timeout", "forced"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a lock; `seconds` is the time waited (acquired, timeout) or held (released, lost)."""

    kind: Kind
    name: str
    token: int = 0
    seconds: float = 0.0
    reason: str = ""


_hooks: tuple[Callable[[Event], None], ...] = ()


def subscribe(hook: Callable[[Event], None]) -> None:
    """Call `hook` with every event from now on."""
    global _hooks  # noqa: PLW0603 - replaced as a whole, so that emit needs no lock
    _hooks = (*_hooks, hook)


def unsubscribe(hook: Callable[[Event], None]) -> None:
    """Stop calling `hook`."""
    global _hooks  # noqa: PLW0603
    _hooks = tuple(known for known in _hooks if known != hook)  # a bound method is a new object every time


def emit(kind: Kind, name: str, token: int = 0, seconds: float = 0.0, reason: str = "") -> None:
    """Tell every hook; costs next to nothing when there is none."""
    for hook in _hooks:
        try:
            hook(Event(kind, name, token, seconds, reason))
        except Exception:
            logger.exception("dlock: a hook failed on %s of lock %r", kind, name)
