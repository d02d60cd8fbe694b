"""Calls what was registered for an event that has happened and cannot be taken back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["call_all"]

logger = logging.getLogger("dlock")


def call_all(steps: Iterable[Callable[[], object]]) -> None:
    """Call each step whatever the others raise: an Exception is logged, an interrupt is raised when all were called."""
    interrupt: BaseException | None = None
    for step in steps:
        try:
            step()
        except Exception:
            logger.exception("A callback at the end of a transaction failed: %r", step)
        except BaseException as error:  # noqa: BLE001 - the others are called first
            interrupt = error
    if interrupt is not None:
        raise interrupt
