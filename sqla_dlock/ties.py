"""Ties a lease to the transactions of a Session, and guards each of them with the fence.

A session's transaction begins with the first statement on a connection: before it is sent, the token is admitted there.
Ownership belongs to the session, never to a thread or task: requests begin in one and end in another.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from sqlalchemy import Connection

from dlock_core.database_session import comment
from dlock_core.errors import LeaseLost, NotHeld
from dlock_core.guard import Guard
from dlock_core.tie import Outcome, Tie
from sqla_dlock.autocommit import refuse_autocommit, refuse_unbegun
from sqla_dlock.backends.advisory import home_of
from sqla_dlock.transactions import (
    before_work,
    connections_of,
    in_transaction,
    mark,
    on_end,
    on_savepoint_rollback,
    on_transaction,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Dialect, Engine
    from sqlalchemy.orm import Session

    from dlock_core.held import Held
    from dlock_core.tied import FenceForm
    from sqla_dlock.fencing import TableFence

__all__ = ["SessionTie", "current"]

_KEY = "dlock_ties"


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
        self._refused: dict[Connection, BaseException] = {}
        """Why the open transaction may not commit, whatever its owner makes of the error."""
        self._leaving: list[Callable[[], object]] = []
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
        elif form == "lease":
            self.guard(partial(self.fence.announce, bind.engine))
        elif self.held.request.shared:
            self.fence.prepare(bind.engine, self.guard.claim())
        self._forms[bind.dialect] = form
        try:
            self._stop.append(before_work(self._owner(), self._work))
        except BaseException:
            del self._forms[bind.dialect]  # who asks again is protected then, or refused again
            raise

    def leave_with_transaction(self, leave: Callable[[], object]) -> None:
        """Have a handle let go as soon as a transaction holds the lease: the open one, or the next."""
        if in_transaction(self._owner()):
            leave()
        else:
            self._leaving.append(leave)

    def give_up(self) -> None:
        super().give_up()
        self._forget()

    def forget_if_over(self) -> None:
        """Let go of the session, when nothing needs the lease any more."""
        if self.is_over:
            self._forget()

    def _began(self) -> None:
        self._refused.clear()
        on_end(self._owner(), self._ended, before_commit=self._before_commit)
        self.begin()
        while self._leaving:
            self._leaving.pop()()

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
            self.guard(partial(self.fence.admit, connection))
            refuse_unbegun(connection, self.held.name)

    def _before_commit(self) -> None:
        if self.is_given_up:
            return
        for error in self._refused.values():
            raise error
        self.check()
        for connection in self._connections():
            if self._forms.get(connection.dialect) == "lease":
                self.guard(partial(self.fence.confirm, connection))

    def _ended(self, outcome: Outcome) -> None:
        self.settle(outcome, ends_lock=self.is_inside)
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
