"""Follows the database transaction of one Connection to its end, from the calls that SQLAlchemy makes to end it.

The calls are intercepted on the Connection object, from the first use of its tracker until the transaction has ended.
SQLAlchemy's own events come before COMMIT and ROLLBACK, and do not report their outcome.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol

from sqlalchemy.exc import DBAPIError, InvalidRequestError

from dlock_core.sql.database import IN_ERROR, cursor_of, transaction_status
from dlock_core.sql.driver_errors import (
    MAY_ROLL_BACK,
    DatabaseFailure,
    failure_of_statement,
    is_refusal,
    warn_unless_known,
)
from dlock_core.sql.statement_kinds import commits_by_itself, surely_reads
from dlock_core.transactions.retry import SWALLOWED, current_attempts
from dlock_core.transactions.tie import Outcome, call_all
from sqla_dlock.begun import begins_by_itself, has_begun, may_write, savepoint_may_begin
from sqla_dlock.first_statement import FirstStatementHooks
from sqla_dlock.statement_commits import may_have_changed, may_remain, reporting

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

__all__ = [
    "ConnectionTracker",
    "Participant",
    "mark",
    "note_xid",
    "open_savepoints",
    "outcome_so_far",
    "tracker_for",
    "tracker_of",
]


_INTERCEPTED: Final = (
    "_begin_impl",
    "_begin_twophase_impl",
    "_commit_impl",
    "_rollback_impl",
    "_savepoint_impl",
    "_release_savepoint_impl",
    "_rollback_to_savepoint_impl",
    "_prepare_twophase_impl",
    "_commit_twophase_impl",
    "_rollback_twophase_impl",
    "_handle_dbapi_exception",
    "_execute_context",
)
_methods_of: Final = attrgetter(*_INTERCEPTED)
_IN_FAILED_TRANSACTION: Final = "25P02"
"""PostgreSQL's error code for a statement after an error, before the rollback."""


class Participant(Protocol):
    """A session's transaction that takes part in the connection's transaction."""

    def check(self, *, is_end: bool) -> None:
        """Raise an error to refuse the COMMIT that follows, with which the transaction ends, or goes on."""

    def note_committed(self) -> None:
        """Record that work in the transaction was committed, although it goes on."""

    def ended(self, connection: Connection, outcome: Outcome, *, failed: bool, in_commit: bool) -> None:
        """Record how the connection's transaction has ended; `failed` means by an error of ROLLBACK."""


_warn_once_unless_known: Final = cache(warn_unless_known)


class ConnectionTracker:
    """Follows one Connection's transaction to its end, with methods that replace the Connection's own."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        _warn_once_unless_known(connection.dialect.driver)
        self.hooks = FirstStatementHooks(connection)
        self.participants: list[Participant] = []
        self.xid: str | None = None
        self.undo: list[tuple[set[str], Callable[[], None]]] = []
        """The functions to call when one of these savepoints is rolled back, and the names of the open savepoints."""
        self.outcome: Outcome | None = None
        """The outcome of a COMMIT that was sent, as far as it is known: no rollback after it changes that."""
        self._is_in_doubt = False
        self._has_failed = False
        """Whether a statement has failed on PostgreSQL, which may have undone the whole transaction."""
        self._is_begun_anew = False
        """Whether MySQL or MariaDB has undone all of it with a failed statement, and treats what follows as new."""
        self._first_savepoint: str | None = None
        """The savepoint that has begun SQLite's transaction, or may have: its RELEASE is a COMMIT."""
        self._has_written = True
        """Whether anything may have been changed since then: if not, the work may be repeated after a commit."""
        self._notes_commits = False
        own = self.sqlalchemy = SimpleNamespace(**dict(zip(_INTERCEPTED, _methods_of(connection), strict=True)))
        vars(connection).update(
            _dlock_tracker=self,
            _begin_impl=partial(self._begin_next, own._begin_impl),
            _begin_twophase_impl=partial(self._begin_next, own._begin_twophase_impl),
            _commit_impl=partial(self._finish, own._commit_impl),
            _rollback_impl=partial(self._roll_back, own._rollback_impl),
            _rollback_to_savepoint_impl=self._roll_back_to_savepoint,
            _prepare_twophase_impl=self._prepare,
            _commit_twophase_impl=partial(self._finish, own._commit_twophase_impl),
            _rollback_twophase_impl=partial(self._roll_back, own._rollback_twophase_impl),
        )
        if connection.dialect.name == "postgresql":  # which accepts nothing after an error
            vars(connection)["_handle_dbapi_exception"] = self._note_failure
        else:
            vars(connection).update(
                _handle_dbapi_exception=self._handle_dbapi_exception, _execute_context=self._execute_context
            )

        if connection.dialect.name == "sqlite":
            self._first_savepoint = _may_have_begun(connection)
            vars(connection).update(
                _savepoint_impl=self._begin_savepoint, _release_savepoint_impl=self._release_savepoint
            )

    def _begin_next(self, begin: Callable[[object], None], transaction: object) -> None:
        """Report the end of this transaction now if interrupts have prevented that: not as the end of the next one."""
        if self.outcome is not None:
            self._end(self.outcome)
        begin(transaction)

    def _finish(self, commit: Callable[..., None], *xid: Any) -> None:
        """Check, commit, and report the outcome to the participants, whatever happens in between.

        From the moment at which COMMIT is sent until the driver has returned, the outcome is unknown: only the server
        knows it, and `_outcome_after` determines what can be determined. An earlier error, of a check or a hook,
        prevents the COMMIT.
        """
        try:
            self._check(is_end=True)
            if current_attempts.get():
                self.refuse_undone()
            is_rolled_back = self._has_failed and is_undone(self.connection)
            has_ended = Outcome.ROLLED_BACK if is_rolled_back else Outcome.COMMITTED
            if self._is_in_doubt or _is_alive(self.connection):
                self.outcome = Outcome.UNKNOWN
            commit(*xid)
            self.outcome = has_ended
            self._end(has_ended, in_commit=True)
        except BaseException as error:  # An interrupt may come anywhere, and in what follows, too.
            try:
                if self.outcome is not Outcome.COMMITTED:
                    self._clean_up()
                if self.outcome is Outcome.UNKNOWN:
                    self.outcome = self._outcome_after(error)
            finally:
                try:
                    self._end(Outcome.ROLLED_BACK, in_commit=True)
                except BaseException:
                    self._end(Outcome.ROLLED_BACK, in_commit=True)
                    raise
            raise

    def refuse_undone(self) -> None:
        """Raise InvalidRequestError if the database has undone the work, by an error that was swallowed."""
        if self._is_begun_anew or (self._has_failed and is_undone(self.connection)):
            raise InvalidRequestError(SWALLOWED)

    def _check(self, *, is_end: bool) -> None:
        if self.hooks.is_unanswered:
            self.hooks.make_up()
        if self.hooks.due:
            self.hooks.run_last()
        for participant in self.participants:
            participant.check(is_end=is_end)

    def _clean_up(self) -> None:
        """Roll back a transaction that a failed COMMIT may leave open: SQLAlchemy does not, not even for its pool."""
        if not self._is_in_doubt:
            with suppress(Exception):
                self.sqlalchemy._rollback_impl()

    def _outcome_after(self, error: BaseException) -> Outcome:
        if self._is_in_doubt:
            return Outcome.UNKNOWN  # still prepared, or committed
        if is_refusal(error):
            return Outcome.ROLLED_BACK
        from sqla_dlock.commit_status import outcome_of  # hardly a process ever needs it

        return outcome_of(self.connection.engine, self.xid)

    def _roll_back(self, rollback: Callable[..., None], *xid: Any) -> None:
        is_left = self._is_in_doubt and not _is_alive(self.connection)  # a prepared transaction outlives its connection
        is_done = False
        try:
            self.hooks.clear()
            rollback(*xid)
            is_done = True
            self._end(Outcome.UNKNOWN if is_left else Outcome.ROLLED_BACK)
        except BaseException:
            is_unknown = is_left if is_done else self._is_in_doubt
            self._end(Outcome.UNKNOWN if is_unknown else Outcome.ROLLED_BACK, failed=not is_done)
            raise

    def _commits_by_itself(self, statement: object) -> bool:
        """Return whether SQLite commits a statement at once, because its driver has sent no BEGIN, and sends none."""
        if self.hooks.is_busy or not _is_alive(self.connection) or has_begun(self.connection):
            return False
        commits = commits_by_itself if begins_by_itself(self.connection) else may_write
        return commits(str(statement))

    def _begin_savepoint(self, *name: Any) -> str:
        """Create a savepoint: SQLite's driver sends BEGIN only before some writes, and not before a savepoint."""
        is_first = not has_begun(self.connection)
        created: str = self.sqlalchemy._savepoint_impl(*name)
        if is_first:
            self._first_savepoint, self._has_written = created, False
        return created

    def _release_savepoint(self, name: str) -> None:
        """Release a savepoint; if that is a COMMIT to SQLite, check before. SQLAlchemy's transaction goes on."""
        if name == self._first_savepoint:
            self._check(is_end=False)
        self.sqlalchemy._release_savepoint_impl(name)
        self._note_committed()

    def note_commits(self) -> None:
        """Report from now on what statements commit although the transaction goes on."""
        if not self._notes_commits:
            self._notes_commits = True
            if (send := reporting(self.connection, self._report_committed)) is not None:
                vars(self.connection)["_execute_context"] = send

    def _report_committed(self) -> None:
        for participant in self.participants:
            participant.note_committed()

    def _note_committed(self, *, has_changed: bool = True) -> None:
        """Report what SQLite has committed, if so, although the transaction goes on; what follows is in another one."""
        if has_begun(self.connection):
            return
        self.hooks.make_up()
        if self._has_written and has_changed:
            self._report_committed()

    def _roll_back_to_savepoint(self, name: str) -> None:
        self.hooks.note_savepoint_undone()  # first: an interrupt may come as soon as the database is done
        self.sqlalchemy._rollback_to_savepoint_impl(name)
        undone = [each for each in self.undo if name in each[0]]
        self.undo = [each for each in self.undo if each not in undone]
        call_all([restore for _, restore in undone])

    def _execute_context(self, *args: Any, **more: Any) -> Any:
        """Send a statement. An error may mean that everything is rolled back, and an interrupt may hide that error."""
        if self.hooks.is_unanswered:
            self.hooks.make_up()
        is_commit = self.connection.dialect.name == "sqlite" and self._commits_by_itself(args[2])
        if is_commit:
            self._check(is_end=False)
        if self._first_savepoint is not None and not self._has_written:
            self._has_written = not surely_reads(str(args[2]))
        try:
            answer = self.sqlalchemy._execute_context(*args, **more)
        except BaseException as error:
            self.hooks.is_unanswered = True  # no signal handler runs before this: nothing is called
            if is_commit and may_remain(args, error) and not _is_in_transaction(self.connection):
                self._report_committed()
            raise
        if is_commit:
            self._note_committed(has_changed=may_have_changed(args, answer))
        return answer

    def _handle_dbapi_exception(self, *error: Any, **more: Any) -> None:
        self.hooks.is_unanswered = True  # also where rows are fetched
        if current_attempts.get():
            self._is_begun_anew |= has_rolled_back(self.connection, error[0])
        self.sqlalchemy._handle_dbapi_exception(*error, **more)

    def _note_failure(self, *error: Any, **more: Any) -> None:
        self._has_failed = True
        self.sqlalchemy._handle_dbapi_exception(*error, **more)

    def _prepare(self, xid: Any) -> None:
        self._check(is_end=True)
        self._is_in_doubt = _is_alive(self.connection)
        try:
            self.sqlalchemy._prepare_twophase_impl(xid)
        except BaseException as error:
            self._is_in_doubt &= not is_refusal(error)
            raise

    def _end(self, outcome: Outcome, *, failed: bool = False, in_commit: bool = False) -> None:
        """Report the outcome, which is that of the COMMIT if one was sent."""
        outcome = self.outcome or outcome
        forget = vars(self.connection).pop
        for name in ("_dlock_tracker", *reversed(_INTERCEPTED)):  # `_begin_impl` last: it completes an interrupted end
            forget(name, None)
        if self.hooks.listens:
            self.hooks.end()
        while self.participants:  # each is removed only after its call: an interrupt may repeat this
            self.participants[0].ended(self.connection, outcome, failed=failed, in_commit=in_commit)
            self.participants.pop(0)


def tracker_for(connection: Connection) -> ConnectionTracker:
    """Return the tracker of a Connection's transaction, which is set up at the first call."""
    return vars(connection).get("_dlock_tracker") or ConnectionTracker(connection)


def tracker_of(connection: Connection) -> ConnectionTracker | None:
    """Return the tracker of a Connection's transaction, if there is one."""
    found: ConnectionTracker | None = vars(connection).get("_dlock_tracker")
    return found


def outcome_so_far(connection: Connection) -> Outcome:
    """Return how a transaction has ended whose end was not reported, because of interrupts."""
    found = tracker_of(connection)
    return (found and found.outcome) or Outcome.ROLLED_BACK


def note_xid(connection: Connection, xid: str) -> None:
    """Record PostgreSQL's number of the connection's transaction (`pg_current_xact_id()`), to resolve a lost COMMIT."""
    if (found := tracker_of(connection)) is not None:
        found.xid = xid


def mark(connection: Connection, comment: str) -> None:
    """Put a comment before each statement of the connection's transaction, for operators who look at the database."""
    if (found := tracker_of(connection)) is not None:
        found.hooks.mark(comment)


def open_savepoints(connection: Connection) -> list[str]:
    """Return the names of the open savepoints, the outermost first."""
    found, nested = list[str](), connection.get_nested_transaction()
    while nested is not None:
        found.insert(0, nested._savepoint)  # no public API names an open savepoint, or the one around it
        nested = nested._previous_nested
    return found


def _may_have_begun(connection: Connection) -> str | None:
    """Return the outermost open savepoint, if it may have begun SQLite's transaction: what came before is not known."""
    savepoints = open_savepoints(connection)
    return savepoints[0] if savepoints and _is_alive(connection) and savepoint_may_begin(connection) else None


def _is_alive(connection: Connection) -> bool:
    """Return whether the connection is usable, as far as SQLAlchemy knows."""
    return connection._dbapi_connection is not None  # without one it is closed or invalidated


def _is_in_transaction(connection: Connection) -> bool:
    return _is_alive(connection) and has_begun(connection)


def is_undone(connection: Connection) -> bool:
    """Return, after an error, whether PostgreSQL has undone the transaction: it then treats COMMIT as a ROLLBACK.

    No driver raises an error for that. asyncpg does not expose the state, so the server is queried.
    """
    if connection.dialect.name != "postgresql" or not _is_alive(connection):
        return False
    if (status := transaction_status(connection.connection.driver_connection)) is not None:
        return status == IN_ERROR
    try:
        connection.exec_driver_sql("SELECT 1")
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == _IN_FAILED_TRANSACTION:
            return True
        raise
    return False


def has_rolled_back(connection: Connection, error: BaseException) -> bool:
    """Return whether a failed statement has rolled back the whole transaction; queries MariaDB or MySQL if needed."""
    trouble = failure_of_statement(error) if connection.dialect.name in ("mysql", "mariadb") else None
    if trouble not in MAY_ROLL_BACK or trouble is DatabaseFailure.DEADLOCK:
        return trouble is DatabaseFailure.DEADLOCK
    dialect: Any = connection.dialect
    question = "NOT @@in_transaction" if dialect.is_mariadb else "@@innodb_rollback_on_timeout"
    try:
        # The driver's cursor, which no event or log sees.
        with cursor_of(connection.connection) as cursor:
            cursor.execute(f"SELECT {question}")
            return bool(cursor.fetchone()[0])
    except dialect.dbapi.Error:
        return True
