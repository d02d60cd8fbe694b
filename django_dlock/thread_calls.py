"""Calls of `sync_to_async` that are still at work although their task has stopped waiting for them.

A time limit, a cancellation or a client that goes away ends the wait of a task, but not the function in the thread. All
the same, asgiref then hands the context of that thread back to the task, with the leases that the function holds.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from asgiref.sync import AsyncToSync, SyncToAsync

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["current_call", "is_at_work"]

_CALLING: Final = SyncToAsync.thread_handler.__code__
_WAITING: Final = AsyncToSync.__call__.__code__


def current_call() -> Any:
    """Return an object that stands for the call that this thread executes, or executed last; None if there is none."""
    return getattr(SyncToAsync.threadlocal, "task_context", None)


def is_at_work(thread: int, call: object) -> bool:
    """Return whether a thread, by its ident, executes this call, and does not wait in it for a coroutine.

    Such a coroutine, and what it calls, is a part of the work and has its leases.
    """
    frame: FrameType | None = sys._current_frames().get(thread)  # noqa: SLF001 - documented
    while frame is not None and frame.f_code is not _WAITING:
        if frame.f_code is _CALLING and frame.f_locals.get("task_context") is call:
            return True
        frame = frame.f_back
    return False
