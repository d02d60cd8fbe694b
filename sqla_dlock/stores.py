"""Named stores of leases, `configure(default="redis://…", ledger=backend)`, and the sessions that use them.

Call `configure` once when the program starts. Without it, `DLOCK_URL` in the environment is the default store.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Engine
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.orm.session import _SessionCloseState

from dlock_core.stores import Store, connect, scheme_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Mapper

    from dlock_core.backend import Backend

__all__ = ["configure", "store_of"]

_stores: dict[str, Store] = {}
_IN_DATABASE: Final = {"advisory": "sqla_dlock.backends.advisory", "database": "sqla_dlock.backends.table"}
_CLOSED: Final = _SessionCloseState.CLOSED
_configuring: Final = threading.RLock()
"""Reentrant, because a signal handler may request the same store in the middle."""


def configure(**stores: Any) -> None:
    """Set the stores for `lock(..., store="name")`; nothing is sent yet.

    A store is a URL, a redis-py client, an Engine or AsyncEngine (its leases are in the table `dlock_lease`), a backend
    or a `Store`, which also sets the ttl and wait of its locks. A name that exists already is replaced for all locks
    that are taken from now on.

    Raises ValueError, TypeError or ImportError as `dlock_core.connect` does; then nothing has changed.
    """
    _stores.update({alias: _as_store(alias, given) for alias, given in stores.items()})


def store_of(store: Any) -> Store:
    """Return the store for a name or for a backend; raises LookupError for an unknown name."""
    if not isinstance(store, str):
        return _unnamed(store)
    found = _stores.get(store)
    return found if found is not None else _from_environment(store)


def _from_environment(alias: str) -> Store:
    with _configuring:
        if alias == "default" and alias not in _stores and (url := os.environ.get("DLOCK_URL")):
            _stores.setdefault(alias, _as_store(alias, url))
    if alias not in _stores:
        known = ", ".join(map(repr, _stores)) or "none"
        example = "configure(default='redis://localhost:6379/0'), or set DLOCK_URL"
        raise LookupError(f"there is no store {alias!r}; the stores are: {known}. Call sqla_dlock.{example}")
    return _stores[alias]


def _as_store(alias: str, given: Any) -> Store:
    if isinstance(given, Store):
        return given
    return Store(alias, given if _is_backend(given) else _connect(given))


def _connect(given: Any) -> Backend:
    if isinstance(given, Engine) or hasattr(given, "sync_engine"):
        return _in_database("database").from_engine(given)  # type: ignore[no-any-return]
    kind = scheme_of(given).partition("+")[0] if isinstance(given, str) else ""
    return _in_database(kind).from_url(given) if kind in _IN_DATABASE else connect(given)


def _in_database(kind: str) -> Any:
    return import_module(_IN_DATABASE[kind])  # It needs greenlet, which a program without asyncio may not have.


def _unnamed(given: Any) -> Store:
    """Return the store of a backend; raises TypeError for a client or URL.

    Each call would make a new backend of those, and it would not know which locks the session already holds.
    """
    if isinstance(given, Store):
        return given
    if not _is_backend(given):
        raise TypeError(
            f"store= is a name given to configure(), or a backend made once with connect(), not {type(given).__name__}"
        )
    return Store("", given)


def _is_backend(given: Any) -> bool:
    return hasattr(given, "try_acquire") and not isinstance(given, type)


def plain_session(session: Session | scoped_session[Any], instead: str) -> Session:
    """Return the Session; raises TypeError for anything else, which names `instead` for an AsyncSession."""
    found: Any = session() if isinstance(session, scoped_session) else session
    if isinstance(found, Session):
        return found
    is_async = type(found).__module__.startswith("sqlalchemy.ext.asyncio") or hasattr(found, "sync_session")
    hint = f": use {instead}" if is_async else ""
    raise TypeError(f"a Session is needed here, not {type(found).__name__}{hint}")


def plain_async_session(session: AsyncSession | async_scoped_session[Any], instead: str) -> AsyncSession:
    """Return the AsyncSession; raises TypeError for anything else, which names `instead` for a Session."""
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session  # needs greenlet

    found: Any = session() if isinstance(session, async_scoped_session) else session
    if isinstance(found, AsyncSession):
        return found
    hint = f": use {instead}" if isinstance(found, Session | scoped_session) else ""
    raise TypeError(f"an AsyncSession is needed here, not {type(found).__name__}{hint}")


def refuse_closed(session: Session) -> None:
    """Raise InvalidRequestError for a session that was closed for good (`close_resets_only=False`)."""
    # There is no public way; until it is used it looks like a session that has begun no transaction yet.
    if session._close_state is _CLOSED:  # noqa: SLF001
        raise InvalidRequestError("this Session has been closed for good: acquire the lock with a new one")


@contextmanager
def bound_for_writing(session: Session) -> Iterator[None]:
    """Make the application's own `get_bind` answer inside the block as it does for a flush.

    Rows must be locked, and read for a check, where they are written. A `get_bind` that sends queries to a replica
    tells a flush from a query by `session._flushing`, as SQLAlchemy's documentation recommends.
    """
    if getattr(session.get_bind, "__func__", None) is Session.get_bind:
        yield
        return
    former, session._flushing = session._flushing, True  # noqa: SLF001 - the documented recipe reads it
    try:
        yield
    finally:
        session._flushing = former  # noqa: SLF001


def connection_for_writing(session: Session, mapper: Mapper[Any], instance: Any = None) -> Connection:
    """Return the connection on which a flush would write an instance of this class."""
    if session.connection_callable is not None:  # sharding
        return session.connection_callable(mapper, instance)
    with bound_for_writing(session):
        bind = session.get_bind(mapper.base_mapper)
    return session.connection(bind_arguments={"bind": bind})
