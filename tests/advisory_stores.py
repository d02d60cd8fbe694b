"""Stores of session locks for tests: through Django's aliases and through SQLAlchemy's engines, on the same servers."""

from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from dlock_core.backend import Backend
from tests.proxy import Proxy
from tests.table_stores import ASYNC, DJANGO, URLS, server_of

__all__ = ["made", "sessions"]


def sessions(request: pytest.FixtureRequest, store: str, **options: Any) -> Any:
    """Return a store by its Django alias, or by its driver in SQLAlchemy."""
    request.getfixturevalue(server_of(store))
    return made(store, session=True, **options)


def made(store: str, *, behind: Proxy | None = None, **options: Any) -> Backend:
    """Return such a store on a server that is already running; `behind` a proxy, only through SQLAlchemy's engines."""
    if store in DJANGO:
        from django_dlock.backends.advisory import from_url

        return from_url(f"advisory://{store}", **options)
    from sqla_dlock.backends.advisory import from_engine

    create = create_async_engine if store in ASYNC else create_engine
    url = URLS[store] if behind is None else URLS[store].replace(f":{behind.target}/", f":{behind.port}/")
    return from_engine(create(url), **options)
