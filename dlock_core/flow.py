"""Context variables of a flow: what a thread or task holds and does, and what the work that it starts inherits."""

from __future__ import annotations

import gc
import threading
from contextvars import ContextVar
from typing import Any, Final, TypeVar

__all__ = ["FLOW_VARIABLES", "flow_variable", "is_collecting"]

T = TypeVar("T")

FLOW_VARIABLES: Final[list[ContextVar[Any]]] = []
"""All of them: a framework that copies a context to another flow must leave these out."""


def flow_variable(name: str, default: T) -> ContextVar[T]:
    """Return a new context variable that belongs to a flow."""
    variable = ContextVar(name, default=default)
    FLOW_VARIABLES.append(variable)
    return variable


_collecting: Final[set[int]] = set()
"""The threads in which the collector of reference cycles is at work."""


def _note_collection(phase: str, _: dict[str, int]) -> None:
    """Follow the collector; see `gc.callbacks`."""
    (_collecting.add if phase == "start" else _collecting.discard)(threading.get_ident())


gc.callbacks.append(_note_collection)


def is_collecting() -> bool:
    """Return whether the collector of reference cycles is at work in this thread.

    A finalizer that it calls must not set a context variable: CPython 3.11 may collect inside a change of the same
    context, and crashes then.
    """
    return threading.get_ident() in _collecting
