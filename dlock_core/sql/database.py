"""A database as the inspector, the doctor and the fence see it: statements with `:name` parameters, and session ids."""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Database", "cursor_of"]


class Database(Protocol):
    """A database that is asked for its locks, on a connection of its own and never in the caller's transaction."""

    @property
    def alias(self) -> str:
        """What it is called in listings."""

    @property
    def vendor(self) -> str:
        """The database: postgresql, mysql, mariadb or sqlite; may have to ask it, see `query`."""

    @property
    def fence_remedy(self) -> str:
        """What makes the fence table where it is missing: a command or a call."""

    def query(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Read rows, `%s` standing for each parameter; raises BackendUnavailable, within a few seconds."""

    def close(self) -> None:
        """Close the connection that `query` has opened."""


_PREFIX: Final = {"postgresql": "pg", "mysql": "my", "mariadb": "my"}


def session_id(vendor: str, connection: Any, database: str | None) -> str | None:
    """Name the session of a driver's connection, such as "pg:4711/shop", without asking it; None if it cannot be told.

    Behind a proxy that shares sessions the number is the proxy's own, and means nothing to the database.
    """
    prefix, number = _PREFIX.get(vendor), _number(connection)
    return f"{prefix}:{number}/{database}" if prefix and number and database else None


def _number(connection: Any) -> int | None:
    """Ask a connection of psycopg, psycopg2, asyncpg, mysqlclient, PyMySQL or aiomysql for its session's number."""
    info = getattr(connection, "info", None)  # of mysqlclient it is a method
    if (number := getattr(info, "backend_pid", None)) is not None:
        return int(number)
    for method in ("get_server_pid", "thread_id"):
        if (number := getattr(connection, method, None)) is not None:
            return int(number())
    return None


def comment(holder: str) -> str:
    """Write the mark of a holder, for statements under its lease where the session has no better place for it."""
    return f"/* dlock:{holder[:8]} */ "


_PARAMETER: Final = re.compile(r"(?<!:):(\w+)")


@lru_cache(maxsize=256)
def pyformat(sql: str) -> str:
    """Write them as %(name)s."""
    return _PARAMETER.sub(r"%(\1)s", sql.replace("%", "%%"))


@lru_cache(maxsize=64)
def numbered(sql: str) -> tuple[str, tuple[str, ...]]:
    """Write them as $1, $2, and tell whose value each is."""
    names = tuple(dict.fromkeys(_PARAMETER.findall(sql)))
    return _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", sql), names


@contextmanager
def cursor_of(connection: Any) -> Iterator[Any]:
    """Yield a cursor for a block; mysqlclient's `close()` fails after a Ctrl-C, which would hide the Ctrl-C."""
    cursor = connection.cursor()
    try:
        yield cursor
    except BaseException:
        with suppress(Exception):
            cursor.close()
        raise
    cursor.close()
