"""One driver at work, for threads or for asyncio: it runs what a test does in a transaction."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from dlock_core.transactions.retry import DatabaseFailure, classify
from tests import databases
from tests.mysql_server import MYSQLD
from tests.sqla_dlock.engines import server_of

T = TypeVar("T")

SHARE = {"postgresql": "FOR SHARE", "mariadb": "FOR SHARE" if MYSQLD else "LOCK IN SHARE MODE"}


class Party:
    """Sessions of one engine, and what another session (by the server's driver for threads) sees of their work."""

    def __init__(self, name: str, engine: Engine | AsyncEngine, other: Engine) -> None:
        self.server = server_of(name) or "sqlite"
        self.engine, self.others = engine, other
        self.sql: list[str] = []
        """The statements that were sent by this engine."""
        event.listen(getattr(engine, "sync_engine", engine), "before_cursor_execute", self._sent)

    async def transact(self, work: Callable[[Session], T], **options: Any) -> T:
        """Do `work` in a transaction of a new session, and commit."""
        if isinstance(self.engine, AsyncEngine):
            async with AsyncSession(self.engine, **options) as session, session.begin():
                return await session.run_sync(work)
        return await asyncio.to_thread(self._transact, work, options)

    def _transact(self, work: Callable[[Session], T], options: dict[str, Any]) -> T:
        with Session(self.engine, **options) as session, session.begin():
            return work(session)

    def _sent(self, connection: object, cursor: object, statement: str, *rest: object) -> None:
        self.sql.append(statement)

    @contextmanager
    def other_transaction(self) -> Iterator[Connection]:
        """Open a transaction of another session, and roll it back at the end."""
        with self.others.connect() as other, other.begin() as transaction:
            try:
                yield other
            finally:
                transaction.rollback()

    def is_free(self, row: Any, clause: str = "FOR UPDATE", table: str | None = None) -> bool:
        """Return whether another session could take this lock now."""
        with self.other_transaction() as other:
            try:
                lock_there(other, row, f"{clause} NOWAIT", table)
            except DBAPIError as error:
                if classify(error) is DatabaseFailure.LOCK_TIMEOUT:
                    return False
                raise
            return True

    @property
    def share(self) -> str:
        return SHARE[self.server]

    async def until_blocked(self) -> None:
        await asyncio.to_thread(self._until_blocked)

    def _until_blocked(self) -> None:
        until_blocked(self.others)


def until_blocked(engine: Engine) -> None:
    """Wait until some session waits for a lock of another, as the server sees it."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as watcher:
        server = "postgresql" if engine.dialect.name == "postgresql" else "mariadb"
        databases.until_blocked(server, lambda sql: [tuple(row) for row in watcher.exec_driver_sql(sql)])


def lock_there(other: Connection, row: Any, clause: str = "FOR UPDATE", table: str | None = None) -> None:
    other.exec_driver_sql(f"SELECT 1 FROM {table or row.__tablename__} WHERE id = {row.id} {clause}")
