"""Ties a lease to the transactions of a Session, and guards each of them with the fence.

A session's transaction begins with the first statement on a connection: before it is sent, the token is admitted there.
Ownership belongs to the session, never to a thread or task: requests begin in one and end in another.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

from sqlalchemy import Connection

from dlock_core.errors import LeaseLost, NotHeld, SnapshotTooOld
from dlock_core.leases.lock import LETTING_EXPIRE
from dlock_core.sql.database import comment
from dlock_core.transactions.tie import TieState, release
from sqla_dlock.connections import mark, refuse_autocommit, refuse_unbegun
from sqla_dlock.fencing import READ_COMMITTED
from sqla_dlock.transactions import (
    before_work,
    connections_of,
    in_transaction,
    is_of_test,
    on_end,
    on_savepoint_rollback,
    on_transaction,
    on_unbegun_close,
    settle_ended,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sqlalchemy import Dialect, Engine
    from sqlalchemy.orm import Session

    from dlock_core.backend import Backend
    from dlock_core.transactions.fencing import FenceForm, FenceGate
    from dlock_core.transactions.tie import Outcome, Tie
    from dlock_core.transactions.transaction_lock import TiedLease

__all__ = ["TiedSession", "current"]


_KEY = "dlock_ties"


def home_of(backend: Backend) -> Dialect | None:
    """Return the dialect of the engine in whose transactions a store locks; None for every other store."""
    engine = backend.capabilities.transaction_database
    return None if engine is None else engine.dialect


class TiedSession:
    """The session under one lease: reports its transactions to the tie, and lets each connection pass the fence."""

    def __init__(self, tie: Tie, gate: FenceGate, session: Session) -> None:
        self.tie, self.held, self.gate = tie, tie.held, gate
        self.home = home_of(self.held.backend)
        """The database in whose transaction the lock is: no fence is needed there, one COMMIT ends both."""
        self._session = ref(session)  # the session's own listeners keep us: it has to go when nobody needs it
        self._refused: dict[Connection, BaseException] = {}
        """Why the open transaction may not commit, whatever its owner makes of the error."""
        self._pending: list[TiedLease] = []
        """The handles of acquires that are detached when the next transaction begins, which then holds the lease."""
        self._stop: list[Callable[[], None]] = []

    def bind(self, bind: Engine | Connection | None, form: FenceForm) -> None:
        """Tie the session's transaction to a new lease, now or when it begins, and protect a database."""
        session = self._owner()
        if self.home is not None:
            self.tie.supersede(other.tie for other in current(session))
        session.info.setdefault(_KEY, []).append(self)
        self.protect(bind, form)
        self._stop.append(on_transaction(session, self._began))
        if self.home is not None:
            for connection in connections_of(session):
                if connection.dialect is self.home:
                    on_savepoint_rollback(connection, self.tie.end_with_savepoint)

    def protect(self, bind: Engine | Connection | None, form: FenceForm) -> None:
        """Protect a database from now on: the open transaction, and those that begin under the lease.

        Not the one in whose transaction the lock is: no fence is needed there, one COMMIT ends both. An engine has one
        dialect for life, but a new pool after `dispose()`: so a database is known by its dialect.
        """
        if bind is None or not form:
            return
        dialect = bind.dialect
        if self.gate.forms.get(dialect) or dialect is self.home:
            return
        session = self._owner()
        given = (bind, session.bind, *connections_of(session))
        is_inside = any(isinstance(each, Connection) and each.dialect is dialect for each in given)
        self.gate.protect(dialect, form, bind, is_inside=is_inside)
        try:
            self._stop.append(before_work(session, self._before_work))
        except BaseException:
            del self.gate.forms[dialect]  # who asks again is protected then, or refused again
            raise

    def end_with_transaction(self, lease: TiedLease) -> None:
        """Detach a handle as soon as a transaction holds the lease: the open one, or the next."""
        session = self._owner()
        if in_transaction(session):
            self.tie.detach(lease)
        else:
            self._pending.append(lease)
            on_unbegun_close(session, self._closed)

    def abandon(self) -> None:
        """Note that the acquire has failed, and let go of the session."""
        self.tie.abandon()
        self._forget()

    def settle_ended(self) -> None:
        """Settle the transactions that have ended although an interrupt has kept SQLAlchemy from telling."""
        if self.tie.open and (session := self._session()) is not None:
            settle_ended(session)

    def forget_if_over(self) -> None:
        """Let go of the session, if nothing needs the lease any more."""
        if self.tie.is_over:
            self._forget()

    def _began(self) -> None:
        """Tie the outermost transaction that has just begun."""
        if not self.tie.handles and not self.tie.open:  # its block was torn off, and this is none of its work
            self._forget()
            return
        self._refused.clear()
        transaction = object()
        on_end(self._owner(), partial(self._settle, transaction), before_commit=self._before_commit)
        self.tie.begin(transaction)
        if self._pending:
            self._detach_pending()

    def _before_work(self, connection: Connection) -> None:
        """Admit the lease on a connection that has joined the transaction, before the first statement is sent there.

        An error may be swallowed by the program, which then commits what it has written before. So the error is kept,
        and raised again at COMMIT, unless a later attempt succeeds.
        """
        form = self.gate.forms.get(connection.dialect)
        if not form or self.tie.state is TieState.ABANDONED:
            return
        try:
            self._enter(connection, form)
        except BaseException as error:
            self._refused[connection] = error if isinstance(error, Exception) else self._interrupted()
            raise
        if self._refused:
            self._refused.pop(connection, None)

    def _interrupted(self) -> LeaseLost:
        """What COMMIT says after a cancelled admit: a second CancelledError would end a task that nobody cancelled."""
        return LeaseLost(self.held.name, token=self.held.token, reason="its admit was interrupted")

    def _enter(self, connection: Connection, form: FenceForm) -> None:
        self.held.ensure()
        dialect, name = connection.dialect, self.held.request.name
        if dialect.name in ("mysql", "mariadb"):
            mark(connection, comment(self.held.request.holder))
        refuse_autocommit(connection, name)
        if form == "transaction":
            if self._would_miss_shared(connection):
                self.gate.announce(connection, dialect)
            self.gate.admit(connection, dialect)
            refuse_unbegun(connection, name)

    def _would_miss_shared(self, connection: Connection) -> bool:
        """Return whether the admit would not see what shared holders commit while it waits for them. No I/O."""
        if self.held.request.shared or not self.gate.fence.supports_shared:
            return False
        return connection.dialect not in self.gate.announced and self.gate.fence.keeps_snapshot(connection)

    def _before_commit(self) -> None:
        """Refuse a COMMIT that the lease no longer protects: raises LeaseLost, StaleToken, or why an admit failed."""
        if self.tie.state is TieState.ABANDONED:
            return
        for error in self._refused.values():
            raise error
        self.held.ensure()
        if "lease" in self.gate.forms.values():
            for connection in connections_of(self._owner()):
                if self.gate.forms.get(connection.dialect) == "lease":
                    self.gate.confirm(connection, connection.dialect)

    def _detach_pending(self) -> bool:
        is_due = False
        while self._pending:
            is_due = self.tie.detach(self._pending[-1])
            self._pending.pop()
        return is_due

    def _closed(self) -> None:
        """Detach the handles of acquires: the session was closed before any statement, so no transaction holds them."""
        if self._detach_pending():
            with LETTING_EXPIRE:
                self.tie.runtime.finish(release, self.held)
        self.forget_if_over()

    def _settle(self, transaction: object, outcome: Outcome) -> None:
        try:
            is_over = self.tie.settle(transaction, outcome, ends_lock=self.home is not None)
        except BaseException:
            self.forget_if_over()
            raise
        if is_over:
            self._forget()

    def _owner(self) -> Session:
        session = self._session()
        if session is None:
            raise NotHeld(self.held.name, reason="its session is gone")
        return session

    def _forget(self) -> None:
        for stop in self._stop:
            stop()
        self._stop = []
        session = self._session()
        if session is not None and self in current(session):
            session.info[_KEY].remove(self)


def current(session: Session) -> list[TiedSession]:
    """Return the leases that a session holds."""
    return list(session.info.get(_KEY, ()))


def refuse_old_snapshot(name: str, connections: Iterable[Connection]) -> None:
    """Raise SnapshotTooOld when a transaction on one of them may read from before the lock; asks the database."""
    for connection in connections:
        if connection.dialect.name in ("postgresql", "mysql", "mariadb") and not is_of_test(connection):
            isolation = str(connection.get_isolation_level())
            if isolation not in READ_COMMITTED:
                raise SnapshotTooOld(name, isolation=isolation)
