"""Callbacks in the life of a Session's outermost transaction: its begin, before its work and its COMMIT, after its end.

`session` is always the sync Session: of an AsyncSession its `sync_session`. The listeners are installed once, on the
class, and end at once for a session that nobody has asked about.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from sqlalchemy import event
from sqlalchemy.orm import Session

from sqla_dlock.roots import Root, connections_in
from sqla_dlock.watch import watch, watch_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.orm import SessionTransaction

    from dlock_core.tie import Outcome

    Stop: TypeAlias = Callable[[], None]

__all__ = [
    "before_work",
    "connections_of",
    "in_transaction",
    "mark",
    "note_xid",
    "on_end",
    "on_savepoint_rollback",
    "on_transaction",
]


def in_transaction(session: Session) -> bool:
    """Say whether a transaction of the session is open, with or without a connection."""
    return session.in_transaction()


def connections_of(session: Session) -> list[Connection]:
    """Give the connections of the open root transaction in the order they joined; never acquires one."""
    transaction = session.get_transaction()
    return [] if transaction is None else connections_in(transaction)


def on_transaction(session: Session, hook: Callable[[], None]) -> Stop:
    """Call `hook()` whenever an outermost transaction of the session begins, from now on; and now, if one is open.

    What it raises reaches the caller, and the transaction has not begun. Returns the function that stops it.
    """
    watched = _watched(session)
    watched.beginnings.append(hook)
    stop = partial(_discard, watched.beginnings, hook)
    if watched.root is not None:
        _try(hook, stop)
    return stop


def before_work(session: Session, hook: Callable[[Connection], None]) -> Stop:
    """Call `hook(connection)` before the first statement on every connection that joins a root transaction.

    At once for connections that have joined already; and again before the next statement, or COMMIT, after a
    savepoint's rollback that may have undone what the hook did. What it raises reaches the caller and the statement is
    not sent; then it is called again before the next one. Not called for statements that hooks send on the connection.
    Returns the function that stops it.
    """
    watched = _watched(session)
    watched.work.append(hook)

    def stop() -> None:
        _discard(watched.work, hook)
        for connection in watched.root.connections if watched.root is not None else ():
            if (found := watch_of(connection)) is not None:
                found.gate.discard(hook)

    for connection in connections_of(session):
        _try(partial(_open_gate, connection, [hook]), stop)
    return stop


def on_end(
    session: Session,
    settle: Callable[[Outcome], None],
    *,
    before_commit: Callable[[], None] | None = None,
) -> None:
    """Call `settle(outcome)` exactly once, as soon as it is known how the open root transaction has ended.

    The last registered is called first. What it raises is logged and not passed on, but KeyboardInterrupt is, at the
    end. It must not use the session. In an external Connection's transaction the end is the Connection's.
    UNKNOWN: the connection was lost, or an interrupt came, while COMMIT was under way, and PostgreSQL could not tell
    (see `note_xid`); or engines have ended differently; or the session was garbage-collected.

    `before_commit` is called inside the transaction just before its outermost COMMIT, after the last flush; the first
    registered first. It may use the connections, not the session. What it raises is passed on, and nothing is committed
    on any engine.

    Raises RuntimeError without a root transaction.
    """
    root = _watched(session).root
    if root is None:
        raise RuntimeError("on_end() needs an open transaction of the session")
    root.settlers.append(settle)
    if before_commit is not None:
        root.checks.append(before_commit)


def on_savepoint_rollback(connection: Connection, restore: Callable[[], None]) -> None:
    """Call `restore` once if a savepoint that is open now is rolled back, and takes along what was done in it."""
    open_now, nested = set[str](), connection.get_nested_transaction()
    while nested is not None:
        open_now.add(nested._savepoint)
        nested = nested._previous_nested
    if open_now:
        watch(connection).undo.append((open_now, restore))


def note_xid(connection: Connection, xid: str) -> None:
    """Note PostgreSQL's number of the connection's transaction (`pg_current_xact_id()`), to resolve a lost COMMIT."""
    if (found := watch_of(connection)) is not None:
        found.xid = xid


def mark(connection: Connection, comment: str) -> None:
    """Have a comment stand before each statement of the connection's transaction, for who looks at the database."""
    if (found := watch_of(connection)) is not None:
        found.gate.mark(comment)


class _Watched:
    """What somebody wants to hear of one session."""

    def __init__(self) -> None:
        self.beginnings: list[Callable[[], None]] = []
        self.work: list[Callable[[Connection], None]] = []
        self.root: Root | None = None

    def begin(self, session: Session, transaction: SessionTransaction) -> None:
        self.root = Root(session, transaction)
        for connection in connections_in(transaction):
            self.root.join(connection)


def _watched(session: Session) -> _Watched:
    """What is wanted of a session, with its open root transaction."""
    watched: _Watched = vars(session).get("_dlock_watched") or vars(session).setdefault("_dlock_watched", _Watched())
    transaction = session.get_transaction()
    root = watched.root
    if transaction is None:
        watched.root = None
    elif root is None or root.is_over or root.transaction is not transaction:
        watched.begin(session, transaction)
    return watched


def _open_gate(connection: Connection, hooks: list[Callable[[Connection], None]]) -> None:
    gate = watch(connection).gate
    for hook in hooks:
        gate.add(hook)
    gate.open()


def _try(step: Callable[[], None], stop: Stop) -> None:
    try:
        step()
    except BaseException:
        stop()
        raise


def _discard(hooks: list[Callable[[], None]] | list[Callable[[Connection], None]], hook: object) -> None:
    if hook in hooks:
        hooks.remove(hook)  # type: ignore[arg-type]


# First among the listeners: what others send there is work already.
@event.listens_for(Session, "after_transaction_create", insert=True)
def _begun(session: Session, transaction: SessionTransaction) -> None:
    watched: _Watched | None = vars(session).get("_dlock_watched")
    if watched is None or transaction.parent is not None:
        return
    watched.begin(session, transaction)
    try:
        for hook in list(watched.beginnings):
            hook()
    except BaseException:
        transaction.close()
        raise


@event.listens_for(Session, "after_begin", insert=True)
def _joined(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    watched: _Watched | None = vars(session).get("_dlock_watched")
    if watched is None or transaction.parent is not None or watched.root is None:
        return
    watched.root.join(connection)
    _open_gate(connection, watched.work)


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    """Where there is no connection there will be no COMMIT, so that the checks come here."""
    watched: _Watched | None = vars(session).get("_dlock_watched")
    if watched is None or watched.root is None or watched.root.outcomes or session.in_nested_transaction():
        return
    session.flush()
    if not watched.root.outcomes:
        watched.root.check()


@event.listens_for(Session, "after_commit")
def _committed(session: Session) -> None:
    watched: _Watched | None = vars(session).get("_dlock_watched")
    if watched is not None and watched.root is not None and not session.in_nested_transaction():
        watched.root.was_committed = True


@event.listens_for(Session, "after_transaction_end")
def _ended(session: Session, transaction: SessionTransaction) -> None:
    watched: _Watched | None = vars(session).get("_dlock_watched")
    if watched is None or watched.root is None or watched.root.transaction is not transaction:
        return
    try:
        watched.root.left()
    finally:
        watched.root = None
        if not (watched.beginnings or watched.work):
            del vars(session)["_dlock_watched"]
