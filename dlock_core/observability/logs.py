"""Logging: `logs.install()` writes one record per event, with its data as fields for structured logs."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from dlock_core.observability import hooks
from dlock_core.observability.patterns import pattern
from dlock_core.owner import request_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["LEVELS", "install"]

LEVELS: Final[Mapping[str, int]] = {
    "acquired": logging.DEBUG,
    "released": logging.DEBUG,
    "timeout": logging.INFO,
    "conflict": logging.INFO,
    "retry": logging.INFO,
    "lost": logging.WARNING,
    "forced": logging.WARNING,
    "unavailable": logging.ERROR,
}


def install(logger: str = "dlock.events", levels: Mapping[str, int] = LEVELS) -> Callable[[], None]:
    """Log each event of this process from now on, and return the function that ends that.

    The fields of a record are dlock_event, dlock_lock, dlock_pattern, dlock_token, dlock_seconds, dlock_reason,
    dlock_contended and dlock_request.

    Args:
        logger: The name of the logger.
        levels: The level of each kind of event; a kind that is left out is not logged.

    Raises ValueError for a kind of event that does not exist, and TypeError for a level that is no number.
    """
    if unknown := levels.keys() - set(hooks.KINDS):
        raise ValueError(f"there is no event {min(unknown)!r}, only: {', '.join(hooks.KINDS)}")
    for kind, level in levels.items():
        if not isinstance(level, int):
            raise TypeError(f"the level of {kind!r} is a number such as logging.INFO, not {level!r:.80}")
    hook = partial(_log, logging.getLogger(logger), dict(levels))
    hooks.subscribe(hook)
    return partial(hooks.unsubscribe, hook)


def _log(logger: logging.Logger, levels: Mapping[str, int], event: hooks.Event) -> None:
    level = levels.get(event.kind)
    if level is not None and logger.isEnabledFor(level):
        logger.log(level, "%s %s", event.kind, event.name, extra=_fields(event))


def _fields(event: hooks.Event) -> dict[str, object]:
    return {
        "dlock_event": event.kind,
        "dlock_lock": event.name,
        "dlock_pattern": pattern(event.name),
        "dlock_token": event.token,
        "dlock_seconds": event.seconds,
        "dlock_reason": event.reason,
        "dlock_contended": event.contended,
        "dlock_request": request_line.get(),
    }
