"""Context variables of a flow: what a thread or task holds and does, and what the work that it starts inherits."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final, TypeVar

__all__ = ["FLOW_VARIABLES", "flow_variable"]

T = TypeVar("T")

FLOW_VARIABLES: Final[list[ContextVar[Any]]] = []
"""All of them: a framework that copies a context to another flow must leave these out."""


def flow_variable(name: str, default: T) -> ContextVar[T]:
    """Return a new context variable that belongs to a flow."""
    variable = ContextVar(name, default=default)
    FLOW_VARIABLES.append(variable)
    return variable
