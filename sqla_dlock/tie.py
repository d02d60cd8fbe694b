"""Ties a lease to the transactions of a Session, and guards each of them with the fence.

A session's transaction begins with the first statement on a connection: before it is sent, the token is admitted there.
Ownership belongs to the session, never to a thread or task: requests begin in one and end in another.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from sqlalchemy import Connection, inspect
from sqlalchemy.exc import InvalidRequestError, UnboundExecutionError

from dlock_core.errors import LeaseLost, NotHeld, SnapshotTooOld
from dlock_core.runtime import BLOCKING, run
from dlock_core.sql.database import comment, session_id
from dlock_core.transactions.tie import TieState
from dlock_core.transactions.transaction_lock import LockAcquire
from sqla_dlock.begun import begins_by_itself, is_autocommit, no_fence_in_autocommit, refuse_unbegun
from sqla_dlock.connections import mark
from sqla_dlock.fencing import READ_COMMITTED
from sqla_dlock.names import is_mapped
from sqla_dlock.root_transaction import is_of_test
from sqla_dlock.stores import refuse_closed
from sqla_dlock.transactions import (
    before_work,
    connections_of,
    in_transaction,
    note_past,
    on_close,
    on_end,
    on_savepoint_rollback,
    on_transaction,
    on_unbegun_close,
    settle_ended,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Dialect, Engine
    from sqlalchemy.orm import Session

    from dlock_core.leases.acquisition import Acquisition
    from dlock_core.leases.lease import LeaseRecord
    from dlock_core.runtime import Runtime
    from dlock_core.transactions.fencing import FenceForm, FenceGate
    from dlock_core.transactions.tie import Tie
    from dlock_core.transactions.tied_lease import TiedLease

__all__ = ["InsideAcquire", "SessionAcquire", "TiedSession", "current"]


class TiedSession:
    """The session under one lease: reports its transactions to the tie, and admits each connection at the fence."""

    def __init__(self, tie: Tie, gate: FenceGate, session: Session, home: Dialect | None) -> None:
        self.tie, self.held, self.gate = tie, tie.held, gate
        self.home = home
        """The database in whose transaction the lock is: it needs no fence, because one COMMIT ends both."""
        self._session = ref(session)  # weak, because the session's listeners keep this object
        self._refused: dict[Connection, BaseException] = {}
        """The error for which the open transaction may not commit, even if its owner swallows it."""
        self._pending: list[TiedLease] = []
        """The handles of acquires that are detached when the next transaction begins, which then holds the lease."""
        self._stop: list[Callable[[], None]] = []

    def bind(self, bind: Engine | Connection | None, form: FenceForm, handle: TiedLease) -> None:
        """Tie the session's transaction to a new lease, now or when it begins, and protect a database."""
        del handle  # It lasts until it is released or detached.
        session = self._owner()
        if self.home is not None:
            self.tie.supersede(other.tie for other in current(session))
        vars(session).setdefault("_dlock_ties", []).append(self)
        if form:
            self._protect(bind, form, session)
        self._stop.append(on_transaction(session, self._began))
        if self.home is not None:
            for connection in connections_of(session):
                if connection.dialect is self.home:
                    on_savepoint_rollback(connection, self.tie.end_with_savepoint)

    def join(self, bind: Engine | Connection | None, form: FenceForm, handle: TiedLease) -> None:
        """Attach a handle that has joined the lease, and protect a database that was not protected so far."""
        del handle
        self._protect(bind, form, self._owner())

    def _protect(self, bind: Engine | Connection | None, form: FenceForm, session: Session) -> None:
        """Protect a database from now on: the open transaction, and those that begin under the lease.

        The database in whose transaction the lock is needs no fence, because one COMMIT ends both. An engine has one
        dialect for life, but a new pool after `dispose()`: so a database is identified by its dialect.
        """
        if bind is None or not form:
            return
        dialect = bind.dialect
        if self.gate.forms.get(dialect) or dialect is self.home:
            return
        is_inside = False
        for each in (bind, session.bind, *connections_of(session)):
            is_inside |= isinstance(each, Connection) and each.dialect is dialect
        self.gate.protect(dialect, form, bind, is_inside=is_inside)
        try:
            self._stop.append(before_work(session, self._before_work))
        except BaseException:
            del self.gate.forms[dialect]  # a repeated call is then protected, or refused again
            raise

    def keep(self, handle: TiedLease) -> None:
        """Detach a handle without a block as soon as a transaction holds the lease: the open one, or the next."""
        session = self._owner()
        if in_transaction(session):
            self.tie.detach(handle)
        else:
            self._pending.append(handle)
            self._stop.append(on_unbegun_close(session, self._closed))
        self._forget_at_end()

    def begin_failed_exit(self, runtime: Runtime, handle: TiedLease) -> None:
        """Do nothing: the session's transaction is ended by the session, and is checked at its COMMIT."""

    def settle_ended(self) -> None:
        """Settle transactions that have ended although an interrupt has prevented SQLAlchemy from reporting it."""
        if self.tie.open and (session := self._session()) is not None:
            settle_ended(session)

    def begin_end(self, handle: TiedLease) -> None:
        """Do nothing: one flow uses the session, and waits for the release."""

    def note_detached(self, runtime: Runtime, handle: TiedLease) -> None:
        """Forget the session, if nothing needs the lease any more; in any thread or task."""
        del runtime, handle
        self._forget_at_end()

    def _forget_at_end(self) -> None:
        if self.tie.is_over:
            self.forget()

    def note_collected(self) -> None:
        """Do nothing: the session forgets the lease when its next transaction begins."""

    def _began(self) -> None:
        """Tie the outermost transaction that has just begun."""
        session: Any = self._session()
        if not self.tie.handles and not self.tie.open:  # its block was interrupted, and this is not part of its work
            self.forget()
            return
        if self._refused:
            self._refused.clear()
        transaction = object()
        settle = partial(self.tie.settle, transaction, settled=self._forget_at_end, ends_lock=self.home is not None)
        on_end(session, settle, before_commit=self._before_commit)
        self.tie.begin(transaction)
        if self._pending:
            self._detach_pending()

    def _before_work(self, connection: Connection) -> None:
        """Admit the lease on a connection that has joined the transaction, before the first statement is sent there.

        The program may swallow an error, and then commit what it wrote before. So the error is kept, and raised again
        at COMMIT, unless a later attempt succeeds.
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
        """Return the error of COMMIT after a cancelled admit: a second CancelledError would end a task unexpectedly."""
        return LeaseLost(self.held.name, token=self.held.token, reason="its admit was interrupted")

    def _enter(self, connection: Connection, form: FenceForm) -> None:
        self.held.ensure()
        dialect, name = connection.dialect, self.held.request.name
        if dialect.name in ("mysql", "mariadb"):
            mark(connection, comment(self.held.request.holder))
        if is_autocommit(connection):
            raise no_fence_in_autocommit(name)
        if form == "transaction":
            gate = self.gate
            may_miss_shared = not self.held.request.shared and gate.fence.supports_shared
            if may_miss_shared and dialect not in gate.announced and self._keeps_snapshot(connection):
                gate.announce(connection, dialect)  # the admit's snapshot would miss their commits
            gate.admit(connection, dialect)
        if dialect.name == "sqlite" and (form == "transaction" or not begins_by_itself(connection)):
            refuse_unbegun(connection, name)

    def _keeps_snapshot(self, connection: Connection) -> bool:
        """Return whether the transaction reads from a snapshot that is older than the row locks it waits for.

        PostgreSQL is queried if a listener of the program may have set the level of this one transaction.
        """
        if connection.dialect.name == "postgresql" and (
            len(self._owner().dispatch.after_begin) > 1 or connection.dispatch.begin
        ):
            return str(connection.get_isolation_level()) not in READ_COMMITTED
        return self.gate.fence.keeps_snapshot(connection)

    def _before_commit(self) -> None:
        """Refuse a COMMIT that the lease no longer protects: raises LeaseLost, StaleToken, or the error of an admit."""
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
            self.tie.release()
        if self.tie.is_over:
            self.forget()

    def _owner(self) -> Session:
        session = self._session()
        if session is None:
            raise NotHeld(self.held.name, reason="its session is gone")
        return session

    def forget(self) -> None:
        """Forget the session, whose later transactions do not belong to this lease."""
        session = self._session()
        if session is not None and self.tie.transactions == 0 and self.tie.state is not TieState.ABANDONED:
            note_past(session)
        for stop in self._stop:
            stop()
        self._stop = []
        ties = [] if session is None else vars(session).get("_dlock_ties", [])
        if self in ties:
            ties.remove(self)


def current(session: Session) -> list[TiedSession]:
    """Return the leases that a session holds."""
    return list(vars(session).get("_dlock_ties", ()))


def _bind_of(session: Session, classes: tuple[type, ...]) -> Engine | Connection:
    """Return the engine or connection of the classes in a lock's name; raises ValueError if they have several."""
    if not classes:
        try:
            return session.get_bind()
        except UnboundExecutionError as error:
            raise UnboundExecutionError(
                "a lock whose name has no mapped class does not say which of the session's databases it protects: "
                "pass bind= with its engine, or put the class into the name"
            ) from error
    binds = [session.get_bind(inspect(each)) for each in classes]  # an override may read the mapper
    if len({bind.engine.pool for bind in binds}) > 1:
        found = ", ".join(each.__name__ for each in classes)
        raise ValueError(
            f"the classes in a lock's name, {found}, are in several databases: pass bind= with the one it protects"
        )
    return binds[0]


class SessionAcquire(LockAcquire):
    """One acquire of a lock by a session, in whatever thread or task it is used."""

    home: Dialect | None = None
    """The database in whose transaction the lock is; None for an ordinary lease."""

    _is_closed = False
    """Whether the session was closed while the lock was awaited, such as by a request that was cancelled."""
    _stop_listening: Callable[[], None] | None = None

    @property
    def owner_key(self) -> int:
        return id(self.lock.session)

    @cached_property
    def database(self) -> Any:
        """The engine or connection whose database has the fence; None without a fence."""
        if not self.form:
            return None
        bind, session = self.lock.bind, self.lock.session
        if bind is None or is_mapped(bind):
            return _bind_of(session, self.lock._classes if bind is None else (bind,))  # noqa: SLF001 - no user is to read it
        connection = getattr(bind, "sync_connection", None)  # an AsyncConnection has one, and an engine, too
        return connection or getattr(bind, "sync_engine", bind)

    def find(self) -> TiedSession | None:
        if not (ties := current(self.lock.session)):
            return None
        return self.joined(ties, inside=in_transaction(self.lock.session))  # type: ignore[no-any-return]

    async def find_or_prepare(self) -> TiedSession | None:
        session = self.lock.session
        refuse_closed(session)
        if not self.form:
            self.database = None  # no lookup is needed
        database = self.database
        found = self.find()
        if found is None and self.lock.snapshot == "raise":
            connections = connections_of(session)
            for given in (session.bind, database):
                if isinstance(given, Connection) and given not in connections and given.in_transaction():
                    connections.append(given)
            if connections:
                await self.runtime.call_database(self._refuse_old_snapshot, connections)
        return found

    def _refuse_old_snapshot(self, connections: list[Connection]) -> None:
        """Raise SnapshotTooOld if a transaction of the session may read from before the lock; queries the database.

        A store that locks inside the transaction of its database checks that snapshot itself.
        """
        for connection in connections:
            dialect = connection.dialect
            if dialect.name not in ("postgresql", "mysql", "mariadb") or dialect is self.home or is_of_test(connection):
                continue
            isolation = str(connection.get_isolation_level())
            if isolation not in READ_COMMITTED:
                raise SnapshotTooOld(self.lock.name, isolation=isolation)

    def _new_acquisition(self) -> Acquisition:
        if self._stop_listening is None:
            self._stop_listening = on_close(self.lock.session, self._note_closed)
        return super()._new_acquisition()

    def _note_closed(self) -> None:
        self._is_closed = True

    async def bind(self) -> None:
        """Tie the lease to the session; raises InvalidRequestError if it was closed while the lock was awaited."""
        if self._is_closed:
            raise InvalidRequestError(
                f"this Session was closed while it waited for the lock {self.lock.name!r}, and nothing would end what "
                "it begins now: let the function that waits close it, or limit the wait with wait="
            )
        self._listen_no_more()
        await super().bind()

    def detach(self) -> None:
        """Drop the lease, without I/O."""
        self._listen_no_more()
        super().detach()

    def _listen_no_more(self) -> None:
        if self._stop_listening is not None:
            self._stop_listening()

    def new_tied(self, tie: Tie, gate: FenceGate) -> TiedSession:
        return TiedSession(tie, gate, self.lock.session, self.home)

    def sessions(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (), tuple(filter(None, map(_database_session, connections_of(self.lock.session))))


class InsideAcquire(SessionAcquire):
    """One acquire from a store that locks inside the session's transaction.

    The request is sent on the session's own connection, where that may be used.
    """

    @property
    def home(self) -> Dialect:  # type: ignore[override]
        return self.store.backend.capabilities.transaction_database.dialect  # type: ignore[no-any-return]

    async def acquire_lease(self) -> tuple[LeaseRecord, float]:
        return await self.runtime.call_database(run, super().acquire_lease())  # type: ignore[no-any-return]

    @property
    def store_runtime(self) -> Runtime:
        return BLOCKING

    def caller_transaction(self) -> Any:
        from sqla_dlock.backends.advisory import transaction_of  # loads modules that only such a store needs

        return transaction_of(self.lock.session, self.store.backend, old_snapshot=self.lock.snapshot == "ignore")


def _database_session(connection: Connection) -> str | None:
    if connection.closed or connection.invalidated:
        return None
    driver = connection.connection.driver_connection
    return session_id(connection.dialect.name, driver, connection.engine.url.database)
