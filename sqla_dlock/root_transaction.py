"""The outcome of a session's outermost transaction, from the outcomes on its connections."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from dlock_core.transactions.retry import current_attempts
from dlock_core.transactions.tie import Outcome, call_all
from sqla_dlock.connections import outcome_so_far, tracker_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import Session, SessionTransaction

__all__ = ["RootTransaction", "connections_in", "is_of_test"]


class RootTransaction:
    """A root transaction, which has ended when the session has left it and every connection's part has ended.

    A Connection that the user has passed to the session outlives it: then the end of the Connection's transaction
    counts.
    """

    def __init__(self, session: Session, transaction: SessionTransaction) -> None:
        self.session, self.transaction = session, transaction
        self.checks: list[Callable[[], None]] = []
        self.connections: list[Connection] = []
        self.outcomes: dict[Connection, Outcome | None] = {}
        """The outcome of the transaction on each connection, None until it has ended."""
        self.is_over = self.is_begun = False
        self.followed = 0
        """How many connections have joined with all required hooks before their first statement."""
        self.was_committed = False
        """Whether the session reports a commit; it does not know about lost connections or their owners."""
        self.settlers: list[Callable[[Outcome], None]] = []
        self._is_checked = self._owns_connection = self._is_partly_committed = False
        self._pending: deque[Callable[[], None]] | None = None
        """The functions that are still to be called, now that it has ended."""

    def join(self, connection: Connection) -> None:
        """Add a connection; adding it again changes nothing.

        With the execution option `dlock_test_transaction` its transaction belongs to a test, not to the program: then
        the session's own end counts.
        """
        if connection in self.connections:
            return
        self.connections.append(connection)
        self._is_checked = False  # there is more to commit
        if not is_of_test(connection):
            self.outcomes[connection] = None
            self._owns_connection |= self._owns(connection)
            tracker = tracker_for(connection)
            tracker.participants.append(self)
            if current_attempts.get():
                tracker.note_commits()

    def check(self, *, is_end: bool) -> None:
        """Refuse the following COMMIT on one of the connections: nothing has been committed on any so far.

        After one that is not the end of it, everything is checked again.
        """
        if not (is_end and self._is_checked):
            for check in self.checks:
                check()
            self._is_checked = is_end

    def note_committed(self) -> None:
        """Record that work in it was committed, although it goes on: an attempt that did it is not repeated."""
        self._is_partly_committed = True

    def ended(self, connection: Connection, outcome: Outcome, *, failed: bool, in_commit: bool) -> None:
        """Record how the transaction has ended on a connection; normally the session then returns its connections.

        After a failed COMMIT it does not: it waits for a rollback() that may never come. So the end is settled here, as
        soon as no connection has an open transaction.
        """
        self.outcomes[connection] = outcome
        is_abandoned = failed and self.session.get_transaction() is not self.transaction  # close() reports no more
        if is_abandoned or not self._owns_connection or (in_commit and outcome is not Outcome.COMMITTED):
            self._settle_if_ended()

    def leave(self) -> None:
        """Record that the session has left the transaction, and no longer uses it."""
        self._owns_connection = False
        self._settle_if_ended()

    def note_interrupted(self) -> None:
        """Record that the session was interrupted while it left: nothing will end its open connections."""
        self.leave()
        is_open = any(outcome is None and self._owns(connection) for connection, outcome in self.outcomes.items())
        if is_open and not self.is_over:
            self._settle(Outcome.UNKNOWN)

    def may_stand(self) -> bool:
        """Return, for a transaction whose end was not reported, whether its work is kept or may still be."""
        return self.was_committed or self.session.get_transaction() is self.transaction

    def __del__(self) -> None:
        """Settle a transaction whose session was dropped: nothing more will be reported about its connections."""
        if getattr(self, "settlers", None) and not self.is_over:  # the constructor may have been interrupted
            # Always unknown: a release would be I/O in the garbage collector, perhaps inside another release.
            self._settle(Outcome.UNKNOWN)

    def _owns(self, connection: Connection) -> bool:
        part = self.transaction._connections.get(connection)  # noqa: SLF001 - there is no public way
        return part is not None and part[3]

    def _settle_if_ended(self) -> None:
        for connection, outcome in self.outcomes.items():
            if outcome is None and connection.in_transaction():
                return
        self._settle()

    def _settle(self, known: Outcome | None = None) -> None:
        """Call the settlers, once each; a repeated call continues with those that an interrupt has prevented.

        This is where leases are released, so it must be called only when every connection's transaction has ended. If
        two engines have ended differently, the outcome is unknown: nothing may be released then.
        """
        if self._pending is None:
            outcome = known or self._outcome()
            self._pending = deque(map(partial, reversed(self.settlers), repeat(outcome)))
        self.is_over = True
        call_all(self._pending)

    def _outcome(self) -> Outcome:
        if not self.outcomes:
            return Outcome.COMMITTED if self.was_committed else Outcome.ROLLED_BACK
        known = [outcome or outcome_so_far(connection) for connection, outcome in self.outcomes.items()]
        if known.count(known[0]) != len(known):
            return Outcome.UNKNOWN
        is_kept = self._is_partly_committed and known[0] is Outcome.ROLLED_BACK
        return Outcome.COMMITTED if is_kept else known[0]  # otherwise an attempt would be repeated


def connections_in(transaction: SessionTransaction) -> list[Connection]:
    """Return the connections of a root transaction, in order; SQLAlchemy 2.0 has no public way."""
    parts = transaction._connections  # noqa: SLF001 - each is there by itself and by its engine
    return [each for each in parts if isinstance(each, Connection)] if parts else []


def is_of_test(connection: Connection) -> bool:
    """Return whether the connection's own transaction belongs to a test, with the sessions' transactions inside."""
    return bool(connection._execution_options.get("dlock_test_transaction"))  # noqa: SLF001 - as quick as can be
