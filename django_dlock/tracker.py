"""Follows the statements and transactions of one database connection, from the calls that Django makes.

The calls are intercepted on the connection object of this thread, never on Django's classes: Django has no hook for the
end of a transaction that also runs if it is rolled back, or if the connection is lost. In this module, a transaction is
the program's outermost one on this thread's connection: a test case's own does not count.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import partial
from threading import RLock
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from django.db import DatabaseError, Error
from django.db.transaction import TransactionManagementError

from django_dlock.atomic_blocks import NoSavepoint, anchor_of, has_open_transaction, undo_begun_block
from django_dlock.implicit_commits import ImplicitCommits
from django_dlock.transactions import Transaction, is_undone, text_of
from dlock_core.flow import flow_variable
from dlock_core.sql.driver_errors import is_plain_refusal, warn_unless_known
from dlock_core.sql.statement_kinds import is_data_statement
from dlock_core.transactions.retry import SWALLOWED, current_attempts
from dlock_core.transactions.tie import Outcome, call_all

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from contextvars import ContextVar

    from django.db.backends.base.base import BaseDatabaseWrapper

    Step: TypeAlias = Callable[[], object]
    StatementHook: TypeAlias = Callable[[BaseDatabaseWrapper, str, bool], None]

__all__ = ["ConnectionTracker", "leases_of_context", "tracker_for", "wrap_statements"]

logger = logging.getLogger("dlock")

leases_of_context: Final[ContextVar[tuple[Any, ...]]] = flow_variable("dlock_leases", ())
"""The leases (`TiedDatabases`) that this context holds, even in a thread with other connections."""

# After an error PostgreSQL accepts no statement before the rollback to a savepoint.
_DJANGOS_OWN: Final = ("BEGIN", "RELEASE SAVEPOINT", "ROLLBACK TO SAVEPOINT")
_WITHOUT_SNAPSHOT: Final = (*_DJANGOS_OWN, "SAVEPOINT", "SHOW ", "SET ")

_INTERCEPTED: Final = (
    "_commit",
    "_rollback",
    "_close",
    "_set_autocommit",
    "savepoint",
    "savepoint_commit",
    "savepoint_rollback",
)


class _Suspension:
    """Counts nested blocks, all in the connection's thread; an interrupt cannot unbalance a `with`."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class ConnectionTracker:
    """Follows one connection; its methods are called instead of the connection's methods, and call them."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection: Any = connection
        self.current: Transaction | None = None
        self._unsettled: Transaction | None = None
        """A transaction that has ended, although an interrupt may have prevented calls to some of its settlers."""
        self.hooks: list[StatementHook] = []
        self._turned_on: object = None
        """The driver's connection whose autocommit was turned on for settlers: Django is about to turn it on again."""
        self.suspended = _Suspension()
        """A block in which no hook is called, and no lease sees statements."""
        self.django = SimpleNamespace(**{name: getattr(connection, name) for name in _INTERCEPTED})
        vars(connection).update({name: getattr(self, name) for name in _INTERCEPTED}, _dlock_tracker=self)

    def listen(self) -> None:
        """Follow every statement from now on; a repeated call changes nothing."""
        if self._statement not in self.connection.execute_wrappers:
            if (transaction := self.transaction()) is not None:
                transaction.has_spoken = True  # as far as we know: statements may have been sent before
            wrap_statements(self.connection, self._statement)

    def _statement(self, execute: Callable[..., Any], sql: Any, params: Any, many: Any, context: Any) -> Any:
        """Replaces Django's execute(sql, params, many, context)."""
        text, transaction = sql if type(sql) is str else text_of(sql, self.connection), self.transaction()
        if transaction is not None and transaction.is_unanswered:
            transaction.make_up(self.connection)
        leases, is_data = leases_of_context.get(), is_data_statement(text)
        if leases and is_data and transaction is not None and transaction.passed.issuperset(leases):
            leases = ()
        if (leases or self.hooks) and not self.suspended.depth:
            self._before_statement(text, transaction, leases)
        if transaction is None:
            return execute(sql, params, many, context)
        transaction.has_spoken = transaction.has_spoken or self._may_take_snapshot(text)
        if transaction.comment and isinstance(sql, str) and not many:  # drivers parse the beginning of executemany's
            sql = transaction.comment + sql
        is_commit = self.connection.vendor == "sqlite" and self._begin_implicit_commit(text, transaction)
        is_control = bool(transaction.undo) and not is_data
        try:
            answer = execute(sql, params, many, context)
            if is_control:
                transaction.note_savepoints(text, is_certain=not many)
            if (implicit := transaction.implicit_commits) is not None:
                implicit.note_sent()
                if is_commit and not self.connection.connection.in_transaction:
                    transaction.note_committed(has_written=implicit.has_written)
        except BaseException as error:
            transaction.is_unanswered = True  # no signal handler runs before this: nothing is called
            transaction.note_failure(self.connection, error, text if is_control else "")
            raise
        return answer

    def _before_statement(self, sql: str, transaction: Transaction | None, leases: tuple[Any, ...]) -> None:
        """Call the hooks and the leases; statements that one of them sends are reported to none of them."""
        is_inside = transaction is not None
        if sql.startswith("SAVEPOINT") and not is_inside:  # of a test case
            return
        if sql.startswith(_DJANGOS_OWN) and ";" not in sql and not (is_inside and sql.startswith("BEGIN")):
            return
        for hook in self.hooks:
            with self.suspended:
                hook(self.connection, sql, is_inside)
        try:
            for lease in leases:
                lease.before_statement(self, transaction, sql)
        except BaseException:
            if sql.startswith("SAVEPOINT"):
                undo_begun_block(self.connection)
            raise

    def _begin_implicit_commit(self, sql: str, transaction: Transaction) -> bool:
        """Return whether SQLite may commit with this statement, which is no COMMIT; if so, check it like one.

        Django's transaction goes on: a lease that is held until its end is kept.
        """
        implicit = transaction.implicit_commits
        is_commit = implicit is not None and implicit.is_next(self.connection.connection, sql)
        if is_commit and not self.suspended.depth:
            for check in transaction.checks:
                check()
        transaction.note_statement(self.connection, is_commit=is_commit)
        return is_commit

    def _may_take_snapshot(self, sql: str) -> bool:
        if self.suspended.depth and self.connection.vendor == "mysql":
            return False  # dlock's locks a row, which takes no snapshot there
        return sql.startswith("SET STATEMENT") or not sql.startswith(_WITHOUT_SNAPSHOT)  # MariaDB's, of any kind

    def is_open(self) -> bool:
        """Return whether a transaction is open, from its first statement until its COMMIT or ROLLBACK is done."""
        return self.current is not None or has_open_transaction(self.connection)

    def transaction(self) -> Transaction | None:
        """Return the open transaction; its object is created at the first call."""
        connection, current = self.connection, self.current
        if current is not None:
            if current.driver is None or current.driver is connection.connection:
                return current
            self._settle(current)  # the driver's connection was replaced, and the transaction with it
        elif connection.autocommit and not connection.in_atomic_block and connection.connection is not None:
            return None  # as `has_open_transaction` says
        if self.current is None and has_open_transaction(connection):
            is_manual = not (connection.in_atomic_block and connection.commit_on_exit)
            self.current = Transaction(anchor_of(connection), is_manual, driver=connection.connection)
            if is_manual and connection.vendor == "sqlite":
                self.current.implicit_commits = ImplicitCommits()
            self._settle_interrupted()
        return self.current

    def _commit(self) -> None:
        if self.current is None:
            self.django._commit()
        else:
            self._finish(self.current, self.django._commit)

    def _set_autocommit(self, autocommit: bool) -> None:  # noqa: FBT001 - Django's form
        """Turn it on or off; turning it on makes SQLite and MariaDB commit an open transaction."""
        ending = self.current if autocommit else None
        turned_on, self._turned_on = self._turned_on, None
        if ending is None:
            if not autocommit or turned_on is None or turned_on is not self.connection.connection:
                self.django._set_autocommit(autocommit)
        elif ending.is_manual:
            self._commit_by_autocommit(ending)
        else:  # an interrupt has prevented atomic() from ending it
            self._roll_back(ending)
            self.django._set_autocommit(autocommit)

    def _commit_by_autocommit(self, ending: Transaction) -> None:
        """End a transaction that was begun by hand: autocommit, which commits it, stays on after it."""

        def commit() -> None:
            self.django._set_autocommit(True)
            ending.is_manual = False

        try:
            self._finish(ending, commit)
        finally:
            self._turned_on = None  # this was Django's last call for it

    def _finish(self, ending: Transaction, commit: Callable[[], None]) -> None:
        was_lost = getattr(self.connection.connection, "closed", False)
        try:
            if ending.is_unanswered:
                ending.make_up(self.connection)
            for check in ending.checks:
                check()
            if self.current is not ending:
                raise TransactionManagementError("The transaction was ended by a check that ran before its COMMIT.")
            has_ended = Outcome.ROLLED_BACK if is_undone(self.connection) else Outcome.COMMITTED
            if current_attempts.get() and (ending.is_begun_anew or has_ended is Outcome.ROLLED_BACK):
                raise TransactionManagementError(SWALLOWED)
            ending.outcome = Outcome.UNKNOWN
            commit()
            ending.outcome = has_ended
            if ending.anchor is None:
                # Django sets this next; set now, its hooks run even if a settler is interrupted.
                self.connection.run_commit_hooks_on_set_autocommit_on = True
            self._settle(ending)
        except BaseException as error:
            self._break_off(ending, error, was_lost=was_lost)
            raise

    def _break_off(self, ending: Transaction, error: BaseException, *, was_lost: bool) -> None:
        """End a transaction after an error or interrupt, at whatever point it came."""
        if ending.outcome is Outcome.COMMITTED:
            self._settle(ending)
            return
        is_unanswered = ending.outcome is Outcome.UNKNOWN
        if is_unanswered and ending.note_failed_commit(error, self.connection, was_lost=was_lost):
            self._settle(ending)
        if not (is_unanswered and isinstance(error, DatabaseError)):  # after which Django rolls back
            self._roll_back(ending)

    def _roll_back(self, ending: Transaction) -> None:
        """Roll back, as Django does only after a DatabaseError: otherwise it turns autocommit on, which can commit."""
        with suppress(Error):
            if ending.anchor is None:
                self.connection.rollback()
            else:
                self.connection.savepoint_rollback(ending.anchor)

    def _rollback(self) -> None:
        ending, is_done = self.current, False
        try:
            self.django._rollback()
            is_done = True
            self._settle(ending)
        except BaseException:  # an interrupt may come anywhere, even before the rollback
            if ending is not None and not is_done:
                with suppress(Error):
                    self.connection.close()
            self._settle(ending)
            raise

    def _close(self) -> None:
        ending = self.current
        try:
            self.django._close()
            self._closed(ending)
        except BaseException:
            self._closed(ending)
            raise

    def _closed(self, ending: Transaction | None) -> None:
        # Django sets this next; set now, because settlers may check it.
        self.connection.closed_in_transaction = self.connection.in_atomic_block
        self._settle_interrupted()
        if ending is not None:
            if self.current is ending:
                self.current = None
            call_all(ending.pending_steps())

    def _settle_interrupted(self) -> None:
        """Complete the end of an earlier transaction that was interrupted repeatedly."""
        if self._unsettled is not None:
            call_all(self._unsettled.pending_steps())
            self._unsettled = None

    def savepoint(self) -> str | None:
        sid: str | None = self.django.savepoint()
        if sid is not None and self.current is not None and self.current.undo and self.current.undo[-1] != sid:
            self.current.undo.append(sid)  # without a statement that we see: a test case's, or none was sent
        return sid

    def savepoint_commit(self, sid: str) -> None:
        if self.current is not None and sid is not None and sid == self.current.anchor:
            self._finish(self.current, partial(self._release, sid))
        else:
            self._release(sid)

    def _release(self, sid: str) -> None:
        if not isinstance(sid, NoSavepoint):
            self.django.savepoint_commit(sid)
        if self.current is not None and sid in self.current.undo:  # the statement was not seen, or none was sent
            self.current.note_release(sid)

    def savepoint_rollback(self, sid: str) -> None:
        transaction = self.current if sid is not None else None  # None: Django has made no savepoint, and does nothing.
        try:
            if isinstance(sid, NoSavepoint):
                self.connection.needs_rollback = True
            else:
                self.django.savepoint_rollback(sid)
            self._restore(transaction, sid)
        except BaseException as error:
            if not is_plain_refusal(error):
                self._restore(transaction, sid)
            raise

    def _restore(self, transaction: Transaction | None, sid: str) -> None:
        """Restore what came after a savepoint; one that stands for the whole transaction ends it."""
        if transaction is not None and sid == transaction.anchor:
            self._settle(transaction)
        elif transaction is not None:
            transaction.undo_to(sid)

    def _settle(self, ending: Transaction | None) -> None:
        """Restore what was rolled back and report the end; repeat interrupted steps. Leases are released here.

        This must run after Django's call to the driver has returned, never before: until then the COMMIT may fail, and
        a released lease would let the next holder read too early.
        """
        if ending is None:
            return
        if self.current is ending:
            self.current = None
        try:
            if ending.undo or ending.settlers:
                self._call_between_transactions(ending.pending_steps(), is_manual=ending.is_manual)
        except Error:  # Django would roll back, and drop the on_commit functions of a COMMIT that was executed
            logger.exception("dlock: a callback at the end of a transaction failed")
        except BaseException:
            # The repetition may be interrupted, too: the next transaction, or close(), continues it.
            self._unsettled = ending
            raise

    def _call_between_transactions(self, steps: deque[Step], *, is_manual: bool) -> None:
        """Call steps when they may use the connection like any code after the transaction; Django's hooks wait."""
        connection = self.connection
        if connection.connection is None or connection.in_atomic_block:
            call_all(steps)
            return
        hooks = connection.run_on_commit, connection.run_commit_hooks_on_set_autocommit_on
        try:
            connection.run_on_commit, connection.run_commit_hooks_on_set_autocommit_on = [], False
            try:  # The same as Django's `set_autocommit`, without its checks of a connection that has just been used.
                self.django._set_autocommit(True)
                connection.autocommit, self._turned_on = True, connection.connection
            except Error:
                self._turned_on = None
            call_all(steps)
        finally:
            if is_manual:
                self._turned_on = None
                with suppress(Error):
                    connection.set_autocommit(False)
            connection.run_on_commit, connection.run_commit_hooks_on_set_autocommit_on = hooks


_guard: Final = RLock()
"""Held briefly while a connection gets its tracker or a wrapper, perhaps in another thread."""
os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_guard.release)


def tracker_for(connection: BaseDatabaseWrapper) -> ConnectionTracker:
    """Return the tracker of a connection, which is set up at the first call."""
    tracker: ConnectionTracker | None = vars(connection).get("_dlock_tracker")
    if tracker is None:
        database: Any = connection
        warn_unless_known(database.Database.__name__)  # outside the mutex: it calls log handlers
        with _guard:
            tracker = vars(connection).get("_dlock_tracker") or ConnectionTracker(connection)
    return tracker


def wrap_statements(connection: BaseDatabaseWrapper, wrapper: Callable[..., Any]) -> None:
    """Call `wrapper` instead of Django's execute() for every statement; a repeated call changes nothing."""
    with _guard:
        if wrapper not in connection.execute_wrappers:
            # Not at the end: execute_wrapper() removes the last one when its block is left.
            connection.execute_wrappers.insert(0, wrapper)
