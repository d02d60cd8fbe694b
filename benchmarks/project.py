"""Servers and settings of the Django benchmarks: PostgreSQL if it is installed, SQLite, and Redis."""

import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from django.core.management import call_command
from django.db import connections

from benchmarks import measure
from benchmarks.distance import away
from tests import servers


@contextmanager
def running(latency: float = 0.0) -> Iterator[list[int]]:
    """Start everything, set Django up, and yield the servers' pids. "default" is PostgreSQL, or else SQLite.

    Redis and PostgreSQL are a round trip of `latency` milliseconds away.
    """
    with measure.scratch() as directory, measure.redis_server() as redis, ExitStack() as network:
        started = [redis]
        databases: dict[str, Any] = {"sqlite": sqlite(directory)}
        try:
            postgresql = servers.postgresql(directory / "postgresql", servers.free_port())
        except servers.ServerMissing as missing:
            print(missing, file=sys.stderr)
            databases = {"default": sqlite(directory)}
        else:
            postgresql.start()
            started.append(postgresql)
            databases["default"] = {
                "ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres", "HOST": "127.0.0.1",
                "PORT": network.enter_context(away(postgresql.port, latency)),
            }  # fmt: skip
        configure(databases, f"redis://127.0.0.1:{network.enter_context(away(redis.port, latency))}/0")
        try:
            yield [one.process.pid for one in started if one.process is not None]
        finally:
            connections.close_all()
            for one in started[1:]:
                one.stop()


def sqlite(directory: Path) -> dict[str, Any]:
    pragmas = "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF"
    options = {"transaction_mode": "IMMEDIATE", "timeout": 20, "init_command": pragmas}
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(directory / "db.sqlite3"), "OPTIONS": options}


def configure(databases: dict[str, Any], redis_url: str) -> None:
    databases["default"] |= {"ATOMIC_REQUESTS": True, "CONN_MAX_AGE": None}
    settings.configure(
        ALLOWED_HOSTS=["*"],
        DATABASES=databases,
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        DLOCK={"default": {"BACKEND": redis_url}},
        INSTALLED_APPS=["benchmarks", "django_dlock"],
        ROOT_URLCONF="benchmarks.views",
        SECRET_KEY=secrets.token_hex(),
        USE_TZ=True,
    )
    django.setup()
    for alias in databases:
        call_command("migrate", database=alias, run_syncdb=True, interactive=False, verbosity=0)


def backends(aliases: list[str], servers: list[int]) -> list[int]:
    """Return the servers' pids, and those of PostgreSQL's processes that serve our connections."""
    pids = list(servers)
    for alias in aliases:
        with connections[alias].cursor() as cursor:
            if connections[alias].vendor == "postgresql":
                cursor.execute("SELECT pg_backend_pid()")
                pids.append(cursor.fetchone()[0])
    return pids
