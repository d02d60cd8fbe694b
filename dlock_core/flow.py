"""Context variables of a flow: what a thread or task holds and does, and what the work that it starts inherits."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from contextvars import ContextVar
from typing import Any, Final, TypeVar

__all__ = ["FLOW_VARIABLES", "flow_variable", "is_collecting", "this_thread"]

T = TypeVar("T")

FLOW_VARIABLES: Final[list[ContextVar[Any]]] = []
"""All of them: a framework that copies a context to another flow must leave these out."""


def flow_variable(name: str, default: T) -> ContextVar[T]:
    """Return a new context variable that belongs to a flow."""
    variable = ContextVar(name, default=default)
    FLOW_VARIABLES.append(variable)
    return variable


class _Key(threading.local):
    def __init__(self) -> None:
        self.key = object()


_key: Final = _Key()


def this_thread() -> object:
    """Return an object that stands for this thread; its number may be that of a later thread once it has ended."""
    return _key.key


_phases: Final = OrderedDict(start=None, stop=None)
"""The phases of the collector of reference cycles; the one in which it is comes last."""

# No Python code: a signal handler could raise its error in that, where it would be lost, such as a time limit.
gc.callbacks.append(_phases.move_to_end)  # type: ignore[arg-type]  # the second argument, the collector's data, is true


def is_collecting() -> bool:
    """Return whether the collector of reference cycles is at work, perhaps in another thread.

    A finalizer that it calls must not set a context variable: CPython 3.11 may collect inside a change of the same
    context, and crashes then.
    """
    return next(reversed(_phases)) == "start"
