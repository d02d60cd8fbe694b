"""`retry_on_conflict`: repeat the whole work, in a new transaction, if another transaction was faster."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from asgiref.sync import iscoroutinefunction
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError

from django_dlock.connections import (
    for_each_connection,
    in_transaction,
    initialized,
    open_transaction,
    roll_back_refusal,
)
from django_dlock.tracker import tracker_for, wrap_statements
from django_dlock.transactions import is_undone, text_of
from dlock_core.late import runs_async
from dlock_core.sql.committed_statements import commits_work, has_changed, remains_after_error
from dlock_core.sql.statement_kinds import surely_reads
from dlock_core.transactions.retry import (
    ATTEMPTS,
    SWALLOWED,
    WITHIN_S,
    AttemptedWork,
    Policy,
    check_answer,
    check_function,
    claim_databases,
    current_attempts,
    is_retry,
    report,
    with_retry,
)
from dlock_core.transactions.tie import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from django_dlock.tracker import ConnectionTracker
    from django_dlock.transactions import Transaction
    from dlock_core.options import Seconds

__all__ = ["is_retry", "retry_on_conflict"]

P = ParamSpec("P")
T = TypeVar("T")


@overload
def retry_on_conflict(function: Callable[P, T], /) -> Callable[P, T]: ...
@overload
def retry_on_conflict(
    *, attempts: int = ATTEMPTS, within: Seconds | None = WITHIN_S, using: str | Iterable[str] = "default"
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
def retry_on_conflict(
    function: Callable[..., Any] | None = None,
    /,
    *,
    attempts: int = ATTEMPTS,
    within: Seconds | None = WITHIN_S,
    using: str | Iterable[str] = "default",
) -> Any:
    """Decorate a function to run in a new transaction, and to run again from the start after a conflict.

    A conflict is StaleObject, StaleToken, RowLocked, a deadlock, a serialization failure or a lock timeout. The pauses
    between runs have full jitter. There are at most `attempts` runs, none of which starts later than `within` seconds
    after the first; then the last conflict is raised, with a note of the number of runs. Any other error, and a
    cancellation, is raised at once. To wait in the row's queue from the second run on, lock the row if `is_retry()`.

    The function runs again only if everything that the run did is known to be rolled back. A conflict is raised at
    once, with a note, if a part of the run is or may be committed: by a COMMIT whose `on_commit` functions raised the
    conflict, by one of several databases, by another transaction inside the function, by a write in autocommit mode,
    by DDL on MySQL and MariaDB. What a procedure, or in autocommit mode the function of a SELECT, commits is not
    detected.

    Raises TransactionManagementError if the function swallows an error that has undone its transaction: on PostgreSQL
    any error outside of a savepoint, on MySQL and MariaDB a deadlock, even in a savepoint. The work before the error
    would not be committed, while the work after it would be.

    `using` names the database, or several. Raises TransactionManagementError if a transaction is already open on one of
    them, because what it has read before would not be read again, and inside another `retry_on_conflict` of one of
    them. Put side effects in `transaction.on_commit`.

    A coroutine function is run again without a transaction, because none can be opened around a coroutine: open one in
    the function that it passes to `sync_to_async`. With a second transaction it would not run again: the first one is
    committed. A swallowed error is detected at the COMMIT of its transaction; after a deadlock in a savepoint Django
    rolls back without an error.
    """
    policy = Policy(attempts=attempts, within=within)
    aliases = _aliases(using)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        check_function(function)
        is_async = runs_async(function, iscoroutinefunction)
        attempt = _attempt_of_coroutine if is_async else _attempt_in_new_transaction
        return with_retry(function, policy, partial(attempt, function, aliases), is_async=is_async)

    return decorate if function is None else decorate(function)


def _aliases(using: Any) -> tuple[str, ...]:
    aliases = (using,) if isinstance(using, str) else tuple(using) if hasattr(using, "__iter__") else ()
    if not aliases or not all(isinstance(alias, str) for alias in aliases):
        raise TypeError(f"using is the alias of a database, or several of them, not {using!r:.80}")
    return tuple(dict.fromkeys(aliases))


def _attempt_in_new_transaction(
    function: Callable[..., Any], aliases: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    for connection in initialized().values():
        if _statement not in connection.execute_wrappers:
            wrap_statements(connection, _statement)
    _refuse_inside(aliases)
    with ExitStack() as transactions:
        for alias in aliases:
            transactions.enter_context(transaction.atomic(using=alias, durable=True))
            if (open_one := open_transaction(connections[alias])) is not None:
                _follow(alias, open_one)
        answer = roll_back_refusal(check_answer(function, function(*args, **kwargs)), *aliases)
        for alias in aliases:  # before the first of them is committed
            _refuse_undone(alias)
        return answer


def _refuse_undone(alias: str) -> None:
    open_one = open_transaction(connections[alias])
    # If Django cannot undo a savepoint, it would roll back without an error, as it does on purpose.
    has_begun_anew = open_one is not None and open_one.is_begun_anew
    if has_begun_anew or (is_undone(connections[alias]) and not transaction.get_rollback(alias)):
        raise TransactionManagementError(SWALLOWED)


async def _attempt_of_coroutine(
    function: Callable[..., Any], aliases: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    _refuse_nested(aliases)
    return check_answer(function, await function(*args, **kwargs))


def _refuse_inside(aliases: tuple[str, ...]) -> None:
    _refuse_nested(aliases)
    for alias in aliases:
        if in_transaction(alias):
            raise TransactionManagementError(
                f"retry_on_conflict needs to begin a transaction on {alias!r}, and one is already open here: "
                "call the function outside of it (a view under ATOMIC_REQUESTS: decorate it with non_atomic_requests)"
            )


def _refuse_nested(aliases: tuple[str, ...]) -> None:
    if not claim_databases(frozenset(aliases)):
        raise TransactionManagementError(
            f"retry_on_conflict on {', '.join(map(repr, aliases))} inside another one on the same database, which "
            "would repeat what this one commits: decorate only the outer function"
        )


def _follow(alias: str, open_one: Transaction) -> None:
    """Report to the attempts how an open transaction ends."""

    def followed() -> AttemptedWork:
        part = AttemptedWork(f"work on {alias!r}")
        open_one.settlers.append(part.settle)
        return part

    report(open_one, followed)


def _statement(execute: Callable[..., Any], sql: Any, params: Any, *rest: Any) -> Any:
    """Replaces Django's execute(sql, params, many, context)."""
    connection, attempts = rest[1]["connection"], current_attempts.get()
    if not attempts or (tracker := tracker_for(connection)).suspended.depth:  # or dlock's own, such as the fence's
        return execute(sql, params, *rest)
    open_one = tracker.transaction()
    if open_one is not None and open_one.is_manual:
        tracker.listen()  # SQLite may commit a part of it
    if open_one is not None and open_one not in attempts[-1].parts:  # then the outer attempts have it, too
        _follow(connection.alias, open_one)
    text = sql if type(sql) is str else text_of(sql, connection)
    if open_one is not None and connection.vendor == "mysql":
        _note_commit(open_one, text)
    many, cursor = rest[0], rest[1]["cursor"]
    try:
        answer = execute(sql, params, *rest)
    except BaseException as error:
        if open_one is not None:
            open_one.note_failure(connection, error)
        if not surely_reads(text) and remains_after_error(text, error, has_many_parameters=many):
            _report_write(tracker)
        raise
    rows = None if cursor.description else cursor.rowcount  # SQLite counts rows that it returns when they are fetched
    if not surely_reads(text) and has_changed(text, rows, has_many_parameters=many):
        _report_write(tracker)
    return answer


def _note_commit(transaction: Transaction, sql: str) -> None:
    """Record what a statement commits in a transaction of MySQL or MariaDB, although Django's goes on."""
    transaction.has_written = transaction.has_written or not surely_reads(sql)
    if commits_work(sql, has_written=transaction.has_written):
        transaction.note_committed(has_written=True)


def _report_write(tracker: ConnectionTracker) -> None:
    report((tracker.current or object(), "writes"), partial(_write, tracker))


def _write(tracker: ConnectionTracker) -> AttemptedWork:
    """Return the work of a write: pending in a transaction that outlasts the attempt, committed outside of any."""
    part = AttemptedWork(f"work on {tracker.connection.alias!r}")
    if (begun := tracker.current) is None:
        part.settle(Outcome.COMMITTED)
    else:
        part.is_pending = lambda: tracker.current is begun
    return part


for_each_connection(partial(wrap_statements, wrapper=_statement))  # an attempt may move to another thread
