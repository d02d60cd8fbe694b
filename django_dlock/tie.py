"""Ties a lease to the transactions of Django's connections, and guards each of them with the fence.

Held leases are recorded in a ContextVar, which follows `sync_to_async` into its thread. The tracker of a connection
calls them before each statement: when a transaction begins under a lease, the token is admitted into it before anything
is read.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from django.db import connections
from django.db.transaction import TransactionManagementError

from django_dlock.connections import initialized, listening_tracker, open_in_thread, open_transaction
from django_dlock.errors import LeaseLost, as_database_error
from django_dlock.ownership import Ownership
from django_dlock.tracker import leases_of_context, tracker_for
from django_dlock.transactions import is_idle
from dlock_core.backend import Released
from dlock_core.errors import DLockError
from dlock_core.flow import is_collecting, this_thread
from dlock_core.runtime import BLOCKING
from dlock_core.sql.database import comment
from dlock_core.sql.statement_kinds import (
    commits_implicitly,
    ends_transaction,
    is_data_statement,
    may_run_another,
    surely_reads,
)
from dlock_core.transactions.tie import TieState
from dlock_core.transactions.tied_lease import is_in_block

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_dlock.tracker import ConnectionTracker
    from django_dlock.transactions import Transaction
    from dlock_core.runtime import Runtime
    from dlock_core.transactions.fencing import FenceForm, FenceGate
    from dlock_core.transactions.tie import Tie
    from dlock_core.transactions.tied_lease import TiedLease

__all__ = ["TiedDatabases", "current"]

MAX_LEFT_LEASES: Final = 8
"""How many leases that were left a copy of a context keeps at most: each alone refuses what it would write."""


class TiedDatabases:
    """The connections under one lease: reports their transactions to its tie, and admits each at the fence.

    Once no block holds the lease any more, only the transactions that are already tied work under it.
    """

    settle_ended = None
    """None: the tracker of each connection settles its transactions, and repeats interrupted steps."""

    def __init__(self, tie: Tie, gate: FenceGate, here: dict[str, BaseDatabaseWrapper] | None = None) -> None:
        self.tie, self.held, self.gate = tie, tie.held, gate
        self._here = here
        """This thread's connections, if the acquire has looked them up."""
        self.is_aborted = False
        """Whether its block ended with an error: threads that still run must not begin another transaction."""
        self.ownership = Ownership(tie)
        self._thread = this_thread()
        """Where it was acquired: code that runs there after an interrupted block is not part of its work."""
        self.home: str | None = self.held.backend.capabilities.transaction_database
        """The database in whose transaction the lock is: it needs no fence, because one COMMIT ends both."""
        self._around = None
        if self.home is not None:
            self._around = open_transaction((here or {}).get(self.home) or connections[self.home])
        """That transaction; another thread's transaction in the same database does not count."""
        self._maybe_ended: set[object] = set()
        """The tied transactions whose last statement may have run other statements, which may have ended them."""
        self._around_block: frozenset[object] = frozenset()
        """The transactions inside which the lease was taken."""
        self._block_beyond: Callable[[], TiedLease | None] = lambda: None
        """The handle of a block that may go on without autocommit, after the transaction that held the lock."""
        self._bound: dict[Transaction, TiedLease] = {}
        """The handles that end with a transaction, by that transaction; the first, if there are several."""

    def bind(self, using: str, form: FenceForm, handle: TiedLease) -> None:
        """Tie every transaction that is open in this thread to a new lease, and protect a database."""
        self.ownership.acquired(handle)
        if self.home is not None:
            self.tie.supersede(other.tie for other in current())
        here = initialized() if self._here is None else self._here
        transaction = self._protect(here.get(using) or connections[using], form)
        for alias, connection in here.items():
            # A lock in a transaction ends with it. So another transaction is tied only when work is done in it under
            # the lock: the COMMIT of one that only happens to be open, and ends later, is not refused.
            if alias != using and self.home in (None, alias):
                tracker = tracker_for(connection)
                if (other := tracker.transaction()) is not None:
                    self._enter(tracker, other)
        self._here = None
        if self.tie.open:
            self._around_block = frozenset(self.tie.open)
            self._end_with_transaction(transaction, handle)
        known = leases_of_context.get()
        if known:
            held = [each for each in known if _is_held(each)]
            left = [each for each in known if each.is_left and each not in held]
            known = (*left[-MAX_LEFT_LEASES:], *held)
        leases_of_context.set((*known, self))

    def join(self, using: str, form: FenceForm, handle: TiedLease) -> None:
        """Attach a handle that has joined the lease."""
        self.ownership.joined(handle)
        self._end_with_transaction(self._protect(connections[using], form), handle)

    def keep(self, handle: TiedLease) -> None:
        """Keep a handle as long as its transaction, or otherwise this request, even if the caller drops it."""
        self.ownership.keep(handle)

    def _end_with_transaction(self, transaction: Transaction | None, handle: TiedLease) -> None:
        """End a handle that was taken inside a transaction with that transaction, like a row lock.

        Without autocommit a block may go on in further transactions: it holds the lease to its end.
        """
        transaction = self._around or transaction
        if transaction is None or (transaction.is_manual and is_in_block(handle) and self._around is None):
            return
        if transaction in self.tie.open:
            self.tie.bind_to(transaction, handle)
            self._bound.setdefault(transaction, handle)

    def _protect(self, connection: BaseDatabaseWrapper, form: FenceForm) -> Transaction | None:
        """Protect a database from now on; return its open transaction, which is tied to the lease."""
        tracker, transaction = listening_tracker(connection)
        using, forms = connection.alias, self.gate.forms
        form = False if using == self.home else form
        if form and not forms.get(using):
            with tracker.suspended:
                self.gate.protect(using, form, connection, is_inside=transaction is not None)
            if transaction is not None:
                self._admit_before_next(transaction)
        else:
            forms.setdefault(using, False)
        if transaction is not None:
            self._enter(tracker, transaction)
        return transaction

    def _enter(self, tracker: ConnectionTracker, transaction: Transaction) -> None:
        """Tie an open transaction to the lease, and admit the token into it."""
        connection = tracker.connection
        if transaction not in self.tie.open:
            if self.is_aborted or self.is_left or self.tie.state is not TieState.HELD:
                self._refuse_cut_off()
            if self.held.remaining() == 0.0:
                self._refuse_lost()
            self._begin(connection, transaction)
        elif self in transaction.passed:
            return
        self._admit(tracker, transaction)

    def _admit(self, tracker: ConnectionTracker, transaction: Transaction) -> None:
        connection = tracker.connection
        if self.gate.forms.get(connection.alias) == "transaction":
            if transaction in self._maybe_ended:
                self._refuse_ended(connection)
            with tracker.suspended:
                self.gate.admit(connection, connection.alias)
            transaction.undo.append(partial(self._admit_before_next, transaction))
        self._maybe_ended.discard(transaction)
        transaction.passed.add(self)

    def _confirm(self, connection: BaseDatabaseWrapper) -> None:
        with tracker_for(connection).suspended:
            self.gate.confirm(connection, connection.alias)

    def _begin(self, connection: BaseDatabaseWrapper, transaction: Transaction) -> None:
        ends_lock = transaction is self._around
        transaction.checks.append(partial(self._before_commit, connection, transaction))
        transaction.settlers.append(
            partial(self.tie.settle, transaction, settled=partial(self._settled, transaction), ends_lock=ends_lock)
        )
        self._maybe_ended &= self.tie.open
        self.tie.begin(transaction)
        self.ownership.began(transaction)
        if ends_lock:
            transaction.undo.append(partial(self._savepoint_undone, connection, transaction))
        if connection.vendor == "mysql":
            transaction.comment = comment(self.held.request.holder)

    def _settled(self, transaction: Transaction) -> None:
        if (handle := self._bound.get(transaction)) is not None:  # which the transaction's end has released
            if is_in_block(handle) and transaction.is_manual:
                self._block_beyond = ref(handle)
            else:
                self.note_detached(BLOCKING, handle)
            self._bound.pop(transaction, None)
        elif self.tie.is_over:
            self.forget()

    def _admit_before_next(self, transaction: Transaction) -> None:
        """Admit again before the next statement: a savepoint's rollback undid the admit, or there was no fence."""
        transaction.passed.discard(self)
        self._maybe_ended.discard(transaction)

    def before_statement(self, tracker: ConnectionTracker, transaction: Transaction | None, sql: str) -> None:
        """Admit the lease into the transaction in which a statement is about to be sent, or refuse the statement.

        A transaction on a database without a fence of this lease is tied as well: it is checked at its COMMIT, and the
        lease waits for its end. Writes there outside a transaction are not checked.
        """
        tie, connection = self.tie, tracker.connection
        self._refuse_beyond(connection)
        if (tie.held.ended is not None or tie.state is TieState.ABANDONED) and not (self.is_aborted or self.is_left):
            return
        if transaction not in tie.open and self.ownership.is_apart:
            return
        if transaction is not None:
            if transaction in tie.open or tie.handles or self._is_cut_off:
                self._enter(tracker, transaction)
            elif tie.state is TieState.RELEASING and self not in transaction.passed:
                # Another flow releases the lease now. The fence puts this transaction before a newer holder's.
                self._admit(tracker, transaction)
                if self.gate.forms.get(connection.alias) == "lease":
                    transaction.checks.append(partial(self._confirm, connection))
            is_tied = transaction in tie.open or connection.alias in self.gate.forms
            if is_tied and not is_data_statement(sql):
                self._refuse_end(connection, transaction, sql)
        elif connection.alias in self.gate.forms and not surely_reads(sql):
            self._refuse_cut_off()
            self._refuse_unfenced(connection)

    def _refuse_end(self, connection: BaseDatabaseWrapper, transaction: Transaction, sql: str) -> None:
        """Refuse a statement that ends a transaction; after one that may run such a statement, check for it."""
        is_mysql = connection.vendor == "mysql"
        if ends_transaction(sql) or (is_mysql and commits_implicitly(sql)):
            raise TransactionManagementError(
                f"{sql.strip():.40} ends a transaction under the lock {self.held.name!r} unchecked, bypassing Django: "
                "leave the atomic() block, or call transaction.commit() or rollback()"
            )
        if is_mysql and may_run_another(sql):
            self._admit_before_next(transaction)
            if transaction in self.tie.open:
                self._maybe_ended.add(transaction)

    def _refuse_ended(self, connection: BaseDatabaseWrapper) -> None:
        if is_idle(connection):
            raise TransactionManagementError(
                f"the transaction under the lock {self.held.name!r} was ended without Django, by a procedure or by "
                "the driver, and its earlier work is already committed or rolled back"
            )

    def _before_commit(self, connection: BaseDatabaseWrapper, transaction: Transaction) -> None:
        """Refuse a COMMIT that the lease no longer protects: raises LeaseLost, StaleToken.

        This is the last moment at which the transaction can be rolled back. The lease is checked first, because that
        costs no I/O. A fence in the transaction holds its row's lock until COMMIT, so there is nothing left to verify,
        unless a savepoint's rollback undid the admit.
        """
        if self.tie.state is TieState.ABANDONED:
            return
        if self.held.remaining() == 0.0:
            self._refuse_lost()
        form = self.gate.forms.get(connection.alias)
        if form == "lease":
            self._confirm(connection)
        elif form and self not in transaction.passed:
            self._enter(tracker_for(connection), transaction)
        elif form and connection.vendor != "mysql":
            self._refuse_ended(connection)

    def begin_release(self, handle: TiedLease) -> None:
        """Record that this flow asks for the release of a handle, which may be done by another task: by a shield's."""
        if self in leases_of_context.get():
            self.ownership.asks(handle)

    def begin_end(self, handle: TiedLease) -> None:
        """Refuse new work in copies of the owner's context already while the store is asked to release the lease."""
        if self in leases_of_context.get():
            self.ownership.releases(handle)

    def note_detached(self, runtime: Runtime, handle: TiedLease) -> None:
        """Remove the lease from this context, if nothing needs it here.

        In a task, transactions that are still open belong to threads, which have their own contexts, except for those
        of a function that has called the task.
        """
        ownership = self.ownership
        is_released = self in leases_of_context.get() and ownership.releases(handle)
        if self.tie.open and (runtime is BLOCKING or ownership.open_here):
            if is_released:
                ownership.depart()
        elif is_released:
            self._remove()
        elif not self.tie.handles:
            self.forget()

    def note_returned(self) -> None:
        """Remove a lease that has ended, now that this flow, its owner, has a function's answer or waits no more."""
        has_ended = self.tie.state is TieState.TORN or (self.ownership.is_over and self.tie.is_over)
        if has_ended and self.ownership.is_of_this_flow:
            self._remove()

    def end_flow(self) -> bool:
        """Detach the handles of this flow, which ends; return whether the lease has to be released now."""
        is_due = self.ownership.end_flow()
        self._remove()
        return is_due

    @property
    def is_left(self) -> bool:
        """Whether its owner has released it, and this context, a copy of the owner's, still has it."""
        return self.ownership.is_left

    def forget(self) -> None:
        """Remove the lease from this context; not from a copy, where what goes on may not begin another transaction."""
        if not self.is_left:
            self._remove()

    def _remove(self) -> None:
        others: tuple[TiedDatabases, ...] = ()
        if (known := leases_of_context.get()) != (self,):
            others = tuple(each for each in known if each is not self and (each.is_left or each.held.ended is None))
        leases_of_context.set(others)
        self.ownership.removed()

    def note_collected(self) -> None:
        """Remove a lease that was not released from this context, unless the collector calls this in other code."""
        if not is_collecting():
            self.forget()

    def _savepoint_undone(self, connection: BaseDatabaseWrapper, transaction: Transaction) -> None:
        if tracker_for(connection).current is transaction:  # otherwise the whole transaction ends
            self.tie.end_with_savepoint()

    def begin_failed_exit(self, runtime: Runtime, handle: TiedLease) -> None:
        """Stop the remaining work of a handle's block that is left with an error, if that is the last handle.

        In a task, threads may still run the block's work: they must not begin another transaction. In a thread, a
        transaction that began inside the block and is still open was interrupted in Django's own `atomic`, so that
        nothing is going to end it: the lease expires. If the transaction commits before that, it is checked like any
        other.
        """
        tie = self.tie
        others = tie.handles - {ref(handle)}
        if runtime is not BLOCKING:
            self.is_aborted = self.is_aborted or not (others or self.ownership.open_here)
        elif tie.open and tie.are_bound(others):
            begun: Any = (tie.open & open_in_thread()) - self._around_block
            if not all(each.is_manual for each in begun):
                self.held.abandon()

    @property
    def _is_cut_off(self) -> bool:
        """Whether the block ended before the work that begins now, which was started under the lease."""
        if self.is_aborted or self.is_left:
            return True
        return self.tie.state in (TieState.TORN, TieState.EXPIRING) and this_thread() is not self._thread

    def _refuse_cut_off(self) -> None:
        if self._is_cut_off:
            reason = "the block that held it ended before this work began"
            if not self.is_aborted and self.is_left:
                reason += ", which was started inside: wait for it there, or start it outside or in an empty context"
            raise LeaseLost(self.held.name, token=self.held.token, reason=reason)

    def _refuse_lost(self) -> None:
        if self.home is not None and self.held.ended is Released.RELEASED:
            reason = f"the transaction that held it, on {self.home!r}, ended before this one"
            raise LeaseLost(self.held.name, token=self.held.token, reason=reason)
        try:
            self.held.ensure()
        except DLockError as error:
            raise as_database_error(error) from None

    def _refuse_beyond(self, connection: BaseDatabaseWrapper) -> None:
        if connection.alias in self.gate.forms and is_in_block(self._block_beyond()):
            self._refuse_lost()

    def _refuse_unfenced(self, connection: BaseDatabaseWrapper) -> None:
        if self.tie.handles and self.gate.forms[connection.alias]:
            self._refuse_lost()
            raise TransactionManagementError(
                f"a write outside a transaction cannot be fenced by the lock {self.held.name!r}: open "
                "transaction.atomic() inside the lock, or take it with fence=False if something else protects the data"
            )


def current() -> list[TiedDatabases]:
    """Return the leases that this context holds."""
    known = leases_of_context.get()
    return [each for each in known if _is_held(each)] if known else []


def _is_held(each: TiedDatabases) -> bool:
    tie = each.tie
    return (
        tie.held.ended is None and tie.state is not TieState.ABANDONED and not (tie.is_over or each.ownership.is_apart)
    )
