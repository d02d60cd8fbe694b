"""Transactions that the database has undone, although their COMMIT succeeds, because the program swallowed an error.

As after a rollback, their versioned instances read their rows again: in memory they have versions that were never
committed, and which the next write of another user will give to the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from sqla_dlock.begun import has_begun
from sqla_dlock.connections import has_rolled_back, is_undone
from sqla_dlock.root_transaction import connections_in
from sqla_dlock.versions.in_memory import forget_undone
from sqla_dlock.versions.mapping import VersionedMixin

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.engine import ExceptionContext, Transaction
    from sqlalchemy.orm import SessionTransaction

__all__: list[str] = []

_failed: Final[WeakSet[Transaction]] = WeakSet()
"""Transactions that an error has undone; on PostgreSQL those that it may have undone, unless a savepoint saved them."""
_undone: Final[WeakSet[SessionTransaction]] = WeakSet()
"""Transactions of sessions that are about to commit nothing, or only what came after the error."""


@event.listens_for(Engine, "handle_error")
def _note_failure(context: ExceptionContext) -> None:
    connection = context.connection
    if connection is None or connection.closed or connection.invalidated or context.sqlalchemy_exception is None:
        return
    transaction = connection.get_transaction()
    if transaction is not None and _may_be_undone(connection, context.original_exception):
        _failed.add(transaction)


def _may_be_undone(connection: Connection, error: BaseException) -> bool:
    return connection.dialect.name == "postgresql" or not has_begun(connection) or has_rolled_back(connection, error)


@event.listens_for(Session, "before_commit")
def _note_undone(session: Session) -> None:
    if _failed and not session.in_nested_transaction():
        root: Any = session.get_transaction()
        if any(map(_is_undone, connections_in(root))):
            _undone.add(root)


def _is_undone(connection: Connection) -> bool:
    is_suspect = connection.get_transaction() in _failed
    return is_suspect and (connection.dialect.name != "postgresql" or is_undone(connection))


@event.listens_for(Session, "after_commit")
def _expire_versions(session: Session) -> None:
    if _undone and session.get_transaction() in _undone:
        for instance in session.identity_map.values():
            if isinstance(instance, VersionedMixin):
                session.expire(instance)
        forget_undone(session)
