"""One outermost transaction of the program: the calls at its end, and the values that a rollback restores.

`tracker` determines when it begins and how it ends; nothing in this module uses Django's connection, except to query
the database whether an error has rolled everything back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import ref

from django.db import Error, ProgrammingError

from dlock_core.sql.database import IDLE, IN_ERROR, transaction_status
from dlock_core.sql.driver_errors import MAY_ROLL_BACK, DatabaseFailure, failure_of_statement, is_refusal
from dlock_core.sql.statement_kinds import savepoint_changes
from dlock_core.transactions.tie import Outcome, call_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_dlock.implicit_commits import ImplicitCommits

    Step: TypeAlias = Callable[[], object]

__all__ = ["ABSENT", "AttributeValues", "Transaction", "is_idle", "is_undone", "text_of"]

ABSENT: Final = object()
"""Stands for the value of an attribute that did not exist."""


class AttributeValues:
    """The values of attributes before they were written, by instance; instances are referenced weakly."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[ref[Any], dict[str, object]]] = {}

    def note(self, instance: object, values: dict[str, object]) -> None:
        """Record values, unless older values of the same attributes are recorded."""
        key, before = id(instance), self._before
        if key not in before:
            before[key] = ref(instance, lambda _: before.pop(key, None)), {}
        before[key][1].update({name: value for name, value in values.items() if name not in before[key][1]})

    def take_over(self, newer: AttributeValues) -> None:
        """Add the records of `newer`, whose values were written later."""
        for known, values in list(newer._before.values()):
            if (instance := known()) is not None:
                self.note(instance, values)

    def restore(self) -> None:
        """Restore the former values of the attributes, and call `_dlock_restored()` of each instance that has it."""
        for known, values in list(self._before.values()):
            if (instance := known()) is not None:
                vars(instance).update(values)
                for name in [name for name, value in values.items() if value is ABSENT]:
                    del vars(instance)[name]
                if (restored := getattr(instance, "_dlock_restored", None)) is not None:
                    restored()


@dataclass(eq=False, slots=True)
class Transaction:
    """One outermost transaction of the program, and the calls before its COMMIT and after its end."""

    anchor: str | None
    """The savepoint that stands for it inside a test case's own transaction."""
    is_manual: bool
    """Whether it was begun by turning autocommit off."""
    outcome: Outcome = Outcome.ROLLED_BACK
    """The outcome if it ends by anything but a successful COMMIT."""
    has_spoken: bool = False
    """Whether a statement was sent in it, which may have taken its snapshot."""
    is_unanswered: bool = False
    """Whether a statement has failed, or was interrupted, and a possible rollback was not checked yet."""
    is_begun_anew: bool = False
    """Whether the database has rolled it back with a failed statement, and treats what follows as a new one."""
    may_be_undone: bool = True
    """Whether the latest statement can have rolled back work: on SQLite not if the driver had not sent BEGIN."""
    is_partly_committed: bool = False
    """Whether SQLite or MySQL has committed work of it, with a statement after which it goes on."""
    has_written: bool = False
    """Whether a statement may have written on MySQL or MariaDB, as far as an attempt follows it."""
    implicit_commits: ImplicitCommits | None = None
    """What SQLite commits in it without a COMMIT, if it can: without autocommit."""
    comment: str = ""
    """The SQL comment before each of its statements."""
    passed: set[object] = field(default_factory=set)
    """The leases that it is tied to and that are admitted: they need not check statements that only move data."""
    settlers: list[Callable[[Outcome], object]] = field(default_factory=list)
    """Each is called exactly once as `settle(outcome)`, the last first, as soon as it is known how it has ended.

    After COMMIT, this happens before Django's on_commit functions. The connection is free for new transactions. An
    error of a settler is logged and not propagated, except KeyboardInterrupt, which is raised at the end. UNKNOWN: the
    connection was lost, or an interrupt came, during COMMIT.
    """
    checks: list[Step] = field(default_factory=list)
    """Each is called just before COMMIT, the first one first; its error is propagated, after a ROLLBACK."""
    undo: list[Step | AttributeValues | str] = field(default_factory=list)
    """The steps to call, last first, if the work done so far is undone, with the names of savepoints in between.

    Work is undone by a rollback of the transaction or to an earlier savepoint. If the outcome of COMMIT is unknown,
    only attributes are restored: a version that is too old is refused later, and one that was never committed is not.
    An error of a step is logged. No step is removed before its call, so that it can be repeated after an interrupt.
    """
    driver: object = None
    """The driver's connection that it runs on, if that was open when it began."""
    pending: deque[Step] | None = None
    """See `pending_steps`; None until the first call."""

    def restore_on_rollback(self, instance: object, values: dict[str, object]) -> None:
        """See `connections.restore_on_rollback`."""
        newest = self.undo[-1] if self.undo else None
        if not isinstance(newest, AttributeValues):
            self.undo.append(newest := AttributeValues())
        newest.note(instance, values)

    def undo_to(self, savepoint: str | None) -> None:
        """Call the steps that came after a savepoint, last first, and remove them.

        A savepoint that is not in the list is older than all of it.
        """
        begin = end = len(self.undo)
        while begin > 0 and self.undo[begin - 1] != savepoint:
            begin -= 1
        steps = deque(_steps(self.undo[begin:end]))
        try:
            call_all(steps)
        finally:
            if not steps:
                del self.undo[begin:end]

    def pending_steps(self) -> deque[Step]:
        """Return the steps that are still to be called, now that it has ended; `call_all` removes called ones."""
        if self.pending is None:
            steps: deque[Step] = deque()
            if self.outcome is not Outcome.COMMITTED:
                is_known = self.outcome is Outcome.ROLLED_BACK
                steps.extend(_steps(each for each in self.undo if is_known or isinstance(each, AttributeValues)))
            is_kept = self.is_partly_committed and self.outcome is Outcome.ROLLED_BACK
            outcome = Outcome.COMMITTED if is_kept else self.outcome  # otherwise an attempt would be repeated
            steps.extend(partial(settle, outcome) for settle in reversed(self.settlers))
            self.pending = steps
        return self.pending

    def note_release(self, savepoint: str | None) -> None:
        """Remove a released savepoint, and those after it; the steps after it now belong to the outer block.

        A savepoint that is not in the list is older than all of it.
        """
        index = next((n for n in range(len(self.undo) - 1, -1, -1) if self.undo[n] == savepoint), 0)
        merged = self.undo[:index]
        for each in self.undo[index:]:
            before = merged[-1] if merged else None
            if isinstance(each, AttributeValues) and isinstance(before, AttributeValues):
                before.take_over(each)
            elif not isinstance(each, str):
                merged.append(each)
        self.undo[:] = merged

    def note_savepoints(self, sql: str, *, is_certain: bool = True) -> None:
        """Record the savepoints that a statement has created or ended, as programs may do by hand.

        A name that is not known, or cannot be parsed, is older than all recorded steps: rather too much is undone, and
        a version that is too old is refused later, than too little. So none is recorded unless it is certain that the
        statement was executed, and exactly once.
        """
        for verb, name in savepoint_changes(sql):
            if verb == "ROLLBACK":
                self.undo_to(name)
            elif verb == "RELEASE":
                self.note_release(name if is_certain else None)
            elif name is not None and is_certain:
                self.undo.append(name)

    def note_statement(self, connection: BaseDatabaseWrapper, *, is_commit: bool) -> None:
        """Record, before a statement is sent to SQLite, whether it can roll back work."""
        driver = connection.connection
        self.may_be_undone = driver is None or (driver.in_transaction and not is_commit)

    def note_committed(self, *, has_written: bool) -> None:
        """Record that its work so far was committed, although it goes on: nothing of that can be undone any more.

        What follows is in another transaction of the database, into which the leases are to be admitted.
        """
        self.is_partly_committed |= has_written
        self.undo.clear()
        self.passed.clear()

    def note_failure(self, connection: BaseDatabaseWrapper, error: BaseException, sql: str = "") -> None:
        """Undo all work if the database has rolled it back with a failed statement, and has begun a new transaction.

        `sql` is the statement if it may end savepoints; after an interrupt it may have been executed.
        """
        if not isinstance(error, Error):  # it may have replaced one
            self.note_savepoints(sql, is_certain=False)
            return
        if self.may_be_undone and (self.undo or self.settlers) and _has_rolled_back(connection, error):
            self.is_begun_anew = True
            self._note_rolled_back(connection)
        self.is_unanswered = False

    def note_failed_commit(self, error: BaseException, connection: Any, *, was_lost: bool) -> bool:
        """Record the outcome that an error of COMMIT means; return whether it has ended and Django rolls nothing back.

        `atomic()` rolls back after such an error, `commit()` does not. The transaction stays open if SQLite has refused
        its COMMIT, which can be repeated, or if a driver has not sent it.
        """
        if not isinstance(error, Error):  # an interrupt
            return False
        is_refused = was_lost or isinstance(error, ProgrammingError) or is_refusal(error)
        self.outcome = Outcome.ROLLED_BACK if is_refused else Outcome.UNKNOWN
        return self.is_manual and _has_ended(connection, error)

    def make_up(self, connection: BaseDatabaseWrapper) -> None:
        """Repeat a `note_failure` that an interrupt has prevented, before the next statement or COMMIT is sent."""
        if self.may_be_undone and _may_be_idle(connection):
            self._note_rolled_back(connection)
        self.passed.clear()  # MySQL cannot report it; it is safe to admit a token twice
        self.is_unanswered = False

    def _note_rolled_back(self, connection: BaseDatabaseWrapper) -> None:
        if connection.vendor == "sqlite" and connection.in_atomic_block:
            connection.needs_rollback = True  # otherwise each statement would now commit by itself
        self.undo_to(None)


def _has_rolled_back(connection: Any, error: Exception) -> bool:
    """Return whether a failed statement has rolled back the whole transaction; queries MariaDB or MySQL if needed."""
    if connection.vendor == "sqlite":
        return not connection.connection.in_transaction
    trouble = failure_of_statement(error) if connection.vendor == "mysql" else None
    if trouble not in MAY_ROLL_BACK or trouble is DatabaseFailure.DEADLOCK:
        return trouble is DatabaseFailure.DEADLOCK
    question = "NOT @@in_transaction" if connection.mysql_is_mariadb else "@@innodb_rollback_on_timeout"
    try:
        with connection.connection.cursor() as cursor:  # the driver's: nobody else is to hear of it
            cursor.execute(f"SELECT {question}")
            return bool(cursor.fetchone()[0])
    except connection.Database.Error:
        return True  # it is safe to admit a token twice


def _has_ended(connection: Any, error: Error) -> bool:
    """Return whether a transaction has ended with an error of COMMIT."""
    if connection.vendor == "mysql":
        # These roll back a transaction whose COMMIT they refuse. Their client has results to read before it sends it.
        return not isinstance(error, ProgrammingError)
    return _may_be_idle(connection)


def is_idle(connection: Any) -> bool:
    """Return whether a connection is not in a transaction, although Django began one; only MariaDB is queried."""
    if connection.connection is None:
        return False
    if connection.vendor == "sqlite":
        return not connection.connection.in_transaction
    if connection.vendor == "postgresql":
        return transaction_status(connection.connection) == IDLE
    if not getattr(connection, "mysql_is_mariadb", False):
        return False
    with connection.connection.cursor() as cursor:  # the driver's: nobody else is to hear of it
        cursor.execute("SELECT NOT @@in_transaction")
        return bool(cursor.fetchone()[0])


def _may_be_idle(connection: Any) -> bool:
    try:
        return is_idle(connection)
    except connection.Database.Error:
        return True


def _steps(undone: Iterable[Step | AttributeValues | str]) -> Iterator[Step]:
    """Yield what is to be called if this work is undone, last first."""
    for each in reversed(tuple(undone)):
        if isinstance(each, AttributeValues):
            yield each.restore
        elif not isinstance(each, str):
            yield each


def is_undone(connection: Any) -> bool:
    """Return whether PostgreSQL has undone the transaction after an error: it then treats COMMIT as a ROLLBACK.

    No driver raises an error for that.
    """
    return connection.vendor == "postgresql" and transaction_status(connection.connection) == IN_ERROR


def text_of(sql: Any, connection: BaseDatabaseWrapper) -> str:
    """Return a statement as text: psycopg and psycopg2 also take bytes and composed objects of their own."""
    if isinstance(sql, bytes):
        return sql.decode(errors="replace")
    return str(sql.as_string(connection.connection) if hasattr(sql, "as_string") else sql)
