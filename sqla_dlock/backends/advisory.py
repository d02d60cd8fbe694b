"""Advisory locks in the database of an Engine or AsyncEngine, of the session's own transaction or of a connection."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any
from weakref import ref

from sqlalchemy.util.concurrency import in_greenlet

from dlock_core.backends import advisory as core
from dlock_core.backends.advisory import PREFIX, CallerTransaction
from dlock_core.errors import NotSupported
from sqla_dlock.backends.connector import as_driver_takes, pool_of
from sqla_dlock.backends.table import engine_of
from sqla_dlock.begun import is_autocommit
from sqla_dlock.transactions import connections_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.orm import Session

    from dlock_core.backend import Backend

__all__ = ["from_engine", "from_url", "transaction_of"]


def from_engine(
    engine: Engine | AsyncEngine, *, session: bool = False, prefix: str = PREFIX, timeout: float = 5.0
) -> Backend:
    """Return the store in an engine's database, for `configure(advisory=from_engine(engine))`.

    A lock lasts as long as the transaction of the requesting Session, on PostgreSQL; with `session`, it is held on a
    dedicated connection and has a ttl. See `dlock_core.backends.advisory.advisory`.
    """
    pool = pool_of(engine, timeout=timeout)
    return core.advisory(pool, getattr(engine, "sync_engine", engine), session=session, prefix=prefix)


def from_url(url: str, *, prefix: str = PREFIX, timeout: float = 5.0) -> Backend:
    """Return the store of a URL such as "advisory+postgresql+psycopg://…", whose locks are held by sessions.

    An engine made from a URL is not the one of a Session, so a transaction of the Session could not hold them.
    """
    return from_engine(engine_of(url), session=True, prefix=prefix, timeout=timeout)


def transaction_of(session: Session, backend: Backend, *, old_snapshot: bool) -> CallerTransaction | None:
    """Return the session's transaction in the database of such a store; begins one, as any statement does.

    Raises NotSupported if one of the two is asynchronous: a wait of the other would block the event loop.
    """
    engine: Engine = backend.capabilities.transaction_database
    near = (*connections_of(session), session.bind)
    bind = next((each for each in near if each is not None and each.dialect is engine.dialect), engine)
    if bind is engine and (not in_greenlet() if engine.dialect.is_async else _is_of_async_session(session)):
        given, other = ("an AsyncEngine", "a Session") if engine.dialect.is_async else ("an Engine", "an AsyncSession")
        raise NotSupported(
            f"this store locks inside transactions of {given}, and {other} cannot have one: pass another store, made "
            "by from_engine() of the engine that the session uses"
        )
    connection: Connection = session.connection(bind_arguments={"bind": bind})
    return None if is_autocommit(connection) else CallerTransaction(_Connection(connection), old_snapshot)


def _is_of_async_session(session: Session) -> bool:
    """Return whether an AsyncSession has made this session; no I/O, and no import: greenlet may be missing."""
    loaded = sys.modules.get("sqlalchemy.ext.asyncio")
    return loaded is not None and loaded.async_session(session) is not None


class _Connection:
    """Sends statements in the session's transaction, or none once the session has forgotten it."""

    def __init__(self, connection: Connection) -> None:
        # A lease may be kept longer than its transaction, which only the collector ends if a ROLLBACK has failed.
        self._connection = ref(connection)

    async def row(self, sql: str, params: Mapping[str, Any]) -> tuple[Any, ...] | None:
        if (connection := self._connection()) is None:
            return None
        statement, given = as_driver_takes(sql, params, connection.dialect)
        return connection.exec_driver_sql(statement, given).first()

    async def tell(self, sql: str) -> None:
        if (connection := self._connection()) is not None:
            connection.exec_driver_sql(sql)
