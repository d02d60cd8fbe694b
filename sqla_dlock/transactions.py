"""Callbacks in the life of a Session's outermost transaction: its begin, before its work and its COMMIT, after its end.

`session` is always the sync Session: of an AsyncSession its `sync_session`. The listeners are installed once, on the
class, and end at once for a session that nobody has asked about.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import ref

from sqlalchemy import event
from sqlalchemy.orm import Session

from dlock_core.transactions.retry import AttemptedWork, attempts, report
from dlock_core.transactions.tie import Outcome, call_all
from sqla_dlock.connections import watch, watch_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.orm import SessionTransaction

__all__ = [
    "before_work",
    "connections_of",
    "in_transaction",
    "on_end",
    "on_savepoint_rollback",
    "on_transaction",
    "on_unbegun_close",
    "settle_ended",
]


if TYPE_CHECKING:
    Stop: TypeAlias = Callable[[], None]


_CLOSING: Final = ("close", "reset", "invalidate")


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

    At once for connections that have joined already; after what listeners of `after_begin` send, but on MySQL and
    MariaDB before anything that may take the snapshot (all but SET and USE); and again before the next statement, or
    COMMIT, after a savepoint's rollback that may have undone what the hook did. What it raises reaches the caller and
    the statement is not sent; then it is called again before the next one. Not called for statements that hooks send on
    the connection.
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


def on_unbegun_close(session: Session, hook: Callable[[], None]) -> None:
    """Call `hook()` when the session is closed, reset or invalidated before its next outermost transaction begins.

    It may be called although one has begun, if that was interrupted.
    """
    _watched(session).closings.append(hook)


def settle_ended(session: Session) -> None:
    """Have everybody hear of an end of which an interrupt has kept SQLAlchemy from telling."""
    watched: _Watched | None = vars(session).get("_dlock_watched")
    if watched is not None and watched.root is not None and watched.root.transaction is not session.get_transaction():
        watched.root.left()
        watched.root = None


def _intercept_close(session: Session) -> None:
    """Hear of the session's close, of which SQLAlchemy tells nothing where no transaction is open."""
    for name in _CLOSING:
        if hasattr(session, name):
            vars(session)[name] = partial(_close, ref(session), name)


def _close(found: ref[Session], name: str) -> None:
    session = found()
    if session is None:
        return
    watched: _Watched | None = vars(session).get("_dlock_watched")
    try:
        getattr(type(session), name)(session)
    finally:
        closings = [] if watched is None else watched.closings
        call_all([*closings, partial(settle_ended, session)])
        closings.clear()
        _forget(session)


def _forget(session: Session) -> None:
    """Listen no more to a session of which nobody wants to hear."""
    watched: _Watched | None = vars(session).get("_dlock_watched")
    if watched is None or not (watched.root or watched.beginnings or watched.work or watched.closings):
        for name in ("_dlock_watched", *_CLOSING):
            vars(session).pop(name, None)


class _Watched:
    """What somebody wants to hear of one session."""

    def __init__(self) -> None:
        self.beginnings: list[Callable[[], None]] = []
        self.work: list[Callable[[Connection], None]] = []
        self.closings: list[Callable[[], None]] = []
        self.root: Root | None = None

    def begin(self, session: Session, transaction: SessionTransaction) -> None:
        if self.root is not None and not self.root.is_over:
            self.root.left()  # an interrupt has kept SQLAlchemy from telling
        self.root = Root(session, transaction)
        vars(transaction)["close"] = partial(_close_transaction, self.root)
        for connection in connections_in(transaction):
            self.root.join(connection)


def _close_transaction(root: Root, invalidate: bool = False) -> None:  # noqa: FBT001, FBT002 - SQLAlchemy's form
    """Close a root transaction, also when SQLAlchemy is kept from telling of its end.

    An interrupt, or a task's cancellation, may come while connections go back to their pool, and other listeners raise.
    """
    vars(root.transaction).pop("close", None)
    try:
        root.transaction.close(invalidate)
    except BaseException:
        root.torn()
        raise


def _watched(session: Session) -> _Watched:
    """What is wanted of a session, with its open root transaction."""
    watched: _Watched = vars(session).get("_dlock_watched") or vars(session).setdefault("_dlock_watched", _Watched())
    if _CLOSING[-1] not in vars(session):
        _intercept_close(session)
    transaction = session.get_transaction()
    root = watched.root
    if transaction is None:
        settle_ended(session)
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


def _part(root: Root) -> AttemptedWork:
    """Have an attempt of `retry_on_conflict` hear of the end of a root transaction, without keeping it alive."""
    weak, connections = ref(root), root.connections
    part = AttemptedWork("work of a session", is_pending=lambda: (alive := weak()) is not None and alive.may_stand())
    root.settlers.append(lambda outcome: part.settle(outcome if connections else Outcome.ROLLED_BACK))
    return part


# First among the listeners: what others do there may need it.
@event.listens_for(Session, "after_transaction_create", insert=True)
def _begun(session: Session, transaction: SessionTransaction) -> None:
    watched: _Watched | None = vars(session).get("_dlock_watched")
    if transaction.parent is not None:
        return
    if watched is None and attempts():
        watched = vars(session).setdefault("_dlock_watched", _Watched())
    if watched is None:
        return
    watched.begin(session, transaction)
    if attempts() and watched.root is not None:
        report(transaction, partial(_part, watched.root))
    try:
        for hook in list(watched.beginnings):
            hook()
    except BaseException:
        transaction.close()
        raise
    watched.closings.clear()  # The transaction holds what they wanted to end.


@event.listens_for(Session, "after_begin", insert=True)
def _joined(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    watched: _Watched | None = vars(session).get("_dlock_watched")
    if watched is None or transaction.parent is not None or watched.root is None:
        return
    watched.root.join(connection)
    if len(session.dispatch.after_begin) == 1:
        _open_gate(connection, watched.work)
    else:  # the program's own listeners come first: they choose the schema, or the tenant, whose row is fenced
        watch(connection).gate.hold(watched.work, partial(_is_beginning, transaction))


def _is_beginning(transaction: SessionTransaction) -> bool:
    """Say whether a connection is joining: until every `after_begin` listener was called."""
    return transaction._state.name == "PROVISIONING_CONNECTION"


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
    except BaseException:  # What an interrupt has cut short is repeated at once; else the session's close would do it.
        watched.root.left()
        raise
    watched.root = None
    _forget(session)


class Root:
    """A root transaction, which has ended when the session has left it and every connection's part has ended.

    A Connection that the user has given to the session goes on without it: then the end is the Connection's.
    """

    def __init__(self, session: Session, transaction: SessionTransaction) -> None:
        self.session, self.transaction = session, transaction
        self.checks: list[Callable[[], None]] = []
        self.connections: list[Connection] = []
        self.outcomes: dict[Connection, Outcome | None] = {}
        """How each connection's part has ended, None while it has not."""
        self.is_over = False
        self.was_committed = False
        """The session has said so; it knows nothing of lost connections, nor of who owns them."""
        self.settlers: list[Callable[[Outcome], None]] = []
        self._is_checked = self._owns_connection = False
        self._pending: deque[Callable[[], None]] | None = None
        """Who is to hear of its end still."""

    def join(self, connection: Connection) -> None:
        """Take a connection in; joining again changes nothing.

        One with the execution option `dlock_test_transaction` has a transaction that is a test's, not the program's:
        there the end is the session's own.
        """
        if connection in self.connections:
            return
        self.connections.append(connection)
        self._is_checked = False  # there is more to commit now
        if not is_of_test(connection):
            self.outcomes[connection] = None
            self._owns_connection |= _is_owned(self.transaction, connection)
            watch(connection).members.append(self)

    def check(self) -> None:
        """Hear that COMMIT is next on one of the connections: nothing was committed so far on any."""
        if not self._is_checked:
            for check in self.checks:
                check()
            self._is_checked = True

    def ended(self, connection: Connection, outcome: Outcome, *, failed: bool, in_commit: bool) -> None:
        """Hear how a connection's part has ended; the session goes on to let go of its own connections.

        But not after a COMMIT that failed: it waits for a rollback() that may never come.
        """
        self.outcomes[connection] = outcome
        is_abandoned = failed and self.session.get_transaction() is not self.transaction  # close() will say no more
        if is_abandoned or not self._owns_connection or (in_commit and outcome is not Outcome.COMMITTED):
            self._settle_if_ended()

    def left(self) -> None:
        """Hear that the session has nothing more to do with it."""
        self._owns_connection = False
        self._settle_if_ended()

    def torn(self) -> None:
        """Hear that the session was interrupted as it let go: nobody comes back to its connections that are open."""
        self.left()
        is_open = any(
            outcome is None and _is_owned(self.transaction, connection) for connection, outcome in self.outcomes.items()
        )
        if is_open and not self.is_over:
            self._settle(Outcome.UNKNOWN)

    def may_stand(self) -> bool:
        """Say, of a transaction whose end was not heard of, whether its work is kept or may still be."""
        return self.was_committed or self.session.get_transaction() is self.transaction

    def __del__(self) -> None:
        """The session has forgotten it in the middle: nothing more will be heard of connections that have not ended."""
        if getattr(self, "settlers", None) and not self.is_over:  # its making may have been interrupted
            # Unknown, whatever it is: a release would be I/O in the garbage collector, perhaps inside itself.
            self._settle(Outcome.UNKNOWN)

    def _settle_if_ended(self) -> None:
        if all(outcome is not None or not connection.in_transaction() for connection, outcome in self.outcomes.items()):
            self._settle()

    def _settle(self, known: Outcome | None = None) -> None:
        """Call whoever wants to hear of the end; again, for those whom an interrupt has kept from hearing."""
        if self._pending is None:
            outcome = known or self._outcome()
            self._pending = deque(partial(settle, outcome) for settle in reversed(self.settlers))
        self.is_over = True
        call_all(self._pending)

    def _outcome(self) -> Outcome:
        known = {outcome or Outcome.ROLLED_BACK for outcome in self.outcomes.values()}
        if not known:
            return Outcome.COMMITTED if self.was_committed else Outcome.ROLLED_BACK
        return known.pop() if len(known) == 1 else Outcome.UNKNOWN


def connections_in(transaction: SessionTransaction) -> list[Connection]:
    """The connections of a root transaction, in the order they joined; SQLAlchemy 2.0 has nothing public for it."""
    return list(dict.fromkeys([part[0] for part in _parts(transaction)]))


def is_of_test(connection: Connection) -> bool:
    """Say whether the connection's own transaction is a test's, inside of which sessions have theirs."""
    return bool(connection.get_execution_options().get("dlock_test_transaction"))


def _is_owned(transaction: SessionTransaction, connection: Connection) -> bool:
    return any(part[0] is connection and part[3] for part in _parts(transaction))


def _parts(transaction: SessionTransaction) -> list[tuple[Any, ...]]:
    """The connection, its transaction, whether the session commits it, and whether it closes it."""
    return list(transaction._connections.values())
