"""Bugs that are put into dlock on purpose: unless the checker finds each of them, its silence means nothing.

Each is a function that changes the worker that calls it.
"""

import contextlib
import re
import time
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import Engine, event
from sqlalchemy.exc import DBAPIError

from dlock_core import DLockError
from dlock_core.transactions.tie import Tie


def no_fence(config: dict[str, Any]) -> None:
    """Acquire every lock with `fence=False`: a pause can outlast the lease alone."""
    from tests.random_faults import attempt

    attempt.FENCES = (False,)  # type: ignore[misc]


def early_release(config: dict[str, Any]) -> None:
    """Release the lease before COMMIT, like code that ends its `with` block inside the transaction."""
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
    _grant_everything()


def dice_for_tokens(config: dict[str, Any]) -> None:
    """Make the store grant every request with a random token, and keep the fence: only the tokens go wrong."""
    import random

    _replace_store(lambda floor: max(floor, 10**15) + random.randrange(10**12))


def retried_though_unknown(config: dict[str, Any]) -> None:
    """Make `retry_on_conflict` treat a connection that was lost at COMMIT as a conflict, and start over."""
    from dlock_core.transactions import retry
    from tests.random_faults import attempt

    attempt.RETRY_RATE = 1.0
    is_conflict = retry.is_conflict
    retry.is_conflict = lambda error: is_conflict(error) or type(error).__name__ == "OperationalError"
    retry.AttemptedWork.obstacle = lambda work: ""  # type: ignore[method-assign]


def no_mark(config: dict[str, Any]) -> None:
    """Make exclusive holders in SQLAlchemy ignore the mark of a newer shared holder, as before marks existed.

    The store grants every request, so that they meet; with the mark the data would stay right.
    """
    from dlock_core.transactions.fence_sql import POSTGRESQL
    from sqla_dlock import fencing
    from tests.random_faults import attempt

    fencing._ask_postgresql = lambda _: POSTGRESQL  # the mark is in the statements, not in calls of the functions
    attempt.FENCES, attempt.SHARED_RATE = ("lease",), 0.6  # type: ignore[misc]
    _grant_everything()

    @event.listens_for(Engine, "before_cursor_execute", retval=True)
    def forget(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> tuple[str, Any]:
        return re.sub(r"(f\.)?\bs_token < (%\(token\)s|[\w.:$]+)", "0 < 1", statement), parameters


def versions_from_1(config: dict[str, Any]) -> None:
    """Begin every new row's version at 1, not at the clock: a recreated row repeats its predecessor's versions."""
    from dlock_core.sql import versions

    class NoClock:
        time_ns = staticmethod(lambda: 1000)

    versions.time = NoClock  # type: ignore[assignment]


def newest_version_expected(config: dict[str, Any]) -> None:
    """Make Django expect the row's present version, whatever version was read."""
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

    The store grants every request, so that there are older holders; with the rows the data would stay right.
    """
    from sqlalchemy import text

    from tests.random_faults import attempt
    from tests.random_faults.sqla_clients import engine_of

    attempt.FENCES = (True,)  # type: ignore[misc]
    _grant_everything()
    engines = {name: engine_of(name, config) for name in config["databases"]}
    committed = attempt.Attempt.committed

    def commit_and_remove(one: attempt.Attempt) -> None:
        committed(one)
        with contextlib.suppress(DBAPIError), engines[one.wish.database].begin() as connection:
            connection.execute(text("DELETE FROM dlock_fence"))

    attempt.Attempt.committed = commit_and_remove  # type: ignore[method-assign]


def inner_block_releases(config: dict[str, Any]) -> None:
    """Release the lease when the first of several blocks that hold it ends."""
    from tests.random_faults import attempt, sections

    no_fence(config)
    sections.ALONE, attempt.MANNERS = (sections.add_within,), ("",)  # type: ignore[misc]
    release, detach = _releaser(config), Tie.detach

    def detach_and_release(tie: Tie, handle: object) -> bool:
        is_last = detach(tie, handle)
        if tie.handles:
            release(tie)
        return is_last

    Tie.detach = detach_and_release  # type: ignore[method-assign]


def block_end_releases(config: dict[str, Any]) -> None:
    """Release the lease at the end of its block, although a transaction under it is still open."""
    from tests.random_faults import attempt

    no_fence(config)
    attempt.MANNERS = ("inside",)  # type: ignore[misc]
    release, detach = _releaser(config), Tie.detach

    def detach_and_release(tie: Tie, handle: object) -> bool:
        is_last = detach(tie, handle)
        if tie.open and not tie.handles:
            release(tie)
        return is_last

    Tie.detach = detach_and_release  # type: ignore[method-assign]


def never_left(config: dict[str, Any]) -> None:
    """Do not detach Django's handles at the end of the transaction that acquired them: the lease is never released."""
    from tests.random_faults import sections

    sections.ALONE = (sections.add_within,)  # type: ignore[misc]
    config["stop_rate"] = 0.0  # a holder that stands still would lose its lease, which ends it too
    kept: list[object] = []  # A handle that is garbage-collected would detach itself.
    attach = Tie.attach

    def attach_for_good(tie: Tie, handle: Any) -> None:
        kept.append(handle)
        attach(tie, handle)

    Tie.attach = attach_for_good  # type: ignore[method-assign]
    Tie.bind_to = lambda *_: None  # type: ignore[method-assign]


def readers_apart(config: dict[str, Any]) -> None:
    """Grant shared holders a separate lock, so that an exclusive one can hold at the same time; without a fence."""
    from dlock_core.transactions import transaction_lock
    from tests.random_faults import attempt

    no_fence(config)
    attempt.SHARED_RATE = 0.6  # type: ignore[misc]
    new_request = transaction_lock.new_request

    def apart(name: str, options: Any, **more: Any) -> Any:
        return new_request(f"shared:{name}" if options.shared else name, options, **more)

    transaction_lock.new_request = apart


def stale_reader_commits(config: dict[str, Any]) -> None:
    """Let a shared holder commit even after a newer exclusive one has; the store grants every request."""
    from dlock_core.transactions import fencing
    from tests.random_faults import attempt

    attempt.SHARED_RATE = 0.6  # type: ignore[misc]
    _grant_everything()
    confirm = fencing.confirm

    def confirm_exclusive(database: Any, dialect: Any, entry: Any) -> None:
        if not entry.shared:
            confirm(database, dialect, entry)

    fencing.confirm = confirm_exclusive
    fencing._admit_shared = lambda *_: 0


def savepoint_takes_admit(config: dict[str, Any]) -> None:
    """Do not admit again after a rollback to a savepoint that undid the admit; the store grants every request."""
    from sqla_dlock.first_statement import FirstStatementHooks
    from tests.random_faults import attempt, sections

    sections.ALONE, attempt.MANNERS = (sections.add_anew,), ("inside",)  # type: ignore[misc]
    _grant_everything()
    FirstStatementHooks.note_savepoint_undone = lambda _: None  # type: ignore[method-assign]
    if (tied := _tied_databases()) is not None:
        tied._admit_before_next = lambda *_: None


def autocommit_passes_by(config: dict[str, Any]) -> None:
    """Overlook that autocommit is turned on, which commits on SQLite and MariaDB; the store grants every request."""
    from tests.random_faults import attempt

    attempt.FENCES, attempt.MANNERS = ("lease",), ("by hand",)  # type: ignore[misc]
    _grant_everything()
    if _tied_databases() is not None:
        from django_dlock.tracker import ConnectionTracker

        def pass_by(tracker: ConnectionTracker, autocommit: bool) -> None:
            tracker.django._set_autocommit(autocommit)
            if autocommit:
                tracker.current = None

        ConnectionTracker._set_autocommit = pass_by  # type: ignore[method-assign]


def raw_commit_passes_by(config: dict[str, Any]) -> None:
    """Do not refuse a COMMIT that Django's user sends as a statement; the store grants every request."""
    from tests.random_faults import attempt, sections

    attempt.FENCES, attempt.MANNERS = (True,), ("",)  # type: ignore[misc]
    sections.ALONE = (sections.commit_by_hand,)  # type: ignore[misc]
    _grant_everything()
    if _tied_databases() is not None:
        from django_dlock import tie

        tie.ends_transaction = lambda _: False


def committed_though_repeated(config: dict[str, Any]) -> None:
    """Start over although the work has committed, because a function that Django calls on commit has failed."""
    _start_over_always("raises")


def half_repeated(config: dict[str, Any]) -> None:
    """Start over although one of two databases has committed; the store grants every request, so the other refuses."""
    from tests.random_faults import attempt

    _start_over_always("elsewhere")
    attempt.FENCES = ("lease",)  # type: ignore[misc]
    _grant_everything()


def _start_over_always(manner: str) -> None:
    from dlock_core.transactions import retry
    from tests.random_faults import attempt, sections

    sections.ALONE, attempt.MANNERS, attempt.RETRY_RATE = (sections.add,), (manner,), 1.0  # type: ignore[misc]
    retry.AttemptedWork.obstacle = lambda work: ""  # type: ignore[method-assign]


def old_snapshot(config: dict[str, Any]) -> None:
    """Grant locks inside transactions of SQLAlchemy whose snapshot is older than the lock."""
    from sqla_dlock.tie import SessionAcquire
    from tests.random_faults import attempt

    attempt.MANNERS = ("inside",)  # type: ignore[misc]
    SessionAcquire._refuse_old_snapshot = lambda *_: None  # type: ignore[method-assign]


def two_fences(config: dict[str, Any]) -> None:
    """Use the fence table for a row that carries its own fence if its lock is named by a text.

    The store grants every request, so that holders of both spellings meet.
    """
    from sqla_dlock import locks

    _grant_everything()
    locks.with_class = lambda parts: parts
    if _tied_databases() is not None:
        from django_dlock import names

        names._with_model = lambda parts: parts


def stale_columns_saved(config: dict[str, Any]) -> None:
    """Let Django's save() write the instance's values of the fence that its row carries."""
    if _tied_databases() is not None:
        from django.db.models import Field

        from django_dlock.fencing import FenceHolderField, FenceTokenField

        FenceTokenField.pre_save = FenceHolderField.pre_save = Field.pre_save  # type: ignore[method-assign,assignment]


def work_outlives_block(config: dict[str, Any]) -> None:
    """Let a thread that a coroutine has left behind begin its transaction after the block, without a lease."""
    from tests.random_faults import attempt, sections

    sections.ALONE, attempt.MANNERS, attempt.RETRY_RATE = (sections.add,), ("left early",), 0.0  # type: ignore[misc]
    if (tied := _tied_databases()) is not None:
        from tests.random_faults import django_clients

        tied.is_left = property(lambda _: False, lambda *_: None)
        django_clients.MAX_PATIENCE_S = 0.0  # type: ignore[misc]


def _tied_databases() -> Any:
    """Return Django's class for a lease tied to databases; None in a worker without Django."""
    from django.conf import settings

    if not settings.configured:
        return None
    from django_dlock.tie import TiedDatabases

    return TiedDatabases


def _releaser(config: dict[str, Any]) -> Callable[[Tie], None]:
    """Return a function that releases a lease behind its holder's back, and then gives others time to acquire it."""
    from dlock_core.stores import force_release
    from tests.random_faults.core_clients import backends

    made = backends(config)

    def release(tie: Tie) -> None:
        store = tie.held.name.partition(":")[2].partition("-")[0]
        with contextlib.suppress(DLockError):
            force_release(made[store], tie.held.name, tie.held.token, by="sabotage")
        time.sleep(0.05)

    return release


def _grant_everything() -> None:
    _replace_store(lambda floor: max(time.time_ns() // 1000, floor + 1))


def _replace_store(token: Callable[[int], int]) -> None:
    """Make every Redis of this process a store that grants every request."""
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
    "inner-block-releases": inner_block_releases,
    "block-end-releases": block_end_releases,
    "never-left": never_left,
    "readers-apart": readers_apart,
    "stale-reader-commits": stale_reader_commits,
    "savepoint-takes-admit": savepoint_takes_admit,
    "autocommit-passes-by": autocommit_passes_by,
    "raw-commit-passes-by": raw_commit_passes_by,
    "committed-though-repeated": committed_though_repeated,
    "half-repeated": half_repeated,
    "old-snapshot": old_snapshot,
    "two-fences": two_fences,
    "stale-columns-saved": stale_columns_saved,
    "work-outlives-block": work_outlives_block,
}


def commit(config: dict[str, Any]) -> None:
    """Apply the sabotage of the run, if any, in this worker."""
    if config["sabotage"]:
        SABOTAGES[config["sabotage"]](config)
