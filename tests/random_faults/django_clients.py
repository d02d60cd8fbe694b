"""Sections through Django, in a thread and in coroutines."""

import contextlib
import importlib.util
import re
from typing import Any

import django
from django.conf import settings
from django.db import connections

from tests.random_faults.attempt import Attempt
from tests.random_faults.items import Item
from tests.random_faults.sections import Save, Statement, Steps

HAS_MYSQLCLIENT = importlib.util.find_spec("MySQLdb") is not None
"""It needs a C compiler, so it may be missing on a laptop: then Django's workers leave MariaDB out."""


def prepare(config: dict[str, Any]) -> None:
    """Configure Django for one worker: its databases and stores."""
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": config["databases"]["sqlite"]}
    sqlite["OPTIONS"] = {"transaction_mode": "IMMEDIATE", "timeout": 20}
    postgresql = {
        "ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres", "HOST": "127.0.0.1",
        "PORT": config["databases"]["postgresql"], "OPTIONS": {"connect_timeout": 5, "options": "-c lock_timeout=8000"},
    }  # fmt: skip
    mariadb = {
        "ENGINE": "django.db.backends.mysql", "NAME": "dlock", "USER": "root", "HOST": "127.0.0.1",
        "PORT": config["databases"].get("mariadb", 0),
        "OPTIONS": {"charset": "utf8mb4", "connect_timeout": 5, "read_timeout": 12, "write_timeout": 12},
    }  # fmt: skip
    stores = {name: {"BACKEND": one["url"], "OPTIONS": one["options"]} for name, one in config["stores"].items()}
    inside = {
        "table": {"BACKEND": "database://postgresql"},
        "session": {"BACKEND": "advisory://postgresql", "OPTIONS": {"session": True}},
        "advisory": {"BACKEND": "advisory://postgresql"},
    }
    settings.configure(
        DATABASES={"default": sqlite, "sqlite": sqlite, "postgresql": postgresql, "mariadb": mariadb},
        DLOCK=stores | inside,
        INSTALLED_APPS=["django.contrib.contenttypes", "django_dlock"],
        SECRET_KEY="only for tests",
        USE_TZ=True,
        LOGGING_CONFIG=None,
    )
    django.setup()


class DjangoClient:
    """One thread."""

    is_async = False
    databases = ("postgresql", "sqlite", *(["mariadb"] if HAS_MYSQLCLIENT else []))

    def play(self, attempt: Attempt) -> None:
        from django.db.transaction import atomic

        from django_dlock import retry_on_conflict

        wish, alias = attempt.wish, attempt.wish.database
        if wish.has_version:
            change_row(attempt)
            return
        if wish.is_inside:
            with atomic(alias), _lock(attempt) as lease:
                attempt.granted(lease)
                for part in attempt.work():
                    run(part, alias, attempt)
                attempt.commits()
            attempt.committed()
            return
        with _lock(attempt) as lease:
            attempt.granted(lease)
            if wish.retries:
                retry_on_conflict(using=alias)(_once)(attempt)
                attempt.committed()
            else:
                in_transactions(attempt)

    def clean_up(self) -> None:
        """Throw the connections away, as a worker does after a time limit: what state they are in cannot be known."""
        for alias in connections:
            with contextlib.suppress(Exception):
                connections[alias].close()
            with contextlib.suppress(AttributeError):
                del connections[alias]

    def close(self) -> None:
        self.clean_up()


class AsyncDjangoClient(DjangoClient):
    """Tasks; their transactions are in a thread, as Django has them."""

    is_async = True

    async def aplay(self, attempt: Attempt) -> None:
        from asgiref.sync import sync_to_async

        if attempt.wish.has_version:
            await sync_to_async(change_row)(attempt)
            return
        async with _lock(attempt) as lease:
            attempt.granted(lease)
            await sync_to_async(in_transactions)(attempt)

    async def aclean_up(self) -> None:
        from asgiref.sync import sync_to_async

        await sync_to_async(self.clean_up)()

    async def aclose(self) -> None:
        await self.aclean_up()


def change_row(attempt: Attempt) -> None:
    """Save, or make anew, a row that has a version: read in the transaction that is repeated, or before it, as a form is."""
    from django.db.transaction import atomic

    from django_dlock import retry_on_conflict
    from tests.random_faults.django_models import read, write

    if attempt.wish.retries:
        retry_on_conflict(using=attempt.wish.database)(lambda: write(attempt, read(attempt)))()
    else:
        row = read(attempt)
        with atomic(attempt.wish.database):
            write(attempt, row)
    attempt.committed()


def execute(alias: str, statement: Statement) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(_in_python_format(statement[0]), statement[1])


def in_transactions(attempt: Attempt) -> None:
    from django.db.transaction import atomic

    alias = attempt.wish.database
    for part in attempt.work():
        with atomic(alias):
            run(part, alias, attempt)
            attempt.commits()
        attempt.committed()


def run(steps: Steps, alias: str, attempt: Attempt) -> None:
    """Carry out the steps of one transaction."""
    from tests.random_faults.django_models import save

    rows = None
    with contextlib.suppress(StopIteration), connections[alias].cursor() as cursor:
        while True:
            step = steps.send(rows)
            rows = None
            if isinstance(step, str):
                attempt.stage(step)
            elif isinstance(step, Save):
                save(alias, step)
            else:
                cursor.execute(_in_python_format(step[0]), step[1])
                rows = cursor.fetchall() if cursor.description else None


def _once(attempt: Attempt) -> None:
    [part] = attempt.work()
    run(part, attempt.wish.database, attempt)
    attempt.commits()


def _in_python_format(statement: str) -> str:
    return re.sub(r":(\w+)", r"%(\1)s", statement)


def _lock(attempt: Attempt) -> Any:
    from django_dlock import lock

    wish = attempt.wish
    locks = [lock(*_parts(item), using=wish.database, store=item.store, **wish.options) for item in wish.items]
    return locks[0] if len(locks) == 1 else lock(*locks)


def _parts(item: Item) -> tuple[Any, ...]:
    from tests.random_faults import django_models

    return (django_models.Item if item.is_fenced else "item", item.key)
