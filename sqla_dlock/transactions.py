"""Callbacks for a Session's outermost transaction: at its begin, before its work and its COMMIT, after its end.

`session` is always the sync Session: of an AsyncSession its `sync_session`. The listeners are installed once, on the
class, and return at once for a session without hooks. A process that uses no lock does not import this module.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias
from weakref import ref

from sqlalchemy import event
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session

from dlock_core.transactions.retry import AttemptedWork, current_attempts, report
from dlock_core.transactions.tie import Outcome, call_all
from sqla_dlock.connections import open_savepoints, tracker_for, tracker_of
from sqla_dlock.first_statement import EVADED
from sqla_dlock.root_transaction import RootTransaction, connections_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.orm import SessionTransaction

__all__ = [
    "before_work",
    "connections_of",
    "in_transaction",
    "note_past",
    "on_close",
    "on_end",
    "on_savepoint_rollback",
    "on_transaction",
    "on_unbegun_close",
    "settle_ended",
]


if TYPE_CHECKING:
    Stop: TypeAlias = Callable[[], None]


_CLOSING: Final = ("close", "reset", "invalidate")
_OURS: Final = ("_dlock_hooks", *_CLOSING)


def in_transaction(session: Session) -> bool:
    """Return whether a transaction of the session is open, with or without a connection."""
    return session.in_transaction()


def connections_of(session: Session) -> list[Connection]:
    """Return the connections of the open root transaction in the order in which they joined; never acquires one."""
    if session._transaction is None:  # noqa: SLF001 - the public way costs a call
        return []
    transaction = session.get_transaction()
    return [] if transaction is None else connections_in(transaction)


def on_transaction(session: Session, hook: Callable[[], None]) -> Stop:
    """Call `hook()` whenever an outermost transaction of the session begins, from now on; and now, if one is open.

    Its error reaches the caller, and then the transaction has not begun. Returns the function that stops the calls.
    """
    hooks = _hooks_of(session)
    hooks.beginnings[hook] = None
    stop: Stop = partial(hooks.beginnings.pop, hook, None)
    if hooks.root is not None:
        _try(hook, stop)
    return stop


def before_work(session: Session, hook: Callable[[Connection], None]) -> Stop:
    """Call `hook(connection)` before the first statement on every connection that joins a root transaction.

    It is called at once for connections that have already joined; after the statements of `after_begin` listeners, but
    on MySQL and MariaDB before anything that may take the snapshot (all but SET and USE); and again before the next
    statement, or COMMIT, after a savepoint's rollback that may have undone its work. Its error reaches the caller and
    the statement is not sent; then it is called again before the next one. It is not called for statements that hooks
    send on the connection. Returns the function that stops the calls.
    """
    hooks = _hooks_of(session)
    hooks.work.append(hook)

    def stop() -> None:
        if hook in hooks.work:
            hooks.work.remove(hook)
        for connection in hooks.root.connections if hooks.root is not None else ():
            if (found := tracker_of(connection)) is not None:
                found.hooks.discard(hook)

    for connection in hooks.root.connections if hooks.root is not None else ():
        first = tracker_for(connection).hooks
        first.add(hook)
        _try(first.run, stop)
    return stop


def on_end(
    session: Session,
    settle: Callable[[Outcome], None],
    *,
    before_commit: Callable[[], None] | None = None,
) -> None:
    """Call `settle(outcome)` exactly once, as soon as it is known how the open root transaction has ended.

    The last registered is called first. Its error is logged and not propagated, except KeyboardInterrupt, which is
    raised at the end. It must not use the session. In an external Connection's transaction, the end of that transaction
    counts. UNKNOWN: the connection was lost, or an interrupt came, during COMMIT, and PostgreSQL could not report the
    outcome (see `note_xid`); or engines have ended differently; or the session was garbage-collected.

    `before_commit` is called inside the transaction just before its outermost COMMIT, after the last flush; the first
    registered first. It may use the connections, not the session. Its error is propagated, and nothing is committed on
    any engine.

    Raises RuntimeError without a root transaction.
    """
    root = _hooks_of(session).root
    if root is None:
        raise RuntimeError("on_end() needs an open transaction of the session")
    root.settlers.append(settle)
    if before_commit is not None:
        root.checks.append(before_commit)


def on_savepoint_rollback(connection: Connection, restore: Callable[[], None]) -> None:
    """Call `restore` once if a savepoint that is open now is rolled back, which undoes the work in it."""
    if open_now := set(open_savepoints(connection)):
        tracker_for(connection).undo.append((open_now, restore))


def on_unbegun_close(session: Session, hook: Callable[[], None]) -> Stop:
    """Call `hook()` when the session is closed, reset or invalidated before its next outermost transaction begins.

    It may also be called after one has begun, if that was interrupted. Returns the function that stops it.
    """
    return _stop_for(session, _hooks_of(session).unbegun_closings, hook)


def on_close(session: Session, hook: Callable[[], None]) -> Stop:
    """Call `hook()` whenever the session is closed, reset or invalidated; returns the function that stops it."""
    return _stop_for(session, _hooks_of(session).closings, hook)


def _stop_for(session: Session, known: dict[Callable[[], None], None], hook: Callable[[], None]) -> Stop:
    known[hook] = None

    def stop() -> None:
        known.pop(hook, None)
        _forget(session)

    return stop


def note_past(session: Session) -> None:
    """Refuse the COMMIT of the open transaction if it has bypassed a lease that is about to be forgotten."""
    hooks: _SessionHooks | None = vars(session).get("_dlock_hooks")
    if hooks is not None and hooks.is_evaded(session):
        hooks.is_past = True


def settle_ended(session: Session) -> None:
    """Settle a transaction that has ended although an interrupt has prevented SQLAlchemy from reporting it."""
    hooks: _SessionHooks | None = vars(session).get("_dlock_hooks")
    if hooks is not None and hooks.root is not None and hooks.root.transaction is not session.get_transaction():
        hooks.root.leave()
        hooks.root = None


def _close(found: ref[Session], name: str) -> None:
    session = found()
    if session is None:
        return
    hooks: _SessionHooks | None = vars(session).get("_dlock_hooks")
    try:
        getattr(type(session), name)(session)
    finally:
        if hooks is not None and (hooks.closings or hooks.unbegun_closings or hooks.root is not None):
            call_all([*hooks.closings, *hooks.unbegun_closings, partial(settle_ended, session)])
            hooks.unbegun_closings.clear()
        _forget(session)


def _forget(session: Session) -> None:
    """Stop listening to a session that has no hooks left."""
    own = vars(session)
    hooks: _SessionHooks | None = own.get("_dlock_hooks")
    if hooks is None or not (hooks.root or hooks.beginnings or hooks.work or hooks.closings or hooks.unbegun_closings):
        for name in _OURS:
            own.pop(name, None)


class _SessionHooks:
    """The hooks on one session: at a begin, before work, at a close, and those of its root transaction."""

    def __init__(self) -> None:
        self.beginnings: dict[Callable[[], None], None] = {}
        self.work: list[Callable[[Connection], None]] = []
        self.closings: dict[Callable[[], None], None] = {}
        self.unbegun_closings: dict[Callable[[], None], None] = {}
        self.root: RootTransaction | None = None
        self.is_past = False
        """Whether the open transaction has bypassed a lease that was held at that time, and is no longer held."""

    def begin(self, session: Session, transaction: SessionTransaction) -> RootTransaction:
        if self.root is not None and not self.root.is_over:
            self.root.leave()  # an interrupt has prevented SQLAlchemy from reporting it
        self.is_past = False
        self.root = root = RootTransaction(session, transaction)
        vars(transaction)["close"] = partial(_close_transaction, root)
        return root

    def is_evaded(self, session: Session) -> bool:
        """Return whether the open transaction, or a connection's part in it, has begun without a hook.

        An exception can prevent our listeners: one from a signal handler, or from another listener before ours.
        """
        root, transaction = self.root, session.get_transaction()
        if transaction is None or self.is_past or not (self.beginnings or self.work):
            return self.is_past
        if root is None or root.transaction is not transaction:
            return True
        return not root.is_over and not (root.is_begun and root.followed == len(connections_in(transaction)))


def _close_transaction(root: RootTransaction, invalidate: bool = False) -> None:  # noqa: FBT001, FBT002 - SQLAlchemy's form
    """Close a root transaction, even if SQLAlchemy is prevented from reporting its end.

    An interrupt, or a task's cancellation, may come while connections go back to their pool, and other listeners raise.
    """
    vars(root.transaction).pop("close", None)
    try:
        root.transaction.close(invalidate)
    except BaseException:
        root.note_interrupted()
        raise


def _hooks_of(session: Session) -> _SessionHooks:
    """Return the hooks on a session, with its open root transaction."""
    own = vars(session)
    hooks: _SessionHooks = own.get("_dlock_hooks") or own.setdefault("_dlock_hooks", _SessionHooks())
    if "close" not in own:  # SQLAlchemy has no event for it if no transaction is open
        close = partial(_close, ref(session))
        own.update(
            close=partial(close, "close"), reset=partial(close, "reset"), invalidate=partial(close, "invalidate")
        )
    root, transaction = hooks.root, session._transaction  # noqa: SLF001 - the public way costs a call for each check
    if transaction is not None and (root is None or root.transaction is not transaction):
        transaction = session.get_transaction()
    if transaction is None:
        if root is not None:
            settle_ended(session)
    elif root is None or root.is_over or root.transaction is not transaction:
        root = hooks.begin(session, transaction)
        for connection in connections_in(transaction):
            root.join(connection)
            root.followed += 1
        root.is_begun = not hooks.beginnings  # otherwise these should have been called when it began
    return hooks


def _try(step: Callable[[], None], stop: Stop) -> None:
    try:
        step()
    except BaseException:
        stop()
        raise


def _attempted_work(root: RootTransaction) -> AttemptedWork:
    """Return the view that an attempt of `retry_on_conflict` has of a root transaction, without keeping it alive."""
    weak, connections = ref(root), root.connections
    work = AttemptedWork("work of a session", is_pending=lambda: (alive := weak()) is not None and alive.may_stand())
    root.settlers.append(lambda outcome: work.settle(outcome if connections else Outcome.ROLLED_BACK))
    return work


def _refuse_undone(connections: list[Connection]) -> None:
    """Refuse the first COMMIT of several if the work on one of the connections is undone."""
    for connection in connections:
        if (tracker := tracker_of(connection)) is not None:
            tracker.refuse_undone()


# First among the listeners: the statements of others may need it.
@event.listens_for(Session, "after_transaction_create", insert=True)
def _begun(session: Session, transaction: SessionTransaction) -> None:
    hooks: _SessionHooks | None = vars(session).get("_dlock_hooks")
    attempts = current_attempts.get()
    if (hooks is None and not attempts) or transaction._parent is not None:  # noqa: SLF001 - as quick as can be
        return
    if hooks is None:
        hooks = vars(session).setdefault("_dlock_hooks", _SessionHooks())
    root = hooks.begin(session, transaction)
    if attempts:
        report(transaction, partial(_attempted_work, root))
        root.checks.append(partial(_refuse_undone, root.connections))
    try:
        for hook in list(hooks.beginnings):
            hook()
    except BaseException:
        transaction.close()
        raise
    root.is_begun = True
    hooks.unbegun_closings.clear()  # The transaction now holds what they were to end.


@event.listens_for(Session, "after_begin", insert=True)
def _joined(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    hooks: _SessionHooks | None = vars(session).get("_dlock_hooks")
    if hooks is None or hooks.root is None or hooks.root.transaction is not transaction:
        return  # there are no hooks, or it is a savepoint
    root = hooks.root
    root.join(connection)
    if not hooks.work:
        root.followed += 1
        return
    first = tracker_for(connection).hooks
    first.add(*hooks.work)
    root.followed += 1  # from now on COMMIT is refused unless these hooks run before the next statement
    if len(session.dispatch.after_begin) == 1:
        first.run()
    else:  # the program's own listeners run first: they choose the schema, or the tenant, whose row is fenced
        first.postpone(partial(_is_beginning, transaction))


def _is_beginning(transaction: SessionTransaction) -> bool:
    """Return whether a connection is joining: until every `after_begin` listener was called."""
    return transaction._state.name == "PROVISIONING_CONNECTION"


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    """Refuse a transaction that has bypassed the hooks, and check one without a connection, which sends no COMMIT."""
    hooks: _SessionHooks | None = vars(session).get("_dlock_hooks")
    if hooks is None:
        return
    if hooks.is_evaded(session):
        raise InvalidRequestError(EVADED)
    if hooks.root is None or hooks.root.outcomes or session.in_nested_transaction():
        return
    session.flush()
    if not hooks.root.outcomes:
        hooks.root.check(is_end=True)


@event.listens_for(Session, "after_commit")
def _committed(session: Session) -> None:
    hooks: _SessionHooks | None = vars(session).get("_dlock_hooks")
    if hooks is not None and hooks.root is not None and hooks.root.transaction is session._transaction:  # noqa: SLF001
        hooks.root.was_committed = True  # it is not a savepoint


@event.listens_for(Session, "after_transaction_end")
def _ended(session: Session, transaction: SessionTransaction) -> None:
    hooks: _SessionHooks | None = vars(session).get("_dlock_hooks")
    if hooks is None or hooks.root is None or hooks.root.transaction is not transaction:
        return
    try:
        hooks.root.leave()
    except BaseException:  # Repeat at once what an interrupt has cut short; otherwise close() would do it.
        hooks.root.leave()
        raise
    hooks.root = None
    if not hooks.beginnings:
        _forget(session)
