"""The database connections of this process: visits to each of them, and their open transactions."""

from __future__ import annotations

import os
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from weakref import WeakSet

from django.db import connections
from django.db.backends.signals import connection_created
from django.db.transaction import set_rollback
from django.dispatch import receiver
from django.http.response import HttpResponseBase

from django_dlock.atomic_blocks import has_open_transaction
from django_dlock.tracker import ConnectionTracker, tracker_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_dlock.transactions import Transaction

    Visitor: TypeAlias = Callable[[BaseDatabaseWrapper], None]

__all__ = [
    "for_each_connection",
    "in_transaction",
    "initialized",
    "listen_to_all",
    "listening_tracker",
    "on_rollback",
    "open_in_thread",
    "open_transaction",
    "restore_on_rollback",
    "roll_back_refusal",
]

T = TypeVar("T")


def initialized() -> dict[str, BaseDatabaseWrapper]:
    """Return the connections of this thread by alias: `connections.all(initialized_only=True)` in half the time."""
    local: Any = connections._connections  # type: ignore[attr-defined]
    found: dict[str, BaseDatabaseWrapper] = {}
    for alias in connections.settings:
        if (connection := getattr(local, alias, None)) is not None:
            found[alias] = connection
    return found


def listening_tracker(connection: BaseDatabaseWrapper) -> tuple[ConnectionTracker, Transaction | None]:
    """Return the tracker of a connection, which follows every statement from now on, and the open transaction."""
    tracker: ConnectionTracker = vars(connection).get("_dlock_tracker") or tracker_for(connection)
    if tracker._statement not in connection.execute_wrappers:
        tracker.listen()
    return tracker, tracker.transaction()


def open_transaction(connection: BaseDatabaseWrapper) -> Transaction | None:
    """Return the transaction that is open on a connection."""
    return tracker_for(connection).transaction()


def open_in_thread() -> set[object]:
    """Return the open transactions of this thread that were seen so far."""
    return {tracker_for(connection).current for connection in initialized().values()}


_guard: Final = RLock()
"""Held briefly while a connection or a visitor is registered, perhaps in another thread."""
os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_guard.release)
_known: Final[WeakSet[BaseDatabaseWrapper]] = WeakSet()
"""The connections of all threads."""
_visitors: list[Visitor] = []
"""Empty until the module of locks or retries is loaded: until then statements bypass dlock."""


@receiver(connection_created)
def _note_connection(connection: BaseDatabaseWrapper, **_: object) -> None:
    if any(connection is known for known in connections.all(initialized_only=True)):
        with _guard:
            _known.add(connection)
            visitors = list(_visitors)
        for visit in visitors:
            visit(connection)


def for_each_connection(visit: Visitor) -> None:
    """Call `visit(connection)` for the connections of all threads, and for each that is opened from now on.

    It may be called more than once for a connection, and by another thread than the connection's.
    """
    with _guard:
        _visitors.append(visit)
        known = list(_known)
    for connection in known:
        visit(connection)


def listen_to_all() -> None:
    """Follow the statements of every connection: work under a lease may move to a thread with other connections."""
    for_each_connection(lambda connection: tracker_for(connection).listen())


def in_transaction(using: str = "default") -> bool:
    """Return whether a transaction is open on this thread's connection: atomic, or autocommit turned off by hand.

    Atomic blocks of a test case do not count, nor does a block whose connection has been closed inside it.
    """
    connection = connections[using]
    tracker: ConnectionTracker | None = vars(connection).get("_dlock_tracker")
    return (tracker is not None and tracker.current is not None) or has_open_transaction(connection)


def restore_on_rollback(instance: object, values: dict[str, object], *, using: str = "default") -> None:
    """Restore these values of an instance's attributes if the work done so far is undone; see `Transaction.undo`.

    The instance is not kept alive, and an instance that is written many times is recorded once. ABSENT removes an
    attribute.
    """
    transaction = _undoing_transaction(using)
    if transaction is not None:
        transaction.restore_on_rollback(instance, values)


def on_rollback(step: Callable[[], object], *, using: str = "default") -> None:
    """Call a function once if the work done so far is undone; see `Transaction.undo`. Nothing outside a transaction."""
    transaction = _undoing_transaction(using)
    if transaction is not None:
        transaction.undo.append(step)


def _undoing_transaction(using: str) -> Transaction | None:
    """Return the open transaction, and notice from now on when its savepoints are rolled back by hand."""
    transaction = open_transaction(connections[using])
    if transaction is not None:
        tracker_for(connections[using]).listen()
    return transaction


def roll_back_refusal(answer: T, *aliases: str) -> T:
    """Return the answer of a view; roll back the innermost atomic blocks if REST framework made it of an exception.

    REST framework itself does that only on databases with ATOMIC_REQUESTS.
    """
    if isinstance(answer, HttpResponseBase) and getattr(answer, "exception", False):
        for alias in aliases:
            set_rollback(True, using=alias)
    return answer
