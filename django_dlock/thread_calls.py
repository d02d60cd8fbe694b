"""Keeps the leases of a function in a thread from the task that has stopped waiting for it.

A time limit, a cancellation or a client that goes away ends the wait of a task for `sync_to_async`, but not the
function in the thread. All the same, asgiref hands the context of that function back to the task, with the leases that
it holds: the task would write under a lock that it has not taken, join it, and release it with its request. Only at
that moment can one know that the function is still at work, so asgiref's step is wrapped here. So are its calls, which
have to know the flows that wait for them.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final

from asgiref import sync

from django_dlock.calls import begin_call, call_kept, calling, returns_to_this_flow
from django_dlock.ownership import changes_kept
from django_dlock.tracker import leases_of_context
from dlock_core.flow import FLOW_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context

__all__ = ["keep_from_callers"]

_STEP: Final = "_restore_context"
"""The function of asgiref that sets the variables of a context in the one that runs now; it has no public name."""

_CALL: Final = "thread_handler"
"""The method of asgiref that calls a function in a thread; its last argument is the function."""

_TO_COROUTINE: Final = "main_wrap"
"""The function of asgiref that takes the step to give a coroutine its caller's context: nothing has returned then."""

_TO_FUNCTION: Final = "run_child"
"""The function that takes it in a context that a function has already, as asgiref does since 3.12.1."""


def keep_from_callers() -> None:
    """Wrap asgiref's step and calls from now on; a repeated call changes nothing."""
    hand_back, call = getattr(sync, _STEP, None), getattr(sync.SyncToAsync, _CALL, None)
    if hand_back is None or call is None:
        missing = _STEP if hand_back is None else _CALL
        warnings.warn(
            f"this asgiref has no {missing}(): a task that stops waiting for a function may get the locks that it "
            "holds. Install an older asgiref, and report its version to dlock",
            RuntimeWarning,
            stacklevel=2,
        )
    elif not isinstance(hand_back, _HandBack):
        setattr(sync, _STEP, _HandBack(hand_back))
        setattr(sync.SyncToAsync, _CALL, _beginning_a_call(call))
        sync.SyncToAsync.__call__ = _calling_function(sync.SyncToAsync.__call__)  # type: ignore[method-assign]
        sync.AsyncToSync.__call__ = _calling_coroutine(sync.AsyncToSync.__call__)  # type: ignore[method-assign]


def _calling_function(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    async def wrapped(*args: Any, **named: Any) -> Any:
        with calling():
            return await call(*args, **named)

    return wrapped


def _calling_coroutine(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def wrapped(*args: Any, **named: Any) -> Any:
        with calling():
            return call(*args, **named)

    return wrapped


def _beginning_a_call(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def wrapped(*args: Any) -> Any:
        *others, function = args
        return call(*others, partial(_begin, function))

    return wrapped


def _begin(function: Callable[[], Any]) -> Any:
    begin_call()
    return function()


class _HandBack:
    """Hands a context back; what dlock knows stays as it is if a function still runs in that context."""

    def __init__(self, hand_back: Callable[[Context], None]) -> None:
        self._hand_back = hand_back

    def __call__(self, context: Context) -> None:
        caller = sys._getframe(1).f_code.co_name  # noqa: SLF001 - documented by CPython
        if caller == _TO_FUNCTION:
            self._hand_back(context)
        elif caller == _TO_COROUTINE:
            with changes_kept():
                self._hand_back(context)
            begin_call()
        elif isinstance(sys.exc_info()[1], GeneratorExit) and not returns_to_this_flow(context):
            pass  # The flow that made the call was abandoned, and Python collects it in this one.
        elif sys.exc_info()[0] is None or not _is_entered(context):  # With no exception on its way, it has returned.
            self._hand_back_of_returned(context)
        else:
            self._hand_back_of_running(context)

    def _hand_back_of_returned(self, context: Context) -> None:
        before = leases_of_context.get()
        with call_kept(), changes_kept():
            self._hand_back(context)
        for each in before:
            each.note_returned()
        for each in leases_of_context.get():
            if each not in before:
                each.ownership.handed_back()

    def _hand_back_of_running(self, context: Context) -> None:
        own = [(each, each.get()) for each in FLOW_VARIABLES]
        self._hand_back(context)
        for variable, value in own:
            if variable.get() is not value:
                variable.set(value)
        for each in leases_of_context.get():
            each.note_returned()


def _is_entered(context: Context) -> bool:
    """Return whether code runs in a context, which then cannot be entered again."""
    try:
        context.run(bool)
    except RuntimeError:
        return True
    return False
