"""Ties a lease to the transactions that work under it, and guards each of them with the fence.

Leases that are held are known by context (a ContextVar), which follows `sync_to_async` into its thread. A hook before
each statement notices when a transaction begins under a lease: then the token is admitted, before anything is read.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Literal

from django.db import connections
from django.db.transaction import TransactionManagementError

from django_dlock.errors import LeaseLost, as_database_error
from django_dlock.transactions import before_statements, in_transaction, on_end, on_rollback, transaction_key
from dlock_core import engine
from dlock_core.errors import DLockError
from dlock_core.errors import StaleToken as CoreStaleToken
from dlock_core.fencing import Claim
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.tie import Outcome, Tie

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_dlock.fencing import TableFence
    from dlock_core.held import Held

__all__ = ["DatabaseTie", "FenceForm", "current", "forget", "remember"]

FenceForm = Literal["transaction", "lease", False]

_WRITES: Final = re.compile(r"\s*(?:INSERT|UPDATE|DELETE|REPLACE|MERGE|TRUNCATE|COPY)\b", re.IGNORECASE)

_current: ContextVar[tuple[DatabaseTie, ...]] = ContextVar("dlock_current_ties", default=())


class DatabaseTie(Tie):
    """One lease, the databases it protects, and how: `deadline` bounds the first wait for another's row lock."""

    def __init__(self, held: Held, *, fence: TableFence, form: FenceForm, wait: float | None, deadline: float) -> None:
        super().__init__(held)
        self.fence, self.form, self.wait, self.deadline = fence, form, wait, deadline
        self.depth = 1
        self.cancelled = False
        """Its block was cancelled: what still runs in a thread must not begin another transaction."""
        self._aliases: set[str] = set()
        self._admitted: dict[object, bool] = {}
        """The open transactions tied to the lease, and whether each has been admitted."""

    def bind(self, using: str) -> None:
        """Protect a database from now on: its open transaction, or those that begin under the lease."""
        self._aliases.add(using)
        before_statements(_before_statement, using)
        for connection in connections.all(initialized_only=True):
            if in_transaction(connection.alias):
                self.enter(connection)
        if in_transaction(using):
            self.leave()  # like a row lock: the transaction's end releases it
        elif self.form == "lease":
            self._guard_with(self.fence.announce, connections[using])
        elif self.form and self.held.request.shared:
            self._guard_with(self.fence.prepare, connections[using])

    def enter(self, connection: BaseDatabaseWrapper) -> None:
        """Tie the open transaction of this thread's connection to the lease, and admit the token into it."""
        transaction = transaction_key(connection.alias)
        if transaction is None or self._admitted.get(transaction):
            return
        if transaction not in self._admitted:
            self._refuse_lost()
            self._begin(connection, transaction)
        if self.form == "transaction" and connection.alias in self._aliases:
            self._guard_with(self.fence.admit, connection)
            on_rollback(lambda: self._undo(transaction), using=connection.alias)
        self._admitted[transaction] = True

    def statement(self, connection: BaseDatabaseWrapper, sql: str, *, inside: bool) -> None:
        """Hear of a statement that is about to be sent under the lease."""
        if connection.alias not in self._aliases:
            return
        if inside:
            self.enter(connection)
        elif self.form and _WRITES.match(sql):
            self._refuse_lost()
            raise TransactionManagementError(
                f"a write outside a transaction cannot be fenced by the lock {self.held.name!r}: open "
                "transaction.atomic() inside the lock, or take it with fence=False if something else protects the data"
            )

    def demand(self, form: FenceForm, using: str) -> None:
        """Serve another caller that joins: perhaps with a fence where there was none, perhaps on another database."""
        if form and not self.form:
            self.form, self._admitted = form, dict.fromkeys(self._admitted, False)
        if using not in self._aliases:
            self._aliases.add(using)
            before_statements(_before_statement, using)
            self._admitted.pop(transaction_key(using), None)
        if in_transaction(using):
            self.enter(connections[using])

    def _begin(self, connection: BaseDatabaseWrapper, transaction: object) -> None:
        def settle(outcome: Outcome) -> None:
            self._admitted.pop(transaction, None)
            self.settle(outcome)
            if self.left:
                forget(self)

        on_end(settle, using=connection.alias, before_commit=lambda: self._before_commit(connection, transaction))
        self.begin()
        self._admitted[transaction] = False

    def _before_commit(self, connection: BaseDatabaseWrapper, transaction: object) -> None:
        self._refuse_lost()
        if self.form == "lease" and connection.alias in self._aliases:
            self._guard_with(self.fence.confirm, connection)
        elif not self._admitted.get(transaction):
            self.enter(connection)

    def _refuse_lost(self) -> None:
        if self.cancelled:
            reason = "the task that held it was cancelled before this transaction began"
            raise LeaseLost(self.held.name, token=self.held.token, reason=reason)
        try:
            self.check()
        except DLockError as error:
            raise as_database_error(error) from None

    def _guard_with(self, step: Callable[[Any, Claim], None], connection: BaseDatabaseWrapper) -> None:
        try:
            step(connection, self._claim())
        except CoreStaleToken as error:
            # A store that lost its data and its time gave a current holder too small a token: it gets a greater one.
            if self.transactions > 1 or not run(engine.raise_token(BLOCKING, self.held, error.highest or 0)):
                raise
            step(connection, self._claim())

    def _claim(self) -> Claim:
        request = self.held.request
        limit = self.wait if self.transactions > 1 else max(0.0, self.deadline - clock())
        limit = None if self.wait is None else limit
        return Claim(request.name, self.held.token, request.holder, request.shared, limit)

    def _undo(self, transaction: object) -> None:
        if transaction in self._admitted:
            self._admitted[transaction] = False  # the savepoint took the admit with it: admit again before going on


def current() -> list[DatabaseTie]:
    """Give the leases that this context holds."""
    return [tie for tie in _current.get() if tie.held.ended is None]


def remember(tie: DatabaseTie) -> None:
    """Hold a lease in this context from now on."""
    _current.set((*current(), tie))


def forget(tie: DatabaseTie) -> None:
    """Hold it no more."""
    _current.set(tuple(other for other in _current.get() if other is not tie and other.held.ended is None))


def _before_statement(connection: BaseDatabaseWrapper, sql: str, inside: bool) -> None:  # noqa: FBT001 - the hook's form
    for tie in _current.get():
        if tie.held.ended is None or tie.cancelled:
            tie.statement(connection, sql, inside=inside)
