"""Which flow runs now, a task or a call in a thread, and which flows wait for it.

asgiref calls functions in threads for tasks, and coroutines in tasks of their own for functions. What such a call does
counts as done by the flows that wait for it: it has their context, and hands it back.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import ref

from dlock_core.flow import flow_variable, this_thread
from dlock_core.owner import in_task

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextvars import Context, ContextVar

__all__ = ["acts_for", "begin_call", "call_kept", "calling", "current_flow", "is_called_by", "returns_to_this_flow"]

_calling: Final[ContextVar[tuple[_Wait, ...]]] = flow_variable("dlock_calling", ())
"""The flows that will wait for the call that is about to begin, the nearest first."""

_call: Final[ContextVar[_Call | None]] = flow_variable("dlock_call", None)
"""The call in which this flow runs, or in which it was started."""


@dataclass(eq=False, slots=True)
class _Wait:
    """A flow that waits for a call, until it gets the answer, or a time limit or a cancellation ends its wait."""

    flow: object
    is_over: bool = False


@dataclass(eq=False, slots=True)
class _Call:
    """A call by asgiref: of a function, in a thread, or of a coroutine, in a task of its own."""

    flow: object
    """A weak reference to the task; of a function, any object that no other call has."""
    thread: object
    """The one in which it runs: threads that are started in the call have the call in their contexts, too."""
    waits: tuple[_Wait, ...]
    """Those of the flows that have called it, the nearest first."""


@contextmanager
def calling() -> Iterator[None]:
    """Call a function or a coroutine through asgiref in the block."""
    wait = _Wait(current_flow())
    _calling.set((wait, *_waits()))
    try:
        yield
    finally:
        wait.is_over = True
        if wait.flow == current_flow():  # A coroutine that was abandoned is closed in any flow.
            _calling.set(())


def begin_call() -> None:
    """Record that asgiref has begun a call in this flow."""
    flow = current_flow() if in_task() else object()
    _call.set(_Call(flow, this_thread(), _calling.get()))


@contextmanager
def call_kept() -> Iterator[None]:
    """Keep the call in which this flow runs, although the block sets the context to that of another flow."""
    own = _call.get()
    yield
    _call.set(own)


def acts_for(flow: object) -> bool:
    """Return whether this flow is that flow, or a call for which that flow waits, with all flows between the two."""
    if flow == current_flow():
        return True
    waiting = itertools.takewhile(lambda wait: not wait.is_over, _waits())
    return any(each.flow == flow for each in waiting)


def is_called_by(flow: object) -> bool:
    """Return whether this flow is that flow, or a call that it has made, even if it waits for the call no more."""
    return flow == current_flow() or any(each.flow == flow for each in _waits())


def returns_to_this_flow(context: Context) -> bool:
    """Return whether this flow has made the call that has run in a context."""
    call = context.get(_call)
    return call is not None and bool(call.waits) and call.waits[0].flow == current_flow()


def _waits() -> tuple[_Wait, ...]:
    """Return those for the call in which this flow runs, the nearest first."""
    call = _call.get()
    return call.waits if call is not None and _is_in(call) else ()


def current_flow() -> object:
    """Return the only weak reference to the task that runs now; in a thread, that and the call in it.

    A thread that waits in `async_to_sync` runs functions for other tasks meanwhile. Callbacks of an event loop are
    neither its tasks nor the function that runs it.
    """
    if not in_task():
        call = _call.get()
        return this_thread(), None if call is None else call.flow
    task = asyncio.current_task()
    return (this_thread(), "callback") if task is None else ref(task)


def _is_in(call: _Call) -> bool:
    """Return whether this flow is a call, and not one that was started in it."""
    return call.thread is this_thread() and (not in_task() or call.flow == current_flow())
