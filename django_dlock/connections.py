"""Follows the transactions of one database connection, from the calls that Django makes to end them.

The calls are intercepted on the one connection object of this thread, never on Django's classes.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from weakref import ref

from django.db import DatabaseError, Error, ProgrammingError
from django.db.transaction import TransactionManagementError

from dlock_core.sql.driver_errors import MAY_ROLL_BACK, Trouble, classify, is_refusal, warn_unless_known
from dlock_core.transactions.tie import Outcome, call_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["ABSENT", "Memory", "Transaction", "Watch", "watch"]

if TYPE_CHECKING:
    Step: TypeAlias = Callable[[], object]


_SAVEPOINT: Final = re.compile(
    r"\b(?:(ROLLBACK)(?:\s+(?:WORK|TRANSACTION))?\s+TO(?:\s+SAVEPOINT)?|(RELEASE)(?:\s+SAVEPOINT)?|SAVEPOINT)\s+[\"`]?(\w+)",
    re.IGNORECASE,
)

ABSENT: Final = object()
"""Stands for the value of an attribute that was not there."""


class Memory:
    """What attributes of instances were before they were written; it forgets instances that nobody has any more."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[ref[Any], dict[str, object]]] = {}

    def note(self, instance: object, values: dict[str, object]) -> None:
        """Remember values, unless older ones of the same attributes are remembered."""
        key, before = id(instance), self._before
        if key not in before:
            before[key] = ref(instance, lambda _: before.pop(key, None)), {}
        before[key][1].update({name: value for name, value in values.items() if name not in before[key][1]})

    def take_over(self, newer: Memory) -> None:
        """Remember what another one does, which came after this one."""
        for known, values in list(newer._before.values()):
            if (instance := known()) is not None:
                self.note(instance, values)

    def __call__(self) -> None:
        for known, values in list(self._before.values()):
            if (instance := known()) is not None:
                vars(instance).update(values)
                for name in [name for name, value in values.items() if value is ABSENT]:
                    del vars(instance)[name]


logger = logging.getLogger("dlock")


@dataclass(eq=False, slots=True)
class Transaction:
    """One outermost transaction of the user's and who wants to hear of its end."""

    anchor: str | None
    """The savepoint that stands for it inside a test case's own transaction."""
    is_manual: bool
    outcome: Outcome = Outcome.ROLLED_BACK
    """What has happened if it ends by anything but a successful COMMIT."""
    has_spoken: bool = False
    """A statement was sent in it, which may have taken its snapshot."""
    comment: str = ""
    """Stands before each of its statements."""
    settlers: list[Callable[[Outcome], None]] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)
    undo: list[Callable[[], None] | str] = field(default_factory=list)
    """What to restore, and in between the savepoints, in the order they came."""
    driver: object = None
    """The driver's connection that it is on, if that was open when it began."""
    pending: deque[Step] | None = None
    """What is to be called still, now that it has ended."""

    def on_end(self, settle: Callable[[Outcome], None], before_commit: Callable[[], None] | None = None) -> None:
        """See `transactions.on_end`."""
        self.settlers.append(settle)
        if before_commit is not None:
            self.checks.append(before_commit)

    def undo_to(self, savepoint: str | None) -> list[Step]:
        """Take back what came after a savepoint, last first; one that is not in the list is older than all of it."""
        steps: list[Step] = []
        while self.undo and self.undo[-1] != savepoint:
            step = self.undo.pop()
            if not isinstance(step, str):
                steps.append(step)
        return steps

    def forget(self, savepoint: str) -> None:
        """Forget a savepoint that was released; what came after it is the outer block's now."""
        place = next((n for n in range(len(self.undo) - 1, -1, -1) if self.undo[n] == savepoint), None)
        if place is None:
            return
        del self.undo[place]
        older, newer = self.undo[place - 1 : place], self.undo[place : place + 1]
        if older and newer and isinstance(older[0], Memory) and isinstance(newer[0], Memory):
            older[0].take_over(newer[0])
            del self.undo[place]

    def heard(self, sql: str) -> None:
        """Hear of a statement that was carried out: savepoints may be made and ended by hand.

        A name that is not known is older than all there is to undo; words in a literal do no harm, either.
        """
        for rollback, release, written in _SAVEPOINT.findall(sql) if self.undo else ():
            name = written.lower()
            if rollback:
                call_all(self.undo_to(name))
            elif release:
                self.forget(name)
            else:
                self.undo.append(name)

    def failed(self, connection: BaseDatabaseWrapper, error: Exception) -> None:
        """Hear of a statement that has failed: the database may have rolled back everything, and goes on."""
        if (self.undo or self.settlers) and _has_rolled_back(connection, error):
            if connection.vendor == "sqlite" and connection.in_atomic_block:
                connection.needs_rollback = True  # otherwise each statement would now commit on its own
            call_all(self.undo_to(None))

    def steps(self) -> deque[Step]:
        """What is to be called still, now that it has ended; a step that was called is taken out."""
        if self.pending is None:
            undone = self.undo_to(None) if self.outcome is Outcome.ROLLED_BACK else []
            self.pending = deque(undone + [partial(settle, self.outcome) for settle in reversed(self.settlers)])
        return self.pending


class _NoSavepoint(str):
    """Put where Django has None, for a block with savepoint=False: we hear of its end, the database does not."""

    __slots__ = ()


_INTERCEPTED: Final = (
    "_commit",
    "_rollback",
    "_close",
    "_set_autocommit",
    "savepoint",
    "savepoint_commit",
    "savepoint_rollback",
)


class Watch:
    """What we know of one connection, and its methods that we have put ours before."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection: Any = connection
        database: Any = connection
        warn_unless_known(database.Database.__name__)
        self.current: Transaction | None = None
        self.django = SimpleNamespace(**{name: getattr(connection, name) for name in _INTERCEPTED})
        vars(connection).update({name: getattr(self, name) for name in _INTERCEPTED}, _dlock_watch=self)

    def is_open(self) -> bool:
        """A transaction of the user's is open, from its first statement until its COMMIT or ROLLBACK is done."""
        return self.current is not None or _is_open(self.connection)

    def transaction(self) -> Transaction | None:
        """The user's open transaction; it has an identity from the first time it is asked for."""
        if self.current is not None and self.current.driver not in (None, self.connection.connection):
            self._settle(self.current)  # its connection has gone past us
        if self.current is None and _is_open(self.connection):
            is_manual = not (self.connection.in_atomic_block and self.connection.commit_on_exit)
            self.current = Transaction(_anchor(self.connection), is_manual, driver=self.connection.connection)
        return self.current

    def _commit(self) -> None:
        if self.current is None:
            self.django._commit()
        else:
            self._finish(self.current, self.django._commit)

    def _set_autocommit(self, autocommit: bool) -> None:  # noqa: FBT001 - Django's form
        """Turn it on or off; where it is turned on, SQLite and MariaDB commit what is open."""
        ending = self.current if autocommit else None
        if ending is None:
            self.django._set_autocommit(autocommit)
        elif ending.is_manual:
            self._finish(ending, partial(self.django._set_autocommit, autocommit))
        else:  # an interrupt has kept atomic() from ending it
            self._roll_back(ending)
            self.django._set_autocommit(autocommit)

    def _finish(self, ending: Transaction, commit: Callable[[], None]) -> None:
        was_lost = getattr(self.connection.connection, "closed", False)
        try:
            for check in ending.checks:
                check()
            if self.current is not ending:
                raise TransactionManagementError("The transaction was ended by a check that ran before its COMMIT.")
            ending.outcome = Outcome.UNKNOWN
            commit()
            ending.outcome = Outcome.COMMITTED
            if ending.anchor is None:
                # Django sets it next; now, so that its hooks run even if a settler is interrupted.
                self.connection.run_commit_hooks_on_set_autocommit_on = True
            self._settle(ending)
        except BaseException as error:
            self._break_off(ending, error, was_lost=was_lost)
            raise

    def _break_off(self, ending: Transaction, error: BaseException, *, was_lost: bool) -> None:
        """Come to an end after an error or interrupt, wherever it came."""
        if ending.outcome is Outcome.COMMITTED:
            self._settle(ending)
        elif ending.outcome is Outcome.UNKNOWN and isinstance(error, DatabaseError):
            if was_lost or isinstance(error, ProgrammingError) or is_refusal(error):
                ending.outcome = Outcome.ROLLED_BACK  # Django rolls back
        else:
            self._roll_back(ending)

    def _roll_back(self, ending: Transaction) -> None:
        """Do what Django does only after a DatabaseError: otherwise it turns autocommit on, and that can commit."""
        with suppress(Error):
            if ending.anchor is None:
                self.connection.rollback()
            else:
                self.connection.savepoint_rollback(ending.anchor)

    def _rollback(self) -> None:
        ending = self.current
        try:
            self._roll_back_or_close(ending)
            self._settle(ending)
        except BaseException:
            self._settle(ending)  # again, or for the first time: an interrupt may come anywhere
            raise

    def _roll_back_or_close(self, ending: Transaction | None) -> None:
        try:
            self.django._rollback()
        except BaseException:
            if ending is not None:
                with suppress(Error):
                    self.connection.close()
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
        # Django says so next; now, because settlers may ask.
        self.connection.closed_in_transaction = self.connection.in_atomic_block
        if ending is not None:
            self._forget(ending)
            call_all(ending.steps())

    def savepoint(self) -> str | None:
        sid: str | None = self.django.savepoint()
        if sid is not None and self.current is not None and self.current.undo and self.current.undo[-1] != sid:
            self.current.undo.append(sid)  # past the statement that we hear: a test case's, or none was sent
        return sid

    def savepoint_commit(self, sid: str) -> None:
        if self.current is not None and sid == self.current.anchor:
            self._finish(self.current, partial(self._release, sid))
        else:
            self._release(sid)

    def _release(self, sid: str) -> None:
        if not isinstance(sid, _NoSavepoint):
            self.django.savepoint_commit(sid)
        if self.current is not None:
            self.current.forget(sid)

    def savepoint_rollback(self, sid: str) -> None:
        ending = self.current if self.current is not None and sid == self.current.anchor else None
        try:
            if isinstance(sid, _NoSavepoint):
                self.connection.needs_rollback = True
            else:
                self.django.savepoint_rollback(sid)
            self._settle(ending)
        except BaseException:
            self._settle(ending)
            raise
        finally:
            if ending is None and self.current is not None:
                call_all(self.current.undo_to(sid))

    def _forget(self, ending: Transaction) -> None:
        if self.current is ending:
            self.current = None

    def _settle(self, ending: Transaction | None) -> None:
        """Call whoever wants to hear that it has ended; again, for those whom an interrupt has kept from hearing."""
        if ending is None:
            return
        self._forget(ending)
        try:
            if steps := ending.steps():
                _call_between_transactions(self.connection, steps, is_manual=ending.is_manual)
        except Error:  # Django would roll back, and forget the on_commit functions of a COMMIT that was carried out
            logger.exception("dlock: a callback at the end of a transaction failed")


def watch(connection: BaseDatabaseWrapper) -> Watch:
    """The watch over a connection, set up when first asked for."""
    return vars(connection).get("_dlock_watch") or Watch(connection)


def _is_open(connection: BaseDatabaseWrapper) -> bool:
    """What Django knows; a test case's own blocks, always the outermost ones, do not count."""
    blocks: list[Any] = connection.atomic_blocks
    if blocks:
        return not blocks[-1]._from_testcase and not connection.closed_in_transaction
    if connection.connection is None:
        return not connection.settings_dict["AUTOCOMMIT"]
    return not connection.autocommit


def _anchor(connection: BaseDatabaseWrapper) -> str | None:
    blocks: list[Any] = connection.atomic_blocks
    savepoints = connection.savepoint_ids
    first = next((n for n, block in enumerate(blocks) if not block._from_testcase), 0)
    if first == 0:
        return None
    place = first - (len(blocks) - len(savepoints))
    savepoints[place] = savepoints[place] or _NoSavepoint("none")
    return savepoints[place]


def _has_rolled_back(connection: Any, error: Exception) -> bool:
    """Return whether a failed statement has taken the whole transaction along; asks MariaDB or MySQL where it must."""
    if connection.vendor == "sqlite":
        return not connection.connection.in_transaction
    trouble = classify(error) if connection.vendor == "mysql" else None
    if trouble not in MAY_ROLL_BACK or trouble is Trouble.DEADLOCK:
        return trouble is Trouble.DEADLOCK
    question = "NOT @@in_transaction" if connection.mysql_is_mariadb else "@@innodb_rollback_on_timeout"
    try:
        with connection.connection.cursor() as cursor:  # the driver's: nobody else is to hear of it
            cursor.execute(f"SELECT {question}")
            return bool(cursor.fetchone()[0])
    except connection.Database.Error:
        return True  # it is safe to admit a token twice


def _call_between_transactions(connection: BaseDatabaseWrapper, steps: deque[Step], *, is_manual: bool) -> None:
    """Call them where they may use the connection like any code after the transaction; Django's hooks wait."""
    if connection.connection is None or connection.in_atomic_block:
        call_all(steps)
        return
    hooks = connection.run_on_commit, connection.run_commit_hooks_on_set_autocommit_on
    try:
        connection.run_on_commit, connection.run_commit_hooks_on_set_autocommit_on = [], False
        _turn_autocommit(connection, on=True)
        call_all(steps)
    finally:
        if is_manual:
            _turn_autocommit(connection, on=False)
        connection.run_on_commit, connection.run_commit_hooks_on_set_autocommit_on = hooks


def _turn_autocommit(connection: BaseDatabaseWrapper, *, on: bool) -> None:
    with suppress(Error):
        connection.set_autocommit(on)


if TYPE_CHECKING:
    Hook: TypeAlias = Callable[[BaseDatabaseWrapper, str, bool], None]


# After an error PostgreSQL accepts nothing before the rollback to a savepoint.
_DJANGOS_OWN: Final = ("BEGIN", "RELEASE SAVEPOINT", "ROLLBACK TO SAVEPOINT")
_WITHOUT_SNAPSHOT: Final = (*_DJANGOS_OWN, "SAVEPOINT", "SHOW ", "SET ")


class Announcer:
    """The execute wrapper of one connection; hooks never hear of each other's statements or their own."""

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.quietly = _Quietly()
        """A block in which no hook is called."""

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, *rest: Any) -> Any:
        """Stand in for Django's execute(sql, params, many, context)."""
        connection, text = rest[1]["connection"], text_of(sql)
        transaction = watch(connection).transaction()
        if not self.quietly.depth:
            self.announce(connection, text, inside=transaction is not None)
        if transaction is not None and self._may_take_snapshot(text):
            transaction.has_spoken = True
        if transaction is not None and transaction.comment and isinstance(sql, str) and not rest[0]:
            sql = transaction.comment + sql  # not of many: drivers read how those begin
        try:
            answer = execute(sql, params, *rest)
        except Exception as error:
            if transaction is not None:
                transaction.failed(connection, error)
            raise
        if transaction is not None:
            transaction.heard(text)
        return answer

    def announce(self, connection: BaseDatabaseWrapper, sql: str, *, inside: bool) -> None:
        is_djangos = sql.startswith(_DJANGOS_OWN) and ";" not in sql and not (inside and sql.startswith("BEGIN"))
        if is_djangos or (sql.startswith("SAVEPOINT") and not inside):
            return
        with self.quietly:
            for hook in self.hooks:
                hook(connection, sql, inside)

    def _may_take_snapshot(self, sql: str) -> bool:
        if sql.startswith("SET STATEMENT"):  # MariaDB: a statement of any kind
            return not self.quietly.depth  # ours locks a row, which takes no snapshot there
        return not sql.startswith(_WITHOUT_SNAPSHOT)

    def tell(self, hook: Hook) -> None:
        """Have a hook called before every statement from now on; asking again changes nothing."""
        if hook not in self.hooks:
            self.hooks.append(hook)


class _Quietly:
    """Blocks inside of each other, all of one thread: the connection's."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


def announcer(connection: BaseDatabaseWrapper) -> Announcer:
    """The announcer of a connection, set up when first asked for."""
    for wrapper in connection.execute_wrappers:
        if isinstance(wrapper, Announcer):
            return wrapper
    new = Announcer()
    if (transaction := watch(connection).transaction()) is not None:
        transaction.has_spoken = True  # before we listened
    # Not at the end: execute_wrapper() takes away whatever is last when its block is left.
    connection.execute_wrappers.insert(0, new)
    return new


def text_of(sql: Any) -> str:
    """The statement as text: psycopg also takes bytes and its own composed objects."""
    if isinstance(sql, bytes):
        return sql.decode(errors="replace")
    return str(sql.as_string(None) if hasattr(sql, "as_string") else sql)
