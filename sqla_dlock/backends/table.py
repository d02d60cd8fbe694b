"""Leases in the table `dlock_lease` of an Engine's database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import create_engine, make_url
from sqlalchemy.exc import ArgumentError

from dlock_core.backends.table.backend import TableBackend
from dlock_core.options import has_swallowed_options
from sqla_dlock.backends.connector import pool_of

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["engine_of", "from_engine", "from_url"]

EXAMPLE: Final = "postgresql+psycopg://user@host/database"


def from_engine(engine: Engine | AsyncEngine, *, timeout: float = 5.0) -> TableBackend:
    """Return the store in an engine's database; `timeout` bounds each step, in seconds.

    Raises TypeError for anything but an engine, and ValueError for a database that dlock does not support.
    """
    return TableBackend(pool_of(engine, timeout=timeout))


def from_url(url: str, *, timeout: float = 5.0) -> TableBackend:
    """Return the store of a URL such as "database+postgresql+psycopg://…": SQLAlchemy's own behind "database+".

    Raises ValueError for a URL without a database, or that SQLAlchemy does not know; ImportError without its driver.
    """
    return from_engine(engine_of(url), timeout=timeout)


def engine_of(url: str) -> Engine | AsyncEngine:
    """Return an engine for the part after the first "+" in a store's URL."""
    store, plus, rest = url.partition("+")
    if not plus or not store.isalpha():
        raise ValueError(
            "give an engine to sqla_dlock.configure(), or write its URL behind the store's scheme: "
            f"{store.partition(':')[0]}+{EXAMPLE}"
        )
    try:
        parsed = make_url(rest)
        if "@" in (parsed.host or ""):
            raise ArgumentError("the end of a password that is not percent-encoded")
        named = f"{parsed.host}{'' if parsed.drivername.startswith('sqlite') else parsed.database}"
        if has_swallowed_options(named):
            raise ArgumentError("an option, perhaps a password, in the place of a host or a database")
        return _made(parsed)
    except (ArgumentError, ValueError) as error:
        reason = type(error).__name__  # its text may contain a password
        raise ValueError(f"SQLAlchemy cannot use what follows {store}+ ({reason}): such as {EXAMPLE}") from None


def _made(url: URL) -> Engine | AsyncEngine:
    if not url.get_dialect().is_async:
        return create_engine(url)
    from sqlalchemy.ext.asyncio import create_async_engine  # needs greenlet

    return create_async_engine(url)
