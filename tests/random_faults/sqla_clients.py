"""Sections that use SQLAlchemy, with sessions and with asyncpg, and the workers' engines."""

import contextlib
from typing import Any

from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_dlock import (
    FencedMixin,
    VersionedMixin,
    alock,
    configure,
    delete_with_version,
    lock,
    retry_on_conflict,
    save_with_version,
)
from sqla_dlock.backends.advisory import from_engine
from tests.random_faults.attempt import Attempt
from tests.random_faults.items import FENCED
from tests.random_faults.sections import READ, Save, Steps, Turn, add_anew, remake

POSTGRESQL = {"connect_timeout": 5, "options": "-c lock_timeout=8000"}
SCHEMA = FENCED.partition(".")[0]
NO_SCHEMA = {"schema_translate_map": {SCHEMA: None}}
MARIADB = {"connect_timeout": 5, "read_timeout": 12, "write_timeout": 12}


def engine_of(database: str, config: dict[str, Any]) -> Engine:
    where = config["databases"][database]
    if database == "postgresql":
        url = f"postgresql+psycopg://postgres@127.0.0.1:{where}/postgres"
        return create_engine(url, connect_args=POSTGRESQL, pool_timeout=5, execution_options=NO_SCHEMA)
    if database == "mariadb":
        url = f"mariadb+pymysql://root@127.0.0.1:{where}/dlock?charset=utf8mb4"
        return create_engine(url, connect_args=MARIADB, pool_timeout=5, execution_options=NO_SCHEMA)
    engine = create_engine(f"sqlite:///{where}", connect_args={"timeout": 20}, execution_options=NO_SCHEMA)
    _begin_immediate(engine)
    return engine


def _begin_immediate(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


class SqlaClient:
    """Runs sections in a thread, with a session for each."""

    is_async = False
    databases = ("postgresql", "mariadb", "sqlite")

    def __init__(self, config: dict[str, Any]) -> None:
        self.engines = {database: engine_of(database, config) for database in config["databases"]}
        postgresql = self.engines["postgresql"]
        own = {
            "table": postgresql,
            "session": from_engine(postgresql, session=True),
            "advisory": from_engine(postgresql),
        }
        configure(**stores(config), **own)

    def play(self, attempt: Attempt) -> None:
        engine = self.engines[attempt.wish.database]
        if attempt.wish.has_version:
            self._change_row(sessionmaker(engine), attempt)
            return
        if attempt.wish.retries:
            retry_on_conflict(sessionmaker(engine))(self._once)(attempt)
            attempt.committed()
            return
        if attempt.wish.manner == "inside":
            with Session(engine) as session:
                savepoint = _begun(session, attempt)
                with _lock(session, attempt, lock) as lease:
                    attempt.granted(lease)
                    [part] = attempt.work()
                    run(part, session, attempt, savepoint)
                attempt.stage("block left")
                attempt.commits()
                session.commit()
                attempt.committed()
            return
        with Session(engine) as session, _lock(session, attempt, lock) as lease:
            attempt.granted(lease)
            for part in attempt.work():
                run(part, session, attempt)
                attempt.commits()
                session.commit()
                attempt.committed()

    def _change_row(self, maker: sessionmaker[Session], attempt: Attempt) -> None:
        if attempt.wish.retries:
            retry_on_conflict(maker)(change_row)(attempt)
        else:
            with maker.begin() as session:
                change_row(session, attempt)
        attempt.committed()

    def _once(self, session: Session, attempt: Attempt) -> None:
        attempt.granted(_lock(session, attempt, lock).acquire())
        [part] = attempt.work()
        run(part, session, attempt)
        attempt.commits()

    def clean_up(self) -> None:
        for engine in self.engines.values():
            with contextlib.suppress(Exception):
                engine.dispose()

    def close(self) -> None:
        self.clean_up()


class AsyncpgClient:
    """Runs sections in tasks, with an AsyncSession for each section."""

    is_async = True
    databases = ("postgresql",)

    def __init__(self, config: dict[str, Any]) -> None:
        url = f"postgresql+asyncpg://postgres@127.0.0.1:{config['databases']['postgresql']}/postgres"
        arguments = {"timeout": 5, "command_timeout": 12, "server_settings": {"application_name": config["name"]}}
        self.engine: AsyncEngine = create_async_engine(url, connect_args=arguments, execution_options=NO_SCHEMA)
        own = {
            "table": self.engine,
            "session": from_engine(self.engine, session=True),
            "advisory": from_engine(self.engine),
        }
        configure(**stores(config), **own)

    async def aplay(self, attempt: Attempt) -> None:
        if attempt.wish.has_version:
            async with AsyncSession(self.engine) as session, session.begin():
                await session.run_sync(change_row, attempt)
            attempt.committed()
            return
        if attempt.wish.manner == "inside":
            async with AsyncSession(self.engine) as session:
                savepoint = await session.run_sync(_begun, attempt)
                async with _lock(session, attempt, alock) as lease:
                    attempt.granted(lease)
                    [part] = attempt.work()
                    await session.run_sync(lambda session: run(part, session, attempt, savepoint))
                attempt.stage("block left")
                attempt.commits()
                await session.commit()
                attempt.committed()
            return
        async with AsyncSession(self.engine) as session, _lock(session, attempt, alock) as lease:
            attempt.granted(lease)
            for part in attempt.work():
                await session.run_sync(lambda session, part=part: run(part, session, attempt))
                attempt.commits()
                await session.commit()
                attempt.committed()

    async def aclean_up(self) -> None:
        """Do nothing: the pool discards broken connections itself."""

    async def aclose(self) -> None:
        with contextlib.suppress(Exception):
            await self.engine.dispose()


class Base(DeclarativeBase):
    pass


class Versioned(VersionedMixin, Base):
    """SQLAlchemy's class of the rows that have a version."""

    __tablename__ = "item"
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int]
    current: Mapped[int] = mapped_column(default=0)


class Fenced(FencedMixin, Base):
    """The rows that carry their own fence. The schema is only for the name of the lock, which equals Django's."""

    __tablename__, __table_args__ = "item", {"schema": SCHEMA}
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int]
    current: Mapped[int]


def change_row(session: Session, attempt: Attempt) -> None:
    """Save or recreate a row that has a version."""
    attempt.read()
    [item] = attempt.wish.items
    row = session.get_one(Versioned, item.key)
    seen = row.value
    attempt.stage("read")
    if attempt.wish.act is remake:
        delete_with_version(session, row)
        row = Versioned(name=item.key, value=seen + 1)
        session.add(row)
        session.flush()
    else:
        row.value = seen + 1
        save_with_version(session, row)
    statement, values = attempt.wrote(seen, row.version)
    session.execute(text(statement), values)
    attempt.commits()


def stores(config: dict[str, Any]) -> dict[str, Any]:
    """Return the stores with their own servers, made from their URLs."""
    from dlock_core import connect
    from dlock_core.stores import Store

    return {name: Store(name, connect(one["url"], **one["options"])) for name, one in config["stores"].items()}


def run(steps: Steps, session: Session, attempt: Attempt, savepoint: Any = None) -> None:
    """Run the steps of one transaction; the savepoint may be older than the lock."""
    rows = None
    with contextlib.suppress(StopIteration):
        while True:
            step = steps.send(rows)
            rows = None
            if isinstance(step, str):
                attempt.stage(step)
            elif isinstance(step, Save):
                session.merge(Fenced(name=step.key, value=step.value, current=step.current, dlock_token=0))
                session.flush()
            elif isinstance(step, Turn):
                savepoint = _turn(step, session, attempt, savepoint)
            else:
                result = session.execute(text(step[0]), step[1])
                rows = [tuple(row) for row in result] if result.returns_rows else None


def _turn(turn: Turn, session: Session, attempt: Attempt, savepoint: Any) -> Any:
    """Take a turn, and return the savepoint that is open afterwards."""
    if turn is Turn.SAVEPOINT:
        return savepoint or session.begin_nested()
    if turn is Turn.UNDO:
        savepoint.rollback()
    elif turn is Turn.ENTER:
        with _lock(session, attempt, lock):
            attempt.stage("inner block")
    elif turn is Turn.ACQUIRE:
        _lock(session, attempt, lock).acquire()
    return None


def _begun(session: Session, attempt: Attempt) -> Any:
    """Begin a transaction by reading; return the savepoint in which its lock is to be taken, or None."""
    session.execute(text(READ), {"item": attempt.wish.items[0].key})
    return session.begin_nested() if attempt.wish.act is add_anew else None


def _lock(session: Any, attempt: Attempt, make: Any) -> Any:
    wish = attempt.wish
    fenced = FENCED if wish.by_text else Fenced
    kinds = [fenced if item.is_fenced else "item" for item in wish.items]
    locks = [
        make(session, kind, item.key, store=item.store, **wish.options)
        for kind, item in zip(kinds, wish.items, strict=True)
    ]
    return locks[0] if len(locks) == 1 else make(*locks)
