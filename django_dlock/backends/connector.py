"""Separate connections to the database of a DATABASES alias, made as Django makes them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from django.db import Error, connections

from dlock_core.backends.sql import Pool, in_threads, read_in_thread, shut_socket, socket_of, within
from dlock_core.backends.sql.sqlite import SQLiteConnector
from dlock_core.sql.database import cursor_of, pyformat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from django.db.backends.base.base import BaseDatabaseWrapper

    from dlock_core.backends.sql import Connection, Connector

__all__ = ["pool_of"]

VENDORS: Final = ("postgresql", "mysql", "sqlite")


def pool_of(alias: str, *, timeout: float = 5.0) -> Pool:
    """Return connections to the database of an alias: its settings, but neither its threads' connections nor its pool.

    Raises ValueError for an alias that DATABASES does not have, and for a database that dlock does not know.
    """
    return Pool(_connector(alias), timeout=timeout)


def _connector(alias: str) -> Connector:
    if alias not in connections.settings:
        raise ValueError(f"DATABASES has no alias {alias!r}, only: {', '.join(connections.settings)}")
    vendor = connections[alias].vendor
    if vendor == "sqlite":
        return SQLiteConnector(_title(alias), lambda: str(connections.settings[alias]["NAME"]))
    if vendor not in VENDORS:
        raise ValueError(f"no leases on {vendor} ({_title(alias)}): use one of {', '.join(VENDORS)}")
    return DjangoConnector(alias)


def _title(alias: str) -> str:
    return f"the database {alias!r}"


class DjangoConnector:
    """PostgreSQL, MariaDB or MySQL behind an alias."""

    call = staticmethod(in_threads)

    def __init__(self, alias: str) -> None:
        self.alias, self.title = alias, _title(alias)
        self.remedy = f"python manage.py migrate --database {alias}"
        wrapper: Any = connections[alias]
        self._kind = type(wrapper)
        self.vendor: str = wrapper.vendor
        self.errors: tuple[type[Exception], ...] = (Error, wrapper.Database.Error)

    def connect(self, limit: float) -> Connection:
        return within(limit, self._open)

    def _open(self) -> Connection:
        settings = connections.settings[self.alias]  # now: tests give it the name of another database
        options = {key: value for key, value in settings["OPTIONS"].items() if key != "pool"}
        wrapper = self._kind({**settings, "OPTIONS": options, "AUTOCOMMIT": True}, f"{self.alias} (dlock)")
        wrapper.inc_thread_sharing()
        try:
            wrapper.connect()
        except BaseException:  # of a receiver of `connection_created`, too
            wrapper.close()
            raise
        return DjangoConnection(wrapper)


class DjangoConnection:
    """One connection, used below Django's own cursors: no log of queries, no wrappers, no check of threads."""

    def __init__(self, wrapper: BaseDatabaseWrapper) -> None:
        self.driver: Any = wrapper.connection
        self.vendor = "mariadb" if getattr(wrapper, "mysql_is_mariadb", False) else wrapper.vendor
        self._wrapper, self._changed = wrapper, 0
        self._socket = socket_of(self.driver)

    def execute(self, sql: str, params: Mapping[str, Any] = {}) -> list[tuple[Any, ...]]:
        with cursor_of(self.driver) as cursor:
            cursor.execute(pyformat(sql), params)
            self._changed = cursor.rowcount
            return list(map(tuple, cursor.fetchall())) if cursor.description else []

    def changed(self) -> int:
        return self._changed

    def listen(self, channel: str, heard: Callable[[str], None], ended: Callable[[], None]) -> None:
        self.execute(f"LISTEN {channel}")
        read_in_thread(self, heard, ended)

    def close(self) -> None:
        self._socket = -1  # from now on the number may belong to another socket
        with suppress(Exception):
            self.driver.close()

    def abort(self) -> None:
        shut_socket(self._socket)
