"""Holders that work step by step in their own threads, as a test directs, and engines at an isolation level."""

import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any, Self

from sqlalchemy import Connection, Engine, NullPool, create_engine, event, select, text, update
from sqlalchemy.orm import Session

from dlock_core.errors import LeaseLost
from sqla_dlock import fencing, lock
from tests.sqla_dlock.engines import URLS, begin_immediate
from tests.sqla_dlock.models import Counter

WITHIN = 60.0


class Adder:
    """Adds one to the counter by reading it and writing it, under a lock, step by step in its own thread."""

    def __init__(self, engine: Engine, *parts: Any, **options: Any) -> None:
        self.session = Session(engine)
        self.lock = lock(self.session, *(parts or ("order", 42)), **{"wait": 20, **options})
        self.seen, self._is_taken = 0, False

    def __enter__(self) -> Self:
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(LeaseLost):
            self.now(self._leave)
        self._thread.shutdown()

    def _leave(self) -> None:
        self.session.close()
        if self._is_taken:
            self.release()

    def do(self, step: Callable[..., Any], *args: Any) -> "concurrent.futures.Future[Any]":
        return self._thread.submit(step, *args)

    def now(self, step: Callable[..., Any], *args: Any) -> Any:
        return self.do(step, *args).result(WITHIN)

    def take(self) -> int:
        self.lease = self.now(self.lock.__enter__)
        self._is_taken = True
        return self.lease.token  # type: ignore[no-any-return]

    def release(self) -> None:
        self._is_taken = False
        self.lock.__exit__(None, None, None)

    def start(self) -> "concurrent.futures.Future[Any]":
        """Begin a transaction and read, in a step that may have to wait."""
        return self.do(self.read)

    def read(self) -> int:
        self.seen = self.session.scalars(select(Counter.value).where(Counter.name == "a")).one()
        return self.seen

    def write(self) -> None:
        self.now(self.session.execute, update(Counter).where(Counter.name == "a").values(value=self.seen + 1))

    def commit(self) -> None:
        self.now(self.session.commit)

    def rollback(self) -> None:
        self.now(self.session.rollback)

    def finish(self) -> None:
        self.write()
        self.commit()


def isolated(make_engine: Callable[..., Engine], name: str, level: str, **options: Any) -> Engine:
    """Make an engine with an isolation level; SQLite has IMMEDIATE and DEFERRED."""
    if name != "sqlite":
        return make_engine(name, isolation_level=level.upper(), **options)
    engine = make_engine(name, **options)
    return engine if level == "IMMEDIATE" else _deferred()


def _deferred() -> Engine:
    """Make another engine: the listener of the first cannot begin in two ways."""
    other = create_engine(URLS["sqlite"], poolclass=NullPool)  # so that it needs no disposal
    begin_immediate(other, "BEGIN DEFERRED")
    return other


def add_counter(engine: Engine) -> None:
    with Session(engine) as session:
        session.add(Counter(name="a"))
        session.commit()


def value(engine: Engine) -> int:
    """Return the counter, as another session sees it."""
    with engine.connect() as connection:
        return connection.execute(select(Counter.value).where(Counter.name == "a")).scalar_one()


def add_fence(engine: Engine, *, name: str = "order:42", token: int = 1, s_token: int = 0) -> None:
    with engine.begin() as connection:
        row = {"name": name, "token": token, "holder": "x" * bool(name), "s_token": s_token}
        connection.execute(fencing.table.insert().values(row))


def fences(engine: Engine) -> list[tuple[str, int]]:
    """Return the rows of dlock_fence: names and tokens."""
    with engine.connect() as connection:
        found = connection.execute(select(fencing.table.c.name, fencing.table.c.token).order_by("name"))
        return [tuple(row) for row in found]


def set_timeout(engine: Engine) -> None:
    """Give each of its connections a lock timeout of 77 s."""
    is_postgresql = engine.dialect.name == "postgresql"
    sql = "SET lock_timeout = '77s'" if is_postgresql else "SET SESSION innodb_lock_wait_timeout = 77"

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        cursor = connection.cursor()
        cursor.execute(sql)
        cursor.close()
        connection.commit()


def timeout(where: Connection | Session) -> int:
    dialect = where.get_bind().dialect if isinstance(where, Session) else where.dialect
    question = "SHOW lock_timeout" if dialect.name == "postgresql" else "SELECT @@SESSION.innodb_lock_wait_timeout"
    answer = where.execute(text(question)).scalar_one()
    return int(str(answer).removesuffix("s").replace("1min 17", "77").replace("77000m", "77"))
