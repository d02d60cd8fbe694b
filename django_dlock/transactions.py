"""Callbacks in the life of a transaction: before its statements and its COMMIT, after its end, and when work is undone.

A transaction here is the outermost one of the user's on this thread's connection: a test case's own does not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import connections

from django_dlock.connections import Memory, announcer, watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.base.base import BaseDatabaseWrapper

    from dlock_core.transactions.tie import Outcome

__all__ = [
    "before_statements",
    "has_spoken",
    "in_transaction",
    "on_end",
    "on_rollback",
    "restore_on_rollback",
    "transaction_key",
]


def in_transaction(using: str = "default") -> bool:
    """Say whether a transaction is open on this thread's connection: an atomic block, or autocommit turned off by hand.

    Atomic blocks of a test case do not count, nor does a block whose connection has been closed inside it.
    """
    return watch(connections[using]).is_open()


def transaction_key(using: str = "default") -> object | None:
    """Return an object that stands for the open transaction, None without one; compare by identity.

    Every transaction has its own, also each one between two commits with autocommit off.
    """
    return watch(connections[using]).transaction()


def has_spoken(using: str = "default") -> bool:
    """Say whether a statement was sent in the open transaction, that may have taken its snapshot."""
    connection = connections[using]
    announcer(connection)
    transaction = watch(connection).transaction()
    return transaction is not None and transaction.has_spoken


def on_end(
    settle: Callable[[Outcome], None],
    *,
    using: str = "default",
    before_commit: Callable[[], None] | None = None,
) -> None:
    """Call `settle` exactly once, as soon as it is known how the open transaction has ended.

    After COMMIT it comes before Django's on_commit functions. The last registered is called first. The connection is
    free for new transactions. What it raises is logged and not passed on, but KeyboardInterrupt is, at the end.
    UNKNOWN: the connection was lost, or an interrupt came, while COMMIT was under way.

    `before_commit` is called inside the transaction just before COMMIT, the first registered first. What it raises is
    passed on, and the transaction is rolled back.

    Raises RuntimeError outside a transaction.
    """
    transaction = watch(connections[using]).transaction()
    if transaction is None:
        raise RuntimeError(f"on_end() needs an open transaction on database {using!r}: use transaction.atomic()")
    transaction.on_end(settle, before_commit)


def on_rollback(restore: Callable[[], None], *, using: str = "default") -> None:
    """Call `restore` once if the work done so far is undone: by rollback of the transaction or to an earlier savepoint.

    The last registered is called first; what it raises is logged. Not called when the outcome of COMMIT is unknown.
    Does nothing outside a transaction.
    """
    transaction = watch(connections[using]).transaction()
    if transaction is not None:
        transaction.undo.append(restore)


def restore_on_rollback(instance: object, values: dict[str, object], *, using: str = "default") -> None:
    """Give attributes of an instance these values again if the work done so far is undone, as `on_rollback` says.

    The instance is not kept alive, and one that is written many times is remembered once. ABSENT removes an attribute.
    """
    transaction = watch(connections[using]).transaction()
    if transaction is None:
        return
    if not transaction.undo or not isinstance(transaction.undo[-1], Memory):
        transaction.undo.append(Memory())
    memory: Any = transaction.undo[-1]
    memory.note(instance, values)


def before_statements(hook: Callable[[BaseDatabaseWrapper, str, bool], None], using: str = "default") -> None:
    """Call `hook(connection, sql, in_transaction)` before every statement on this thread's connection from now on.

    What it raises reaches the caller, and the statement is not sent. Asking again with the same hook changes nothing,
    nor does closing the connection. Not called for statements that hooks send, for BEGIN, COMMIT and ROLLBACK, the end
    of a savepoint, and for what goes past Django's `cursor.execute()` and `executemany()`: `callproc()`, `copy()`.
    """
    announcer(connections[using]).tell(hook)
