"""Other threads for tests: what they do is told step by step, so that every interleaving is written down, not hoped for."""

import concurrent.futures
from collections.abc import Callable
from typing import Any, Self

from django.db import connections, transaction

from dlock_core.runtime import BLOCKING, run
from tests.django_dlock.sessions import rows, second_session
from tests.waiting import INNODB_REFRESH_S, until

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


def is_held(store: Any, name: str = "order:42") -> bool:
    """Whether anybody holds a lock, as its store sees it."""
    return bool(run(store.inspect(BLOCKING, name))[0].holders)


def wait_until_blocked(alias: str) -> None:
    """Until some session waits for another's row lock, as the server sees it."""
    with second_session(alias) as watcher:
        if watcher.vendor == "postgresql":
            question = "SELECT 1 FROM pg_locks WHERE NOT granted"
        else:
            question = "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
        until(lambda: rows(watcher, question), every=INNODB_REFRESH_S)
