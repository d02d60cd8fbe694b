"""Ties a lease to the transactions that work under it, and guards each of them with the fence.

Leases that are held are known by context (a ContextVar), which follows `sync_to_async` into its thread. A hook before
each statement notices when a transaction begins under a lease: then the token is admitted, before anything is read.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from django.db import connections
from django.db.backends.signals import connection_created
from django.db.models.signals import pre_migrate
from django.db.transaction import TransactionManagementError
from django.dispatch import receiver

from django_dlock.connections import announcer, watch
from django_dlock.errors import LeaseLost, NotSupported, SnapshotTooOld, as_database_error
from django_dlock.transactions import has_spoken
from dlock_core.errors import DLockError
from dlock_core.owner import in_task
from dlock_core.sql import database
from dlock_core.sql.database import comment
from dlock_core.sql.statement_kinds import ends_transaction, surely_reads
from dlock_core.transactions.fencing import Guard
from dlock_core.transactions.tie import Outcome, Tie, stop_renewing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_dlock.connections import Transaction
    from django_dlock.fencing import TableFence
    from dlock_core.leases.lease import Held
    from dlock_core.transactions.fencing import Claim
    from dlock_core.transactions.transaction_lock import FenceForm, TiedLease

__all__ = ["DatabaseTie", "apart", "current", "forget", "keep", "remember"]


_current: ContextVar[tuple[DatabaseTie, ...]] = ContextVar("dlock_current_ties", default=())
_kept: ContextVar[tuple[TiedLease, ...]] = ContextVar("dlock_kept_leases", default=())
"""Leases without a block and without a transaction: their context keeps them, also when the caller does not."""


class DatabaseTie(Tie):
    """One lease and the databases it protects; without a block in it, only the transactions that it knows.

    `deadline` bounds the first wait for another's row lock.
    """

    def __init__(self, held: Held, *, fence: TableFence, wait: float | None, deadline: float) -> None:
        super().__init__(held)
        self.fence, self.guard = fence, Guard(held, wait=wait, deadline=deadline)
        self.is_aborted = False
        """Its block ended with an error: what still runs in a thread must not begin another transaction."""
        self._thread = threading.get_ident()
        """Where it was acquired: what goes on there after its block was torn off is none of its work."""
        self._forms: dict[str, FenceForm] = {}
        """The databases it protects, and how."""
        self.home: str | None = held.backend.capabilities.transaction_database
        """The database in whose transaction the lock is: no fence is needed there, one COMMIT ends both."""
        self._around: object = watch(connections[self.home]).transaction() if self.home else None
        """That transaction; another thread's, in the same database, is none of it."""
        self._admitted: dict[object, bool] = {}
        """The open transactions tied to the lease, and whether each has been admitted."""
        self._around_block: frozenset[object] = frozenset()
        """The transactions inside of which the lease was taken."""

    def bind(self, using: str, form: FenceForm, lease: TiedLease) -> None:
        """Take up a new lease: tie every transaction that is open in this thread, and protect a database."""
        self.supersede(current())
        self.protect(using, form)
        for connection in connections.all(initialized_only=True):
            self.enter(connection)
        self._around_block = frozenset(self.open)
        self._end_with_transaction(using, lease)

    def take_in(self, using: str, form: FenceForm, lease: TiedLease) -> None:
        """Take in a handle that has joined the lease."""
        self.protect(using, form)
        self._end_with_transaction(using, lease)

    def _end_with_transaction(self, using: str, lease: TiedLease) -> None:
        """Have a handle that was taken inside a transaction end like a row lock, with that transaction."""
        transaction = self._around or watch(connections[using]).transaction()
        if transaction in self.open:
            self.bind_to(transaction, lease)

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
            if self.is_needed_here or watch(connection).transaction() in self._admitted:
                self.enter(connection)
            if ends_transaction(sql):
                raise TransactionManagementError(
                    f"{sql.strip():.40} ends a transaction under the lock {self.held.name!r} past Django, unchecked: "
                    "leave the atomic() block, or call transaction.commit() or rollback()"
                )
        elif not surely_reads(sql):
            self._refuse_aborted()
            self._refuse_unfenced(connection)

    def refuse_migrations(self, using: str) -> None:
        """Refuse `migrate` before it has begun: what it writes outside a transaction would be refused half-way."""
        if self.handles and self._forms.get(using):
            raise NotSupported(
                f"migrations cannot be fenced by the lock {self.held.name!r}: Django notes outside of their "
                "transactions that they were made; take it with fence=False around migrate",
                name=self.held.name,
            )

    def let_go_of_torn(self) -> None:
        """Hear that an error has left the last block of this thread, which began the transactions inside of it.

        One of them that is still open was torn off by an interrupt in Django's own `atomic`: nobody is going to end it,
        and so the lease runs out. Should it commit before that, it is checked as any other.
        """
        if self.is_bound and self.open:
            here = {watch(connection).current for connection in connections.all(initialized_only=True)}
            if (self.open & here) - self._around_block:
                stop_renewing(self.held)

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
        elif self.fence.supports_shared and keeps_snapshot(connection):
            # In its transaction's snapshot it would miss what shared holders commit while its admit waits for them.
            self._guard_with(self.fence.announce, connection)
        return form

    def _begin(self, connection: BaseDatabaseWrapper, transaction: Transaction) -> None:
        def settle(outcome: Outcome) -> None:
            self._admitted.pop(transaction, None)
            self.settle(transaction, outcome, ends_lock=transaction is self._around)
            if self.is_over or self.held.ended is not None:
                forget(self)

        transaction.on_end(settle, before_commit=lambda: self._before_commit(connection))
        self.begin(transaction)
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

    @property
    def is_needed_here(self) -> bool:
        """Work that begins now is part of what the lease is for, or would be if its block had not ended."""
        return bool(self.handles) or self._is_cut_off

    @property
    def _is_cut_off(self) -> bool:
        return self.is_aborted or (self.is_torn and threading.get_ident() != self._thread)

    def _refuse_aborted(self) -> None:
        if self._is_cut_off:
            reason = "the block that held it ended with an error before this work began"
            raise LeaseLost(self.held.name, token=self.held.token, reason=reason)

    def _refuse_lost(self) -> None:
        try:
            self.check()
        except DLockError as error:
            raise as_database_error(error) from None

    def _refuse_unfenced(self, connection: BaseDatabaseWrapper) -> None:
        if self.handles and self._forms[connection.alias]:
            self._refuse_lost()
            raise TransactionManagementError(
                f"a write outside a transaction cannot be fenced by the lock {self.held.name!r}: open "
                "transaction.atomic() inside the lock, or take it with fence=False if something else protects the data"
            )

    def _guard_with(self, step: Callable[[Any, Claim], int | None], connection: BaseDatabaseWrapper) -> None:
        with announcer(connection).quietly:
            self.guard(partial(step, connection), connection.alias)

    def _undo(self, transaction: object) -> None:
        if transaction in self._admitted:
            self._admitted[transaction] = False  # the savepoint took the admit with it: admit again before going on


def current() -> list[DatabaseTie]:
    """Give the leases that this context holds."""
    return [tie for tie in _current.get() if tie.held.ended is None and not tie.is_given_up and not tie.is_over]


def remember(tie: DatabaseTie) -> None:
    """Hold a lease in this context from now on."""
    _current.set((*current(), tie))


def keep(lease: TiedLease) -> None:
    """Keep a handle until it is left or forgotten, whatever its caller does with it."""
    _kept.set((*(kept for kept in _kept.get() if kept._held.ended is None), lease))


def forget(tie: DatabaseTie) -> None:
    """Hold it no more."""
    _current.set(tuple(other for other in _current.get() if other is not tie and other.held.ended is None))
    if _kept.get():
        _kept.set(tuple(lease for lease in _kept.get() if lease._tie is not tie and lease._held.ended is None))


@contextmanager
def apart() -> Iterator[None]:
    """Hold nothing for a while, whatever this context holds: what happens inside neither joins it nor ends it."""
    token, kept = _current.set(()), _kept.set(())
    try:
        yield
    finally:
        _current.reset(token)
        _kept.reset(kept)


@receiver(connection_created)
def _listen(connection: BaseDatabaseWrapper, **_: object) -> None:
    """Hear of the statements of every connection: work under a lease may move to a thread that has its own."""
    if any(connection is ours for ours in connections.all(initialized_only=True)):
        announcer(connection).tell(_before_statement)


@receiver(pre_migrate)
def _before_migrations(using: str, **_: object) -> None:
    for tie in current():
        tie.refuse_migrations(using)


def _before_statement(connection: BaseDatabaseWrapper, sql: str, inside: bool) -> None:  # noqa: FBT001 - the hook's form
    for tie in _current.get():
        if (tie.held.ended is None and not tie.is_given_up) or tie.is_aborted:
            tie.statement(connection, sql, inside=inside)


_FRESH: Final = ("read committed", "read uncommitted")
"""Isolation levels in which each statement sees what was committed before it."""


def refuse_old_snapshot(name: str, using: str) -> None:
    """Raise SnapshotTooOld when this thread's open transaction may read from before the lock; may ask the database."""
    isolation = _isolation(connections[using]) if has_spoken(using) else None
    if isolation is not None and isolation not in _FRESH:
        raise SnapshotTooOld(name, isolation=isolation.upper())


def keeps_snapshot(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether its transactions read from a snapshot that is older than the row locks they wait for.

    On MySQL and MariaDB the snapshot comes later, and on SQLite there is one writer. Asks the server, once for each
    connection to it, unless OPTIONS say; not inside a transaction.
    """
    if connection.vendor != "postgresql":
        return False
    given = connection.settings_dict["OPTIONS"].get("isolation_level")
    if given is not None:
        from django.db.backends.postgresql.psycopg_any import IsolationLevel  # type: ignore[import-untyped]

        return str(IsolationLevel(given).name).replace("_", " ").lower() not in _FRESH
    driver, level = _known.get(connection, (None, ""))
    if driver is None or driver is not connection.connection:
        level = str(_one(connection, "SHOW default_transaction_isolation"))
        _known[connection] = connection.connection, level
    return level not in _FRESH


_known: Final[WeakKeyDictionary[BaseDatabaseWrapper, tuple[Any, str]]] = WeakKeyDictionary()
"""What each connection's server begins transactions with, and the driver's connection that was asked."""


def _isolation(connection: BaseDatabaseWrapper) -> str | None:
    if connection.vendor == "postgresql":
        return str(_one(connection, "SHOW transaction_isolation"))
    if connection.vendor != "mysql":
        return None
    if (level := _level(connection)) in _FRESH:
        return level
    variable = "tx_isolation" if connection.mysql_is_mariadb else "transaction_isolation"  # type: ignore[attr-defined]
    return str(_one(connection, f"SELECT @@{variable}")).replace("-", " ").lower()


def _level(connection: BaseDatabaseWrapper) -> str:
    return str(getattr(connection, "isolation_level", None) or "")


def _one(connection: BaseDatabaseWrapper, sql: str) -> Any:
    with announcer(connection).quietly, connection.cursor() as cursor:
        cursor.execute(sql)
        row = cursor.fetchone()
        return row[0] if row else None


def open_sessions() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name those that no other thread uses, and those of a pool, in whose transaction we are; asks nobody."""
    found: tuple[list[str], list[str]] = [], []
    for connection in () if in_task() else connections.all(initialized_only=True):
        if connection.connection is None or connection.vendor not in ("postgresql", "mysql"):
            continue
        settings: dict[str, Any] = connection.settings_dict
        party = database.party(connection.vendor, connection.connection, settings["NAME"])
        if party is not None:
            is_pooled = bool(settings["OPTIONS"].get("pool"))
            found[is_pooled].append(party)
    return tuple(found[0]), tuple(found[1])
