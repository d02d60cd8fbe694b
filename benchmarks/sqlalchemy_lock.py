"""Measure what a lock around a transaction costs in SQLAlchemy, against the same transaction without one.

    python -m benchmarks.sqlalchemy_lock --rounds 15 --count 100 [--latency 0.5]

One operation reads a row, writes it and commits, in its own session, on PostgreSQL; leases are in Redis. The servers
share our CPU; with --latency, they are a round trip of that many milliseconds away, and every process may use all CPUs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from redis import Redis
from redis.lock import Lock as RedisPyLock
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy_dlock import create_sadlock

from benchmarks import measure
from benchmarks.distance import away
from dlock_core.backend import Backend
from dlock_core.stores import connect
from sqla_dlock import configure, lock, lock_row
from sqla_dlock.fencing import metadata
from tests import servers

FLOOR: Final = "no lock"


class Base(DeclarativeBase):
    """The base class of the row that is locked."""


class Counter(Base):
    __tablename__ = "counter"

    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


def contestants(engine: Engine, backend: Backend, client: "Redis[bytes]") -> dict[str, measure.Operation]:
    configure(default=backend)

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
            with Session(engine) as session, lock(session, "counter", 1, fence=fence):
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
        FLOOR: bare,
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


@contextmanager
def running(latency: float) -> Iterator[tuple[Engine, int, list[int]]]:
    """Start PostgreSQL, with our tables, and Redis; yield the engine, the port of Redis, and all pids."""
    with measure.scratch() as directory, measure.redis_server() as redis, ExitStack() as network:
        postgresql = servers.postgresql(directory / "postgresql", servers.free_port())
        postgresql.start()
        port = network.enter_context(away(postgresql.port, latency))
        engine = create_engine(f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres", pool_size=2)
        for tables in (Base.metadata, metadata):
            tables.create_all(engine)
        with Session(engine) as session:
            session.add(Counter(id=1))
            session.commit()
        with engine.connect() as one, engine.connect() as two:
            backends = [each.exec_driver_sql("SELECT pg_backend_pid()").scalar_one() for each in (one, two)]
        yield engine, network.enter_context(away(redis.port, latency)), [
            postgresql.process.pid, redis.process.pid, *backends
        ]  # fmt: skip
        engine.dispose()
        postgresql.stop()


def main() -> None:
    options = measure.arguments(__doc__, rounds=15, count=100, latency=0.0)
    report = measure.Report(options.format)
    with running(options.latency) as (engine, port, pids):
        every = contestants(engine, connect(f"redis://127.0.0.1:{port}/0"), Redis(port=port))
        ways = measure.chosen(every, options.only, FLOOR)
        if not options.latency:
            measure.pin("same", *pids)
        runs = measure.interleave(ways, FLOOR, options.rounds, options.count, pids)
        rows = [
            {"contestant": name, **runs[name].row(), "statements": statements(engine, way)}
            for name, way in ways.items()
        ]
        where = f", {options.latency} ms away" if options.latency else ""
        report.add(f"Read, write and commit a row, PostgreSQL{where}", rows)
    report.end()


if __name__ == "__main__":
    main()
