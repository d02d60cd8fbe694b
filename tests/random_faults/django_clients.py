"""Sections that use Django, in a thread and in coroutines."""

import asyncio
import contextlib
import importlib.util
import re
from typing import Any, Final

import django
from django.conf import settings
from django.db import connections

from tests.random_faults.attempt import Attempt, Refused, Wish
from tests.random_faults.items import FENCED, Item
from tests.random_faults.sections import NOTE, READ, Save, Statement, Steps, Turn, add_anew

HAS_MYSQLCLIENT = importlib.util.find_spec("MySQLdb") is not None
"""mysqlclient needs a C compiler, so it may be missing: then Django's workers do not use MariaDB."""


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
        ALLOWED_HOSTS=["shop"],
        ROOT_URLCONF="tests.random_faults.django_served",
        MIDDLEWARE=["django_dlock.middleware.LockMiddleware"],
        USE_TZ=True,
        LOGGING_CONFIG=None,
    )
    django.setup()


MAX_PATIENCE_S: Final = 0.05
"""How long a section that leaves its block early waits for its thread, at most."""


class DjangoClient:
    """Runs one section at a time in a thread."""

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
        if wish.manner == "inside":
            inside(attempt)
            return
        with _lock(attempt) as lease:
            attempt.granted(lease)
            if wish.retries:
                using = (alias, other_than(alias)) if wish.manner == "elsewhere" else alias
                retry_on_conflict(using=using)(_once)(attempt)
                if not attempt.is_committed:
                    attempt.committed()
            elif wish.manner == "by hand":
                by_hand(attempt)
            else:
                in_transactions(attempt)

    def clean_up(self) -> None:
        """Discard the connections, as a worker does after a time limit, because their state is unknown."""
        for alias in connections:
            with contextlib.suppress(Exception):
                connections[alias].close()
            with contextlib.suppress(AttributeError):
                del connections[alias]

    def close(self) -> None:
        self.clean_up()


class AsyncDjangoClient(DjangoClient):
    """Runs sections in tasks; their transactions run in a thread, as Django requires."""

    is_async = True

    async def aplay(self, attempt: Attempt) -> None:
        from asgiref.sync import sync_to_async

        if attempt.wish.has_version:
            await sync_to_async(change_row)(attempt)
            return
        if attempt.wish.manner == "inside":
            await sync_to_async(inside)(attempt)
            return
        async with _lock(attempt) as lease:
            attempt.granted(lease)
            work = sync_to_async(in_transactions)(attempt)
            if attempt.wish.manner == "left early":
                work = asyncio.ensure_future(work)
                await asyncio.wait([work], timeout=attempt.chance.uniform(0, MAX_PATIENCE_S))
            else:
                await work
        if attempt.wish.manner == "left early":
            await work  # what begins now is refused

    async def aclean_up(self) -> None:
        from asgiref.sync import sync_to_async

        await sync_to_async(self.clean_up)()

    async def aclose(self) -> None:
        await self.aclean_up()


def change_row(attempt: Attempt) -> None:
    """Save or recreate a row that has a version, read in the repeated transaction, or before it as with a form."""
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


def inside(attempt: Attempt) -> None:
    """Acquire the lock in a transaction that has already read, and leave its block before COMMIT."""
    from django.db.transaction import atomic

    wish, alias = attempt.wish, attempt.wish.database
    with atomic(alias):
        execute(alias, (READ, {"item": wish.items[0].key}))
        savepoint = connections[alias].savepoint() or "" if wish.act is add_anew else ""
        with _lock(attempt) as lease:
            attempt.granted(lease)
            [part] = attempt.work()
            run(part, alias, attempt, savepoint)
        attempt.stage("block left")
        attempt.commits()
    attempt.committed()


def by_hand(attempt: Attempt) -> None:
    """Begin each transaction by turning autocommit off; turning it on commits, except on PostgreSQL."""
    from django.db.transaction import commit, rollback, set_autocommit

    alias = attempt.wish.database
    for part in attempt.work():
        try:
            set_autocommit(False, alias)
            run(part, alias, attempt)
            attempt.commits()
            if alias == "postgresql":
                commit(alias)
            set_autocommit(True, alias)
        except BaseException:
            try:
                rollback(alias)
                set_autocommit(True, alias)
            except Exception:
                connections[alias].close()
            raise
        attempt.committed()


def other_than(alias: str) -> str:
    return "postgresql" if alias == "sqlite" else "sqlite"


def execute(alias: str, statement: Statement) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(_in_python_format(statement[0]), statement[1])


def in_transactions(attempt: Attempt) -> None:
    from django.db.transaction import atomic, on_commit

    alias = attempt.wish.database
    for part in attempt.work():
        with atomic(alias):
            run(part, alias, attempt)
            if attempt.wish.manner == "raises" and attempt.parts_left == 1:
                on_commit(attempt.fails_on_commit, alias)
            attempt.commits()
        attempt.committed()


def run(steps: Steps, alias: str, attempt: Attempt, savepoint: str = "") -> None:
    """Run the steps of one transaction; the savepoint may be older than the lock."""
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
            elif isinstance(step, Turn):
                savepoint = _turn(step, alias, attempt, savepoint)
            else:
                cursor.execute(_in_python_format(step[0]), step[1])
                rows = cursor.fetchall() if cursor.description else None


def _turn(turn: Turn, alias: str, attempt: Attempt, savepoint: str) -> str:
    """Take a turn, and return the savepoint that is open afterwards."""
    from django.db.transaction import TransactionManagementError

    connection = connections[alias]
    if turn is Turn.SAVEPOINT:
        return savepoint or connection.savepoint() or ""
    if turn is Turn.UNDO:
        connection.savepoint_rollback(savepoint)
    elif turn is Turn.ENTER:
        with _lock(attempt):
            attempt.stage("inner block")
    elif turn is Turn.ACQUIRE:
        _lock(attempt).acquire()
    else:
        try:
            execute(alias, ("COMMIT", {}))
        except TransactionManagementError as error:
            raise Refused from error
    return ""


def _once(attempt: Attempt) -> None:
    from django.db.transaction import on_commit

    alias, manner = attempt.wish.database, attempt.wish.manner
    [part] = attempt.work()
    run(part, alias, attempt)
    if manner == "elsewhere":
        execute(other_than(alias), (NOTE, {"section": attempt.section}))
    if manner == "raises":
        on_commit(attempt.fails_on_commit, alias)
    attempt.commits()


def _in_python_format(statement: str) -> str:
    return re.sub(r":(\w+)", r"%(\1)s", statement)


def _lock(attempt: Attempt) -> Any:
    from django_dlock import lock

    wish = attempt.wish
    locks = [lock(*_parts(item, wish), using=wish.database, store=item.store, **wish.options) for item in wish.items]
    return locks[0] if len(locks) == 1 else lock(*locks)


def _parts(item: Item, wish: Wish) -> tuple[Any, ...]:
    from tests.random_faults import django_models  # always, because a text may name its model

    kind = FENCED if wish.by_text else django_models.Item
    return (kind if item.is_fenced else "item", item.key)
