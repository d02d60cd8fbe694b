"""The other processes of these tests: they serve requests that hold leases and rows, and wait for more."""

import asyncio
import contextlib
from typing import Any, Final

from django.conf import settings
from django.db.transaction import atomic
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from django_dlock import lock as django_lock
from dlock_core import connect
from dlock_core.owner import name_application, serving
from dlock_core.stores import Store
from sqla_dlock import alock, lock
from tests.mysql_server import DIALECT
from tests.testapp.models import Stock

URLS: Final = {
    "postgresql": f"postgresql+psycopg://postgres@127.0.0.1:{settings.POSTGRESQL_PORT}/postgres",
    "mariadb": f"{DIALECT}+mysqldb://root@127.0.0.1:{settings.MARIADB_PORT}/dlock?charset=utf8mb4",
    "asyncpg": f"postgresql+asyncpg://postgres@127.0.0.1:{settings.POSTGRESQL_PORT}/postgres",
    "aiomysql": f"{DIALECT}+aiomysql://root@127.0.0.1:{settings.MARIADB_PORT}/dlock?charset=utf8mb4",
}
ROW: Final = text("SELECT pieces FROM testapp_stock WHERE id = :key FOR UPDATE")
LONG: Final = 100.0
"""No wait here reaches its limit: the test ends the process first."""


def lease_then_row(link: Any, world: str, database: str, url: str) -> None:
    """Hold the lease order:1, then wait for row 7."""
    name_application("shop")
    with serving("POST", "/orders/1/ship"):
        WORLDS[world](link, database, url, ("lease", "row"))


def row_then_lease(link: Any, world: str, database: str, url: str) -> None:
    """Hold row 7, then wait for the lease order:1."""
    name_application("nightly")
    with serving("POST", "/stock/7"):
        WORLDS[world](link, database, url, ("row", "lease"))


def with_django(link: Any, database: str, url: str, order: tuple[str, str]) -> None:
    settings.DLOCK = {"default": {"BACKEND": url, "WAIT": LONG}}
    steps = {
        "lease": lambda: django_lock("order", 1, using=database, snapshot="ignore"),
        "row": lambda: contextlib.nullcontext(Stock.objects.using(database).select_for_update().get(pk=7)),
    }
    with contextlib.ExitStack() as stack:
        for thing in order:
            if thing == "row":
                stack.enter_context(atomic(database))
            stack.enter_context(steps[thing]())
            if thing == order[0]:
                link.say("holds")
                link.hear()


def with_sqla(link: Any, database: str, url: str, order: tuple[str, str]) -> None:
    store = Store("default", connect(url), wait=LONG)
    with Session(create_engine(URLS[database])) as session, contextlib.ExitStack() as stack:
        for thing in order:
            if thing == "row":
                session.execute(ROW, {"key": 7})
            else:
                stack.enter_context(lock(session, "order", 1, store=store, snapshot="ignore"))
            if thing == order[0]:
                link.say("holds")
                link.hear()


def with_asyncio(link: Any, database: str, url: str, order: tuple[str, str]) -> None:
    asyncio.run(_with_asyncio(link, database, url, order))


async def _with_asyncio(link: Any, database: str, url: str, order: tuple[str, str]) -> None:
    store = Store("default", connect(url), wait=LONG)
    async with AsyncSession(create_async_engine(URLS[database])) as session, contextlib.AsyncExitStack() as stack:
        for thing in order:
            if thing == "row":
                await session.execute(ROW, {"key": 7})
            else:
                await stack.enter_async_context(alock(session, "order", 1, store=store, snapshot="ignore"))
            if thing == order[0]:
                link.say("holds")
                await asyncio.to_thread(link.hear)


WORLDS: Final = {"django": with_django, "sqlalchemy": with_sqla, "asyncio": with_asyncio}
