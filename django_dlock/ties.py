"""Ties a lease to the transactions that work under it, and guards each of them with the fence.

Leases that are held are known by context (a ContextVar), which follows `sync_to_async` into its thread. A hook before
each statement notices when a transaction begins under a lease: then the token is admitted, before anything is read.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from django.db import connections
from django.db.backends.signals import connection_created
from django.db.transaction import TransactionManagementError
from django.dispatch import receiver

from django_dlock.backends.advisory import home_of
from django_dlock.errors import LeaseLost, as_database_error
from django_dlock.statements import announcer
from django_dlock.transactions import in_transaction
from django_dlock.watch import watch
from dlock_core.database_session import comment
from dlock_core.errors import DLockError
from dlock_core.guard import Guard
from dlock_core.tie import Outcome, Tie

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_dlock.fencing import TableFence
    from django_dlock.watch import Transaction
    from dlock_core.fencing import Claim
    from dlock_core.held import Held
    from dlock_core.tied import FenceForm

__all__ = ["DatabaseTie", "apart", "current", "forget", "remember"]

_WRITES: Final = re.compile(
    r"\s*(?:INSERT|UPDATE|DELETE|REPLACE|MERGE|TRUNCATE|COPY)\b"
    r"|\s*WITH\b.*\b(?:INSERT\s+INTO|DELETE\s+FROM|MERGE\s+INTO|(?<!FOR )(?<!KEY )UPDATE)\b",
    re.IGNORECASE | re.DOTALL,
)

_current: ContextVar[tuple[DatabaseTie, ...]] = ContextVar("dlock_current_ties", default=())


class DatabaseTie(Tie):
    """One lease and the databases it protects; without a block in it, only the transactions that it knows.

    `deadline` bounds the first wait for another's row lock.
    """

    def __init__(self, held: Held, *, fence: TableFence, wait: float | None, deadline: float) -> None:
        super().__init__(held)
        self.fence, self.guard = fence, Guard(held, wait=wait, deadline=deadline)
        self.is_aborted = False
        """Its block ended with an error: what still runs in a thread must not begin another transaction."""
        self._forms: dict[str, FenceForm] = {}
        """The databases it protects, and how."""
        self.home = home_of(held.backend)
        """The database in whose transaction the lock is: no fence is needed there, one COMMIT ends both."""
        self._around: object = watch(connections[self.home]).transaction() if self.home else None
        """That transaction; another thread's, in the same database, is none of it."""
        self._admitted: dict[object, bool] = {}
        """The open transactions tied to the lease, and whether each has been admitted."""

    def bind(self, using: str, form: FenceForm) -> None:
        """Take up a new lease: tie every transaction that is open in this thread, and protect a database."""
        self.supersede(current())
        self.protect(using, form)
        for connection in connections.all(initialized_only=True):
            self.enter(connection)
        if self.is_inside or in_transaction(using):
            self.leave()  # like a row lock: the transaction's end releases it

    def protect(self, using: str, form: FenceForm) -> None:
        """Protect a database from now on: its open transaction, and those that begin under the lease."""
        form = False if using == self.home else form
        known, connection = self._forms.get(using), connections[using]
        if known is None or (form and not known):
            self._forms[using] = self._prepare(connection, form)
        self.enter(connection)

    def enter(self, connection: BaseDatabaseWrapper) -> None:
        """Tie the open transaction of this thread's connection, if any, to the lease, and admit the token into it."""
        transaction = watch(connection).transaction()
        if transaction is None or self._admitted.get(transaction):
            return
        if transaction not in self._admitted:
            self._refuse_aborted()
            self._refuse_lost()
            self._begin(connection, transaction)
        if self._forms.get(connection.alias) == "transaction":
            self._guard_with(self.fence.admit, connection)
            transaction.undo.append(lambda: self._undo(transaction))
        self._admitted[transaction] = True

    def statement(self, connection: BaseDatabaseWrapper, sql: str, *, inside: bool) -> None:
        """Hear of a statement that is about to be sent under the lease."""
        if connection.alias not in self._forms:
            return
        if inside:
            if self.depth or self.is_aborted or watch(connection).transaction() in self._admitted:
                self.enter(connection)
        elif _WRITES.match(sql):
            self._refuse_aborted()
            self._refuse_unfenced(connection)

    def _prepare(self, connection: BaseDatabaseWrapper, form: FenceForm) -> FenceForm:
        announcer(connection).tell(_before_statement)
        if not form:
            return False
        if (transaction := watch(connection).transaction()) is not None:
            self._undo(transaction)
            return "transaction"  # what it commits on its own would be no part of this transaction
        if form == "lease":
            self._guard_with(self.fence.announce, connection)
        elif self.held.request.shared:
            with announcer(connection).quietly:
                self.fence.prepare(connection, self.guard.claim())
        return form

    def _begin(self, connection: BaseDatabaseWrapper, transaction: Transaction) -> None:
        def settle(outcome: Outcome) -> None:
            self._admitted.pop(transaction, None)
            self.settle(outcome, ends_lock=transaction is self._around)
            if self.is_over or self.held.ended is not None:
                forget(self)

        transaction.on_end(settle, before_commit=lambda: self._before_commit(connection))
        self.begin()
        self._admitted[transaction] = False
        if transaction is self._around:
            transaction.undo.append(lambda: self._savepoint_undone(connection, transaction))
        if connection.vendor == "mysql":
            transaction.comment = comment(self.held.request.holder)

    def _before_commit(self, connection: BaseDatabaseWrapper) -> None:
        if self.is_given_up:
            return
        self._refuse_lost()
        form = self._forms.get(connection.alias)
        if form == "lease":
            self._guard_with(self.fence.confirm, connection)
        elif form:
            self.enter(connection)

    def _savepoint_undone(self, connection: BaseDatabaseWrapper, transaction: object) -> None:
        if watch(connection).current is transaction:  # else it is the end of all of it
            self.undone()

    def _refuse_aborted(self) -> None:
        if self.is_aborted:
            reason = "the block that held it ended with an error before this work began"
            raise LeaseLost(self.held.name, token=self.held.token, reason=reason)

    def _refuse_lost(self) -> None:
        try:
            self.check()
        except DLockError as error:
            raise as_database_error(error) from None

    def _refuse_unfenced(self, connection: BaseDatabaseWrapper) -> None:
        if self.depth and self._forms[connection.alias]:
            self._refuse_lost()
            raise TransactionManagementError(
                f"a write outside a transaction cannot be fenced by the lock {self.held.name!r}: open "
                "transaction.atomic() inside the lock, or take it with fence=False if something else protects the data"
            )

    def _guard_with(self, step: Callable[[Any, Claim], None], connection: BaseDatabaseWrapper) -> None:
        with announcer(connection).quietly:
            self.guard(partial(step, connection))

    def _undo(self, transaction: object) -> None:
        if transaction in self._admitted:
            self._admitted[transaction] = False  # the savepoint took the admit with it: admit again before going on


def current() -> list[DatabaseTie]:
    """Give the leases that this context holds."""
    return [tie for tie in _current.get() if tie.held.ended is None and not tie.is_given_up]


def remember(tie: DatabaseTie) -> None:
    """Hold a lease in this context from now on."""
    _current.set((*current(), tie))


def forget(tie: DatabaseTie) -> None:
    """Hold it no more."""
    _current.set(tuple(other for other in _current.get() if other is not tie and other.held.ended is None))


@contextmanager
def apart() -> Iterator[None]:
    """Hold nothing for a while, whatever this context holds: what happens inside neither joins it nor ends it."""
    token = _current.set(())
    try:
        yield
    finally:
        _current.reset(token)


@receiver(connection_created)
def _listen(connection: BaseDatabaseWrapper, **_: object) -> None:
    """Hear of the statements of every connection: work under a lease may move to a thread that has its own."""
    if any(connection is ours for ours in connections.all(initialized_only=True)):
        announcer(connection).tell(_before_statement)


def _before_statement(connection: BaseDatabaseWrapper, sql: str, inside: bool) -> None:  # noqa: FBT001 - the hook's form
    for tie in _current.get():
        if (tie.held.ended is None and not tie.is_given_up) or tie.is_aborted:
            tie.statement(connection, sql, inside=inside)
