"""Measure what a version costs in SQLAlchemy: a flush of 1 and of 100 rows, and one row saved by itself.

    python -m benchmarks.sqlalchemy_flush --rounds 15 --count 30

Each table shows ratios to the flush of the same rows without a version. The server shares our CPU.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, String, create_engine, event, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks import measure
from sqla_dlock.versions import VersionedMixin, save_with_version
from tests import servers


class Base(DeclarativeBase):
    """The base class of the rows that are flushed."""


class BareOrder(Base):
    __tablename__ = "bare_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)
    note: Mapped[str] = mapped_column(String(50), default="")


class CountedOrder(Base):
    """An order that SQLAlchemy alone versions."""

    __tablename__ = "counted_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)
    note: Mapped[str] = mapped_column(String(50), default="")
    version: Mapped[int] = mapped_column()

    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


class Order(VersionedMixin, Base):
    __tablename__ = "order"

    id: Mapped[int] = mapped_column(primary_key=True)
    cents: Mapped[int] = mapped_column(default=0)
    note: Mapped[str] = mapped_column(String(50), default="")


def flush(session: Session, rows: Sequence[Any]) -> None:
    for row in rows:
        row.cents += 1
    session.flush()


def save(session: Session, rows: Sequence[Any]) -> None:
    for row in rows:
        row.cents += 1
        save_with_version(session, row)


@contextmanager
def contestants(engine: Engine, number: int) -> Iterator[dict[str, measure.Operation]]:
    """Yield the ways to write rows, all in one transaction that stays open."""
    with engine.connect() as connection, connection.begin() as transaction:
        ways = {
            "flush, no version": flushing(connection, BareOrder, number, flush),
            "flush, version_id_col": flushing(connection, CountedOrder, number, flush),
            "flush, VersionedMixin": flushing(connection, Order, number, flush),
        }
        if number == 1:
            ways["save_with_version()"] = flushing(connection, Order, number, save)
        yield ways
        transaction.rollback()


def flushing(connection: Connection, kind: type[Any], number: int, how: Callable[..., None]) -> measure.Operation:
    session = Session(connection)
    session.add_all([kind() for _ in range(number)])
    session.flush()
    rows = session.scalars(select(kind).order_by(kind.id.desc()).limit(number)).all()
    return functools.partial(how, session, rows)


def statements(engine: Engine, operation: measure.Operation) -> int:
    sent = 0

    def count(*_: object) -> None:
        nonlocal sent
        sent += 1

    event.listen(engine, "before_cursor_execute", count)
    operation()
    event.remove(engine, "before_cursor_execute", count)
    return sent


def table(engine: Engine, number: int, options: Any, pids: list[int]) -> list[measure.Row]:
    with contestants(engine, number) as ways:
        count = max(1, options.count // number**0.5)
        runs = measure.interleave(ways, next(iter(ways)), options.rounds, int(count), pids)
        return [
            {"contestant": name, **runs[name].row(), "statements": statements(engine, operation)}
            for name, operation in ways.items()
        ]


@contextmanager
def engines(directory: Path) -> Iterator[list[tuple[Engine, list[int]]]]:
    """Yield PostgreSQL, if it is installed, and SQLite, each with the pids of its server."""
    found = [(create_engine(f"sqlite:///{directory / 'db.sqlite3'}"), list[int]())]
    server = None
    try:
        server = servers.postgresql(directory / "postgresql", servers.free_port())
    except servers.ServerMissing as missing:
        print(missing, file=sys.stderr)
    else:
        server.start()
        url = f"postgresql+psycopg://postgres@127.0.0.1:{server.port}/postgres"
        found.insert(0, (create_engine(url, pool_size=1), [server.process.pid]))
    for engine, _ in found:
        Base.metadata.create_all(engine)
    yield found
    for engine, _ in found:
        engine.dispose()
    if server:
        server.stop()


def main() -> None:
    options = measure.arguments(__doc__, rounds=15, count=100)
    report = measure.Report(options.format)
    with measure.scratch() as directory, engines(directory) as found:
        for engine, pids in found:
            with engine.connect() as connection:
                backend = [connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()] if pids else []
            measure.pin("same", *pids, *backend)
            for number in (1, 100):
                title = f"Flush of {number} row{'s' * (number > 1)}, {engine.name}"
                report.add(title, table(engine, number, options, [*pids, *backend]))
    report.end()


if __name__ == "__main__":
    main()
