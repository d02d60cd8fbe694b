"""Sections without a database, which check the store: they hold a lease, look at it, and release it."""

import asyncio
from typing import Any

from dlock_core import AsyncLock, Lock, connect
from dlock_core.backend import Backend
from tests.random_faults.attempt import Attempt
from tests.random_faults.sqla_clients import engine_of

LOOKS = 5


def backends(config: dict[str, Any], names: list[str] | None = None) -> dict[str, Backend]:
    """Return every store as the core knows it; those in the database use an engine."""
    from sqla_dlock.backends import advisory, table

    made = {name: connect(one["url"], **one["options"]) for name, one in config["stores"].items()}
    postgresql = engine_of("postgresql", config)
    made |= {"table": table.from_engine(postgresql), "session": advisory.from_engine(postgresql, session=True)}
    return {name: backend for name, backend in made.items() if names is None or name in names}


def _options(attempt: Attempt) -> dict[str, Any]:
    known = ("wait", "ttl", "shared", "fair", "renew")
    return {name: value for name, value in attempt.wish.options.items() if name in known}


def _name(attempt: Attempt) -> str:
    return attempt.wish.items[0].lock


class CoreClient:
    """Runs one section at a time in a thread."""

    is_async = False
    databases = ("postgresql", "mariadb", "sqlite")

    def __init__(self, config: dict[str, Any]) -> None:
        self.backends = backends(config)

    def play(self, attempt: Attempt) -> None:
        backend = self.backends[attempt.wish.items[0].store]
        with Lock(backend, _name(attempt), **_options(attempt)) as lease:
            attempt.granted(lease)
            for _ in range(LOOKS):
                attempt.stage("held")

    def clean_up(self) -> None:
        pass

    def close(self) -> None:
        pass


class AsyncCoreClient:
    """Runs sections in tasks."""

    is_async = True
    databases = ("postgresql", "mariadb", "sqlite")

    def __init__(self, config: dict[str, Any]) -> None:
        self.backends = backends(config)

    async def aplay(self, attempt: Attempt) -> None:
        backend = self.backends[attempt.wish.items[0].store]
        async with AsyncLock(backend, _name(attempt), **_options(attempt)) as lease:
            attempt.granted(lease)
            for _ in range(LOOKS):
                attempt.stage("held")
                await asyncio.sleep(attempt.chance.random() * 0.01)

    async def aclean_up(self) -> None:
        pass

    async def aclose(self) -> None:
        pass
