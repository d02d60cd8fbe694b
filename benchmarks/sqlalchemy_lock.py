"""What a lock around a transaction costs in SQLAlchemy, beside the same transaction without one.

    python -m benchmarks.sqlalchemy_lock --rounds 15 --count 100

One operation reads a row, writes it and commits, in a session of its own, on PostgreSQL; leases are in Redis. The
servers are on our CPU.
"""

from collections.abc import Callable
from typing import Any

from redis import Redis
from redis.lock import Lock as RedisPyLock
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy_dlock import create_sadlock

from benchmarks import measure
from dlock_core.backend import Backend
from dlock_core.stores import connect
from sqla_dlock import lock, lock_row
from sqla_dlock.fencing import metadata
from tests import servers


class Base(DeclarativeBase):
    """Of the row that is locked."""


class Counter(Base):
    __tablename__ = "counter"

    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


def contestants(engine: Engine, backend: Backend, client: "Redis[bytes]") -> dict[str, measure.Operation]:
    def add(session: Session) -> None:
        session.get_one(Counter, 1).value += 1
        session.commit()

    def bare() -> None:
        with Session(engine) as session:
            add(session)

    def row_lock() -> None:
        with Session(engine) as session:
            lock_row(session, Counter, 1).value += 1
            session.commit()

    def leased(*, fence: bool) -> Callable[[], None]:
        def operation() -> None:
            with Session(engine) as session, lock(session, "counter", 1, fence=fence, store=backend):
                add(session)

        return operation

    def redis_py() -> None:
        with Session(engine) as session, RedisPyLock(client, "counter:1", timeout=30):
            add(session)

    def advisory(*, xact: bool) -> Callable[[], None]:
        def operation() -> None:
            with Session(engine) as session:
                if xact:  # it ends with the transaction: nothing to release
                    create_sadlock(session, "counter:1", xact=True).acquire()
                    add(session)
                else:
                    with engine.connect() as connection, create_sadlock(connection, "counter:1"):
                        add(session)

        return operation

    return {
        "no lock": bare,
        "lock_row()": row_lock,
        "lock(), fence=False": leased(fence=False),
        "lock()": leased(fence=True),
        "redis-py Lock around it": redis_py,
        "sqlalchemy-dlock, session": advisory(xact=False),
        "sqlalchemy-dlock, xact": advisory(xact=True),
    }


def statements(engine: Engine, operation: measure.Operation) -> int:
    sent: list[Any] = []
    event.listen(engine, "before_cursor_execute", listener := lambda *_: sent.append(None))
    operation()
    event.remove(engine, "before_cursor_execute", listener)
    return len(sent)


def main() -> None:
    options = measure.arguments(__doc__, rounds=15, count=100)
    report = measure.Report(options.format)
    with measure.scratch() as directory:
        postgresql = servers.postgresql(directory / "postgresql", servers.free_port())
        redis = servers.redis(directory / "redis", "--appendonly", "no")
        for server in (postgresql, redis):
            server.start()
        engine = create_engine(f"postgresql+psycopg://postgres@127.0.0.1:{postgresql.port}/postgres", pool_size=2)
        for tables in (Base.metadata, metadata):
            tables.create_all(engine)
        with Session(engine) as session:
            session.add(Counter(id=1))
            session.commit()
        ways = contestants(engine, connect(redis.url), Redis(port=redis.port))
        with engine.connect() as one, engine.connect() as two:
            backends = [each.exec_driver_sql("SELECT pg_backend_pid()").scalar_one() for each in (one, two)]
        pids = [postgresql.process.pid, redis.process.pid, *backends]
        measure.pin("same", *pids)
        runs = measure.interleave(ways, "no lock", options.rounds, options.count, pids)
        rows = [
            {"contestant": name, **runs[name].row(), "statements": statements(engine, way)}
            for name, way in ways.items()
        ]
        report.add("Read, write and commit a row, PostgreSQL", rows)
        engine.dispose()
        for server in (postgresql, redis):
            server.stop()
    report.end()


if __name__ == "__main__":
    main()
