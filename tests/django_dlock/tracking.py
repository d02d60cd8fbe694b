"""Access to a connection's tracker for tests: its statements and its transactions."""

from collections.abc import Callable

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_dlock.connections import open_transaction
from django_dlock.tracker import tracker_for
from dlock_core.transactions.tie import Outcome


def transaction_key(using: str = "default") -> object | None:
    """Return an object that stands for the open transaction, or None; compare by identity.

    Every transaction has its own, including each one between two commits with autocommit off.
    """
    return open_transaction(connections[using])


def before_statements(hook: Callable[[BaseDatabaseWrapper, str, bool], None], using: str = "default") -> None:
    """Call `hook(connection, sql, in_transaction)` before every statement on this thread's connection from now on.

    What it raises reaches the caller, and the statement is not sent. Adding the same hook again changes nothing,
    nor does closing the connection. It is not called for statements that hooks send, BEGIN, COMMIT, ROLLBACK, the end
    of a savepoint, or what bypasses Django's `cursor.execute()` and `executemany()`: `callproc()`, `copy()`.
    """
    tracker = tracker_for(connections[using])
    tracker.listen()
    if hook not in tracker.hooks:
        tracker.hooks.append(hook)


def on_end(
    settle: Callable[[Outcome], object], *, using: str = "default", before_commit: Callable[[], object] | None = None
) -> None:
    """Call `settle(outcome)` once the end of the open transaction is known; see `Transaction.settlers` and `checks`.

    Raises RuntimeError outside a transaction.
    """
    transaction = open_transaction(connections[using])
    if transaction is None:
        raise RuntimeError(f"on_end() needs an open transaction on database {using!r}: use transaction.atomic()")
    transaction.settlers.append(settle)
    if before_commit is not None:
        transaction.checks.append(before_commit)
