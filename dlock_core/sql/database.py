"""What the core needs of a database: a port to read from it, ids of its sessions, and `:name` parameters."""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Database", "cursor_of"]


class Database(Protocol):
    """A database whose locks the inspector reads, on a dedicated connection and never in the caller's transaction."""

    @property
    def alias(self) -> str:
        """The name of the database in listings."""

    @property
    def vendor(self) -> str:
        """The kind of database: postgresql, mysql, mariadb or sqlite. It may take a query to know; see `query`."""

    @property
    def fence_remedy(self) -> str:
        """The command or call that creates a missing fence table, for messages."""

    def query(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query with `%s` parameters; raises BackendUnavailable within a few seconds."""

    def close(self) -> None:
        """Close the connection that `query` has opened."""


_PREFIX: Final = {"postgresql": "pg", "mysql": "my", "mariadb": "my"}


def session_id(vendor: str, connection: Any, database: str | None) -> str | None:
    """Return the id of a connection's session, such as "pg:4711/shop", without a query; None if the driver has none.

    Behind a proxy that shares sessions, the number is the proxy's and means nothing to the database.
    """
    prefix, number = _PREFIX.get(vendor), _number(connection)
    return f"{prefix}:{number}/{database}" if prefix and number and database else None


def _number(connection: Any) -> int | None:
    """Return the session's number from a connection of psycopg, psycopg2, asyncpg, mysqlclient, PyMySQL or aiomysql."""
    for part in ("pgconn", "info"):  # of psycopg, and of psycopg2; a method in mysqlclient, which has no backend_pid
        if (number := getattr(getattr(connection, part, None), "backend_pid", None)) is not None:
            return int(number)
    for method in ("get_server_pid", "thread_id"):
        if (number := getattr(connection, method, None)) is not None:
            return int(number())
    return None


IDLE: Final = 0
"""libpq's PQTRANS_IDLE: no transaction is open."""
IN_ERROR: Final = 3
"""libpq's PQTRANS_INERROR: PostgreSQL has undone the transaction after an error, and treats COMMIT as a ROLLBACK."""


def transaction_status(connection: Any) -> int | None:
    """Return libpq's status of the transaction from a connection of psycopg or psycopg2, None from any other."""
    for part in ("pgconn", "info"):
        if (status := getattr(getattr(connection, part, None), "transaction_status", None)) is not None:
            return int(status)
    return None


def comment(holder: str) -> str:
    """Return an SQL comment that marks statements under a lease, where the session has no better place for the mark."""
    return f"/* dlock:{holder[:8]} */ "


_PARAMETER: Final = re.compile(r"(?<!:):([A-Za-z_]\w*)")


@lru_cache(maxsize=256)
def pyformat(sql: str) -> str:
    """Return the SQL with `%(name)s` in the place of each `:name`."""
    return _PARAMETER.sub(r"%(\1)s", sql.replace("%", "%%"))


@lru_cache(maxsize=64)
def numbered(sql: str) -> tuple[str, tuple[str, ...]]:
    """Return the SQL with `$1`, `$2` in the place of each `:name`, and the names in the order of their numbers."""
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
