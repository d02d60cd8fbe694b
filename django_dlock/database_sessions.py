"""The database sessions of this thread, by which the inspector knows them again."""

from __future__ import annotations

from typing import Any

from django.db import connections

from dlock_core import database_session
from dlock_core.owner import in_task

__all__ = ["open_sessions"]


def open_sessions() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name those that no other thread uses, and those of a pool, in whose transaction we are; asks nobody."""
    found: tuple[list[str], list[str]] = [], []
    for connection in () if in_task() else connections.all(initialized_only=True):
        if connection.connection is None or connection.vendor not in ("postgresql", "mysql"):
            continue
        settings: dict[str, Any] = connection.settings_dict
        party = database_session.party(connection.vendor, connection.connection, settings["NAME"])
        if party is not None:
            is_pooled = bool(settings["OPTIONS"].get("pool"))
            found[is_pooled].append(party)
    return tuple(found[0]), tuple(found[1])
