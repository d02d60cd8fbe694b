"""A database for the inspector: `dlock_core.inspect.take_snapshot(stores, [database(engine)])`."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import NullPool
from sqlalchemy.util import greenlet_spawn

from dlock_core.inspect.reader import CONNECT_TIMEOUT_S, DatabaseReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import URL, Engine

__all__ = ["database"]

_TIMEOUT_ARGUMENTS: Final = {
    "psycopg": "connect_timeout",
    "psycopg2": "connect_timeout",
    "mysqldb": "connect_timeout",
    "pymysql": "connect_timeout",
    "aiomysql": "connect_timeout",
    "asyncpg": "timeout",
}


_FENCE_REMEDY: Final = "sqla_dlock.fencing.metadata.create_all(engine); in Django manage.py migrate django_dlock"


def database(given: str | Engine | AsyncEngine, alias: str | None = None) -> DatabaseReader:
    """Return a database for the inspector; it opens a dedicated connection, outside any pool, at the first query.

    Args:
        given: A URL, or an engine, whose driver and arguments are used.
        alias: The name in listings; by default the name of the database.

    Raises ArgumentError for text that is no URL, and ImportError if the driver is missing.
    """
    engine = _engine(given)
    title = alias or engine.url.database or engine.dialect.name
    return DatabaseReader(title, _vendor(engine), partial(_Session, engine), fence_remedy=_FENCE_REMEDY)


def _engine(given: str | Engine | AsyncEngine) -> Engine:
    """Return an engine that shares only the way to connect with the one that was given."""
    if isinstance(given, str):
        url = make_url(given)
        timeout = _TIMEOUT_ARGUMENTS.get(url.get_dialect().driver)
        connect = {timeout: CONNECT_TIMEOUT_S} if timeout else {}
        return create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args=connect)
    engine = given.sync_engine if isinstance(given, AsyncEngine) else given
    return create_engine(engine.url, pool=engine.pool.recreate(), isolation_level="AUTOCOMMIT")


def _refuse_missing_file(url: URL) -> None:
    """Raise FileNotFoundError for a missing file: SQLite would create an empty database there."""
    path = url.database or ":memory:"
    if url.get_backend_name() == "sqlite" and not path.startswith((":", "file:")) and not Path(path).exists():
        raise FileNotFoundError(f"the SQLite database {path} does not exist: check the path in its URL")


def _vendor(engine: Engine) -> str:
    return "mariadb" if getattr(engine.dialect, "is_mariadb", False) else engine.dialect.name


class _Session:
    def __init__(self, engine: Engine) -> None:
        _refuse_missing_file(engine.url)
        self._engine = engine
        self._loop = asyncio.new_event_loop() if engine.dialect.is_async else None
        try:
            self._connection = self._call(engine.connect)
        except BaseException:
            self._end()
            raise

    def execute(self, sql: str, params: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return self._call(self._execute, sql, params)  # type: ignore[no-any-return]

    def close(self) -> None:
        try:
            self._call(self._connection.close)
            self._call(self._engine.dispose)
        finally:
            self._end()

    def _execute(self, sql: str, params: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        number = count()
        words = "".join(piece if n == 0 else f":p{next(number)}{piece}" for n, piece in enumerate(sql.split("%s")))
        result = self._connection.execute(text(words), {f"p{n}": each for n, each in enumerate(params)})
        return [tuple(row) for row in result] if result.returns_rows else []

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._loop is None:
            return function(*args)
        return self._loop.run_until_complete(greenlet_spawn(function, *args))

    def _end(self) -> None:
        if self._loop is not None:
            self._loop.close()
