"""The outermost transaction of one Session: who takes part in it, and who wants to hear of its end."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dlock_core.callbacks import call_all
from dlock_core.tie import Outcome
from sqla_dlock.watch import watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session, SessionTransaction

__all__ = ["Root", "connections_in", "is_of_test"]


class Root:
    """A root transaction, which has ended when the session has left it and every connection's part has ended.

    A Connection that the user has given to the session goes on without it: then the end is the Connection's.
    """

    def __init__(self, session: Session, transaction: SessionTransaction) -> None:
        self.session, self.transaction = session, transaction
        self.settlers: list[Callable[[Outcome], None]] = []
        self.checks: list[Callable[[], None]] = []
        self.connections: list[Connection] = []
        self.outcomes: dict[Connection, Outcome | None] = {}
        """How each connection's part has ended, None while it has not."""
        self.is_over = False
        self.was_committed = False
        """The session has said so; it knows nothing of lost connections, nor of who owns them."""
        self._is_checked = self._owns_connection = False

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

    def ended(self, connection: Connection, outcome: Outcome, *, failed: bool) -> None:
        """Hear how a connection's part has ended; the session goes on to let go of its own connections."""
        self.outcomes[connection] = outcome
        is_abandoned = failed and self.session.get_transaction() is not self.transaction  # close() will say no more
        if is_abandoned or not self._owns_connection:
            self._settle_if_ended()

    def left(self) -> None:
        """Hear that the session has nothing more to do with it."""
        self._owns_connection = False
        self._settle_if_ended()

    def __del__(self) -> None:
        """The session has forgotten it in the middle: nothing more will be heard of connections that have not ended."""
        if self.settlers and not self.is_over:
            for connection, outcome in self.outcomes.items():
                if outcome is None:
                    is_dead = connection.closed or connection.invalidated
                    self.outcomes[connection] = Outcome.ROLLED_BACK if is_dead else Outcome.UNKNOWN
            self._settle()

    def _settle_if_ended(self) -> None:
        if all(outcome is not None or not connection.in_transaction() for connection, outcome in self.outcomes.items()):
            self._settle()

    def _settle(self) -> None:
        if not self.is_over:
            self.is_over = True
            outcome = self._outcome()
            call_all([partial(settle, outcome) for settle in reversed(self.settlers)])

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
