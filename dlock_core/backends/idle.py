"""Idle connections, and what becomes of them when nobody closes their store."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final, TypeVar

from dlock_core.runtime import clock

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

__all__ = ["LONGEST_IDLE_S", "close_excess", "drain", "drain_when_forgotten"]

T = TypeVar("T")

LONGEST_IDLE_S: Final = 60.0
"""Seconds of idleness after which a connection is closed rather than kept: a burst must not cost a server for ever."""


def close_excess(idle: deque[T], since: Callable[[T], float], close: Callable[[T], object], most: int) -> None:
    """Close what is more than `most`, and what was idle for too long; to be called whenever one is put back.

    The last used is used first, so the others grow old at the left end. No thread is needed for them: it is seen here.
    """
    oldest = clock() - LONGEST_IDLE_S
    while True:
        try:
            if len(idle) <= most and since(idle[0]) > oldest:
                return
            one = idle.popleft()
        except IndexError:  # Others took them.
            return
        close(one)


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
