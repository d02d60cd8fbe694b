"""The databases of DATABASES, for the inspector: `dlock_core.inspect.take_snapshot(stores, databases())`."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from django.db import connections

from dlock_core.inspect.reader import CONNECT_TIMEOUT_S, DatabaseReader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["databases"]

_TIMEOUT_OPTIONS: Final = {"postgresql": "connect_timeout", "mysql": "connect_timeout"}


def databases(aliases: Iterable[str] | None = None) -> list[DatabaseReader]:
    """Return the databases with these aliases, or all of DATABASES, for `take_snapshot`.

    Each opens a dedicated connection at its first query. Raises ConnectionDoesNotExist for an unknown alias, before any
    I/O.
    """
    return [_database(alias) for alias in (connections if aliases is None else aliases)]


def _database(alias: str) -> DatabaseReader:
    remedy = f"manage.py migrate django_dlock --database {alias}"
    return DatabaseReader(alias, connections[alias].vendor, partial(_InspectorConnection, alias), fence_remedy=remedy)


class _InspectorConnection:
    """A connection next to those that Django manages: no transaction, pool or test case of this thread uses it."""

    def __init__(self, alias: str) -> None:
        original = connections[alias]
        settings: dict[str, Any] = deepcopy(original.settings_dict)
        settings |= {"AUTOCOMMIT": True, "ATOMIC_REQUESTS": False}
        options = settings.setdefault("OPTIONS", {})
        options.pop("pool", None)
        if timeout := _TIMEOUT_OPTIONS.get(original.vendor):
            options.setdefault(timeout, CONNECT_TIMEOUT_S)
        self._connection: BaseDatabaseWrapper = type(original)(settings, alias)
        self._connection.inc_thread_sharing()  # The reader calls it from several threads, one at a time.

    def execute(self, sql: str, params: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql, params or None)
            return list(cursor.fetchall()) if cursor.description else []

    def close(self) -> None:
        self._connection.close()
