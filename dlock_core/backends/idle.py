"""Idle connections, and what becomes of them when nobody closes their store."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

__all__ = ["drain", "drain_when_forgotten"]

T = TypeVar("T")


def drain(idle: deque[T], close: Callable[[T], object]) -> None:
    """Close each of them; others may take some meanwhile."""
    while True:
        try:
            one = idle.pop()
        except IndexError:
            return
        close(one)


def drain_when_forgotten(owner: object, idle: deque[T], close: Callable[[T], object]) -> None:
    """Close them when their owner is gone; `close` must not know it, and the deque must stay the same one.

    Left to the garbage collector, a socket may be met before the connection that would close it, and warns.
    """
    weakref.finalize(owner, drain, idle, close).atexit = False
