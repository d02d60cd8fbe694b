"""Other threads for tests, which are driven step by step: every interleaving is written down, not hoped for."""

import concurrent.futures
from collections.abc import Callable
from typing import Any, Self

from django.db import connections, transaction

from tests import databases
from tests.django_dlock.sessions import rows, second_session

WITHIN = 60.0


class Party:
    """A thread with its own connections and leases; `do` starts a step, `now` waits for its result."""

    def __enter__(self) -> Self:
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        return self

    def __exit__(self, *_: object) -> None:
        self.now(connections.close_all)
        self._thread.shutdown()

    def do(self, step: Callable[..., Any], *args: Any) -> "concurrent.futures.Future[Any]":
        return self._thread.submit(step, *args)

    def now(self, step: Callable[..., Any], *args: Any) -> Any:
        return self.do(step, *args).result(WITHIN)

    def begin(self, alias: str) -> None:
        """Open a transaction in that thread; `commit` and `rollback` end it."""
        self._atomic = transaction.atomic(using=alias)
        self.now(self._atomic.__enter__)

    def commit(self) -> None:
        self.now(self._atomic.__exit__, None, None, None)

    def rollback(self) -> None:
        error = RuntimeError("rolled back on purpose")
        self.now(self._atomic.__exit__, RuntimeError, error, None)


def unlocked(model: Any, alias: str) -> set[Any]:
    """Return the keys of the rows that no other transaction has locked."""
    with transaction.atomic(alias):
        return set(
            model.objects.using(alias).order_by().select_for_update(skip_locked=True).values_list("pk", flat=True)
        )


def until_blocked(alias: str) -> None:
    """Wait until the server reports that a session waits for another's lock."""
    with second_session(alias) as watcher:
        server = "mariadb" if watcher.vendor == "mysql" else watcher.vendor
        databases.until_blocked(server, lambda sql: rows(watcher, sql))
