"""Ties a lease to the transactions of a Session, and guards each of them with the fence.

A session's transaction begins with the first statement on a connection: before it is sent, the token is admitted there.
Ownership belongs to the session, never to a thread or task: requests begin in one and end in another.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from sqlalchemy import Connection

from dlock_core.errors import LeaseLost, NotHeld, SnapshotTooOld
from dlock_core.sql.database import comment
from dlock_core.transactions.fencing import Guard
from dlock_core.transactions.tie import LETTING_RUN_OUT, Outcome, Tie, release
from sqla_dlock.connections import refuse_autocommit, refuse_unbegun
from sqla_dlock.fencing import FRESH, keeps_snapshot
from sqla_dlock.transactions import (
    before_work,
    connections_of,
    in_transaction,
    is_of_test,
    mark,
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
    from dlock_core.leases.lease import Held
    from dlock_core.transactions.transaction_lock import FenceForm, TiedLease
    from sqla_dlock.fencing import TableFence

__all__ = ["SessionTie", "current"]


_KEY = "dlock_ties"


def home_of(backend: Backend) -> Dialect | None:
    """Return the dialect of the engine in whose transactions a store locks; None for every other store."""
    engine = backend.capabilities.transaction_database
    return None if engine is None else engine.dialect


class SessionTie(Tie):
    """One lease, the session that holds it and the databases that it protects."""

    def __init__(
        self,
        held: Held,
        session: Session,
        *,
        fence: TableFence,
        wait: float | None,
        deadline: float,
        finish: Callable[..., Any],
    ) -> None:
        super().__init__(held, finish)
        self.fence, self.home = fence, home_of(held.backend)
        self.guard = Guard(held, wait=wait, deadline=deadline, finish=finish)
        self._session = ref(session)  # the session's own listeners keep us: it has to go when nobody needs it
        self._forms: dict[Dialect, FenceForm] = {}
        """The databases it protects, and how; an engine has one dialect for life, but a new pool after `dispose()`."""
        self._announced: set[Dialect] = set()
        """The databases in which the row was raised before the first transaction, or cannot be any more."""
        self._refused: dict[Connection, BaseException] = {}
        """Why the open transaction may not commit, whatever its owner makes of the error."""
        self._leaving: list[TiedLease] = []
        """The handles of acquires, which the next transaction is going to hold."""
        self._stop: list[Callable[[], None]] = []

    def bind(self, bind: Engine | Connection | None, form: FenceForm) -> None:
        """Take up a new lease: tie the session's transaction, now or when it begins, and protect a database."""
        session = self._owner()
        self.supersede(current(session))
        session.info.setdefault(_KEY, []).append(self)
        self.protect(bind, form)
        self._stop.append(on_transaction(session, self._began))
        for connection in self._connections():
            if connection.dialect is self.home:
                on_savepoint_rollback(connection, self.undone)

    def protect(self, bind: Engine | Connection | None, form: FenceForm) -> None:
        """Protect a database from now on: the open transaction, and those that begin under the lease.

        Not the one in whose transaction the lock is: no fence is needed there, one COMMIT ends both.
        """
        if bind is None or not form or self._forms.get(bind.dialect) or bind.dialect is self.home:
            return
        given = (bind, self._owner().bind, *self._connections())
        if any(isinstance(each, Connection) and each.dialect is bind.dialect for each in given):
            form = "transaction"  # what is committed on its own would be no part of the open one
            self._announced.add(bind.dialect)  # nor could its snapshot see that the row was raised
        elif form == "lease":
            self.guard(partial(self.fence.announce, bind.engine))
        elif self.held.request.shared:
            self.fence.prepare(bind.engine, self.guard.claim())
        elif self.fence.supports_shared and keeps_snapshot(bind):
            self._announce(bind)
        self._forms[bind.dialect] = form
        try:
            self._stop.append(before_work(self._owner(), self._work))
        except BaseException:
            del self._forms[bind.dialect]  # who asks again is protected then, or refused again
            raise

    def end_with_transaction(self, lease: TiedLease) -> None:
        """Have a handle left as soon as a transaction holds the lease: the open one, or the next."""
        if in_transaction(self._owner()):
            self.leave(lease)
        else:
            self._leaving.append(lease)
            on_unbegun_close(self._owner(), self._closed)

    def give_up(self) -> None:
        super().give_up()
        self._forget()

    def hear_of_ends(self) -> None:
        """Settle the transactions that have ended, and of whose end an interrupt has kept anybody from telling."""
        if self.open and (session := self._session()) is not None:
            settle_ended(session)

    def forget_if_over(self) -> None:
        """Let go of the session, when nothing needs the lease any more."""
        if self.is_over:
            self._forget()

    def _began(self) -> None:
        if self.is_over:  # its block was torn off, and this is none of its work
            self._forget()
            return
        self._refused.clear()
        transaction = object()
        on_end(self._owner(), partial(self._ended, transaction), before_commit=self._before_commit)
        self.begin(transaction)
        self._leave_pending()

    def _work(self, connection: Connection) -> None:
        form = self._forms.get(connection.dialect)
        if not form or self.is_given_up:
            return
        try:
            self._enter(connection, form)
        except BaseException as error:
            self._refused[connection] = error if isinstance(error, Exception) else self._interrupted()
            raise
        self._refused.pop(connection, None)

    def _interrupted(self) -> LeaseLost:
        """What COMMIT says after a cancelled admit: a second CancelledError would end a task that nobody cancelled."""
        return LeaseLost(self.held.name, token=self.held.token, reason="its admit was interrupted")

    def _enter(self, connection: Connection, form: FenceForm) -> None:
        self.check()
        if connection.dialect.name in ("mysql", "mariadb"):
            mark(connection, comment(self.held.request.holder))
        refuse_autocommit(connection, self.held.name)
        if form == "transaction":
            if not self._waits_in_time(connection):
                self._announce(connection)
            self.guard(partial(self.fence.admit, connection), connection.dialect)
            refuse_unbegun(connection, self.held.name)

    def _waits_in_time(self, connection: Connection) -> bool:
        """Tell whether the admit sees what is committed while it waits, or need not wait any more. No I/O."""
        is_exclusive = not self.held.request.shared and self.fence.supports_shared
        return not (is_exclusive and keeps_snapshot(connection)) or connection.dialect in self._announced

    def _announce(self, bind: Engine | Connection) -> None:
        """Raise the row before a transaction whose snapshot would miss what shared holders commit during its admit."""
        self.guard(partial(self.fence.announce, bind.engine), bind.dialect)
        self._announced.add(bind.dialect)

    def _before_commit(self) -> None:
        if self.is_given_up:
            return
        for error in self._refused.values():
            raise error
        self.check()
        for connection in self._connections():
            if self._forms.get(connection.dialect) == "lease":
                self.guard(partial(self.fence.confirm, connection))

    def _leave_pending(self) -> bool:
        due = False
        while self._leaving:
            due = self.leave(self._leaving[-1])
            self._leaving.pop()
        return due

    def _closed(self) -> None:
        """Hear that the session was closed before any statement: there was no transaction to end an acquire."""
        if self._leave_pending():
            with LETTING_RUN_OUT:
                self.finish(release, self.held)
        self.forget_if_over()

    def _ended(self, transaction: object, outcome: Outcome) -> None:
        try:
            self.settle(transaction, outcome, ends_lock=self.is_inside)
        finally:
            self.forget_if_over()

    def _owner(self) -> Session:
        session = self._session()
        if session is None:
            raise NotHeld(self.held.name, reason="its session is gone")
        return session

    def _connections(self) -> list[Connection]:
        return connections_of(self._owner())

    def _forget(self) -> None:
        for stop in self._stop:
            stop()
        self._stop = []
        session = self._session()
        if session is not None and self in current(session):
            session.info[_KEY].remove(self)


def current(session: Session) -> list[SessionTie]:
    """Give the leases that a session holds."""
    return list(session.info.get(_KEY, ()))


def refuse_old_snapshot(name: str, connections: Iterable[Connection]) -> None:
    """Raise SnapshotTooOld when a transaction on one of them may read from before the lock; asks the database."""
    for connection in connections:
        if connection.dialect.name in ("postgresql", "mysql", "mariadb") and not is_of_test(connection):
            isolation = str(connection.get_isolation_level())
            if isolation not in FRESH:
                raise SnapshotTooOld(name, isolation=isolation)
