"""Faults of dlock, put in on purpose: the checker has to find each of them, or its silence would mean nothing.

Each is a function that changes something in the worker that calls it.
"""

import contextlib
import re
import time
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import Engine, event
from sqlalchemy.exc import DBAPIError


def no_fence(config: dict[str, Any]) -> None:
    """Take every lock with `fence=False`: a lease alone, which a pause outlives."""
    from tests.random_faults import attempt

    attempt.FENCES = (False,)  # type: ignore[misc]


def early_release(config: dict[str, Any]) -> None:
    """Release the lease before COMMIT, as code does that ends its `with` block inside the transaction."""
    from dlock_core.stores import force_release
    from tests.random_faults.attempt import Attempt
    from tests.random_faults.core_clients import backends

    no_fence(config)
    made, commits = backends(config), Attempt.commits

    def release_and_commit(attempt: Attempt) -> None:
        for item in attempt.wish.items:
            lease = attempt.leases[item.key]
            force_release(made[item.store], lease.name, lease.token, by="sabotage")
        time.sleep(0.05)
        commits(attempt)

    Attempt.commits = release_and_commit  # type: ignore[method-assign]


def grants_twice(config: dict[str, Any]) -> None:
    """Make the store grant every request, and drop the fence."""
    no_fence(config)
    _replace_store(lambda floor: max(time.time_ns() // 1000, floor + 1))


def dice_for_tokens(config: dict[str, Any]) -> None:
    """Make the store grant every request with a random token, and keep the fence: the data stay right, the tokens do not."""
    import random

    _replace_store(lambda floor: max(floor, 10**15) + random.randrange(10**12))


def retried_though_unknown(config: dict[str, Any]) -> None:
    """Make `retry_on_conflict` take a connection that was lost at COMMIT for a conflict, and start over."""
    from dlock_core.transactions import retry
    from tests.random_faults import attempt

    attempt.RETRY_RATE = 1.0
    is_conflict = retry.is_conflict
    retry.is_conflict = lambda error: is_conflict(error) or type(error).__name__ == "OperationalError"
    retry.AttemptedWork.obstacle = lambda work: ""  # type: ignore[method-assign]


def no_mark(config: dict[str, Any]) -> None:
    """Make exclusive holders in SQLAlchemy ignore the mark that a newer shared holder has left, as before it was invented.

    The store grants every request, so that they meet: with the mark the data bear that.
    """
    from tests.random_faults import attempt

    attempt.FENCES, attempt.SHARED_RATE = ("lease",), 0.6  # type: ignore[misc]
    _replace_store(lambda floor: max(time.time_ns() // 1000, floor + 1))

    @event.listens_for(Engine, "before_cursor_execute", retval=True)
    def forget(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> tuple[str, Any]:
        return re.sub(r"(f\.)?\bs_token < (%\(token\)s|[\w.:$]+)", "0 < 1", statement), parameters


def versions_from_1(config: dict[str, Any]) -> None:
    """Begin every new row's version at 1, as before it began at the clock: a row that is made anew gets its predecessor's versions."""
    from dlock_core.sql import versions

    class NoClock:
        time_ns = staticmethod(lambda: 1000)

    versions.time = NoClock  # type: ignore[assignment]


def newest_version_expected(config: dict[str, Any]) -> None:
    """Make Django expect the version that the row has by now, whatever version was read."""
    from django.conf import settings

    if not settings.configured:
        return
    from django_dlock.versions import VersionField

    def newest(field: VersionField, instance: Any, _: str) -> int:
        rows = type(instance).objects.using(instance._state.db).filter(pk=instance.pk)
        return rows.values_list(field.name, flat=True).first() or 0

    VersionField.expected_version = newest  # type: ignore[method-assign]


def fence_rows_removed(config: dict[str, Any]) -> None:
    """Remove the rows of the fence after each COMMIT, without a floor that keeps older tokens out.

    The store grants every request, so that older holders are there: with the rows the data bear that.
    """
    from sqlalchemy import text

    from tests.random_faults import attempt
    from tests.random_faults.sqla_clients import engine_of

    attempt.FENCES = (True,)  # type: ignore[misc]
    _replace_store(lambda floor: max(time.time_ns() // 1000, floor + 1))
    engines = {name: engine_of(name, config) for name in config["databases"]}
    committed = attempt.Attempt.committed

    def commit_and_remove(one: attempt.Attempt) -> None:
        committed(one)
        with contextlib.suppress(DBAPIError), engines[one.wish.database].begin() as connection:
            connection.execute(text("DELETE FROM dlock_fence"))

    attempt.Attempt.committed = commit_and_remove  # type: ignore[method-assign]


def _replace_store(token: Callable[[int], int]) -> None:
    """Make every Redis of this process a store that grants everything."""
    from dlock_core.backends.redis import RedisBackend
    from tests.chaos import EverybodyIn

    for name, method in vars(EverybodyIn).items():
        if callable(method) and not name.startswith("__"):
            setattr(RedisBackend, name, method)
    RedisBackend.token = lambda backend, floor: token(floor)  # type: ignore[attr-defined]
    RedisBackend.forgetful = False  # type: ignore[attr-defined]


SABOTAGES: Final[dict[str, Callable[[dict[str, Any]], None]]] = {
    "no-fence": no_fence,
    "early-release": early_release,
    "grants-twice": grants_twice,
    "dice-for-tokens": dice_for_tokens,
    "retried-though-unknown": retried_though_unknown,
    "no-mark": no_mark,
    "versions-from-1": versions_from_1,
    "newest-version-expected": newest_version_expected,
    "fence-rows-removed": fence_rows_removed,
}


def commit(config: dict[str, Any]) -> None:
    """Apply what the run was told, in this worker."""
    if config["sabotage"]:
        SABOTAGES[config["sabotage"]](config)
