"""Follows the transactions of one database connection, from the calls that Django makes to end them.

The calls are intercepted on the one connection object of this thread, never on Django's classes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from django.db import DatabaseError, Error
from django.db.transaction import TransactionManagementError

from dlock_core.callbacks import call_all
from dlock_core.commit_errors import is_refusal
from dlock_core.tie import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.base.base import BaseDatabaseWrapper

    Step: TypeAlias = Callable[[], object]

__all__ = ["Transaction", "Watch", "watch"]


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

    def steps(self) -> list[Step]:
        """What is to be called now that it has ended."""
        undone = self.undo_to(None) if self.outcome is Outcome.ROLLED_BACK else []
        return undone + [partial(settle, self.outcome) for settle in reversed(self.settlers)]


class _NoSavepoint(str):
    """Put where Django has None, for a block with savepoint=False: we hear of its end, the database does not."""

    __slots__ = ()


class Watch:
    """What we know of one connection, and its methods that we have put ours before."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection: Any = connection
        self.current: Transaction | None = None
        names = ("_commit", "_rollback", "_close", "savepoint", "savepoint_commit", "savepoint_rollback")
        self.django = SimpleNamespace(**{name: getattr(connection, name) for name in names})
        vars(connection).update({name: getattr(self, name) for name in names}, _dlock_watch=self)

    def is_open(self) -> bool:
        """A transaction of the user's is open, from its first statement until its COMMIT or ROLLBACK is done."""
        return self.current is not None or _is_open(self.connection)

    def transaction(self) -> Transaction | None:
        """The user's open transaction; it has an identity from the first time it is asked for."""
        if self.current is None and _is_open(self.connection):
            is_manual = not (self.connection.in_atomic_block and self.connection.commit_on_exit)
            self.current = Transaction(_anchor(self.connection), is_manual)
        return self.current

    def _commit(self) -> None:
        if self.current is None:
            self.django._commit()
        else:
            self._finish(self.current, self.django._commit)

    def _finish(self, ending: Transaction, commit: Callable[[], None]) -> None:
        self._check(ending)
        was_lost = getattr(self.connection.connection, "closed", False)
        ending.outcome = Outcome.UNKNOWN
        try:
            commit()
        except DatabaseError as error:
            if was_lost or is_refusal(error):
                ending.outcome = Outcome.ROLLED_BACK
            raise  # Django rolls back
        except BaseException:
            self._roll_back(ending)
            raise
        ending.outcome = Outcome.COMMITTED
        if ending.anchor is None:
            # Django sets it next; now, so that its hooks run even if a settler is interrupted.
            self.connection.run_commit_hooks_on_set_autocommit_on = True
        self._settle(self._take())

    def _check(self, ending: Transaction) -> None:
        try:
            for check in ending.checks:
                check()
            if self.current is not ending:
                raise TransactionManagementError("The transaction was ended by a check that ran before its COMMIT.")
        except BaseException:
            self._roll_back(ending)
            raise

    def _roll_back(self, ending: Transaction) -> None:
        """Do what Django does only after a DatabaseError: otherwise it turns autocommit on, and that can commit."""
        with suppress(Error):
            if ending.anchor is None:
                self.connection.rollback()
            else:
                self.connection.savepoint_rollback(ending.anchor)

    def _rollback(self) -> None:
        ending = self._take()
        try:
            self.django._rollback()
        except BaseException:
            if ending is not None:
                with suppress(Error):
                    self.connection.close()
            raise
        finally:
            self._settle(ending)

    def _close(self) -> None:
        ending = self._take()
        try:
            self.django._close()
        finally:
            # Django says so next; now, because settlers may ask.
            self.connection.closed_in_transaction = self.connection.in_atomic_block
            if ending is not None:
                call_all(ending.steps())

    def savepoint(self) -> str | None:
        sid: str | None = self.django.savepoint()
        if sid is not None and self.current is not None and self.current.undo:
            self.current.undo.append(sid)
        return sid

    def savepoint_commit(self, sid: str) -> None:
        if self.current is not None and sid == self.current.anchor:
            self._finish(self.current, partial(self._release, sid))
        else:
            self._release(sid)

    def _release(self, sid: str) -> None:
        if not isinstance(sid, _NoSavepoint):
            self.django.savepoint_commit(sid)

    def savepoint_rollback(self, sid: str) -> None:
        ending = self._take() if self.current is not None and sid == self.current.anchor else None
        try:
            if isinstance(sid, _NoSavepoint):
                self.connection.needs_rollback = True
            else:
                self.django.savepoint_rollback(sid)
        finally:
            self._settle(ending)
        if self.current is not None:
            call_all(self.current.undo_to(sid))

    def _take(self) -> Transaction | None:
        ending, self.current = self.current, None
        return ending

    def _settle(self, ending: Transaction | None) -> None:
        if ending is not None and (steps := ending.steps()):
            _call_between_transactions(self.connection, steps, is_manual=ending.is_manual)


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


def _call_between_transactions(connection: BaseDatabaseWrapper, steps: list[Step], *, is_manual: bool) -> None:
    """Call them where they may use the connection like any code after the transaction; Django's hooks wait."""
    if connection.connection is None or connection.in_atomic_block:
        call_all(steps)
        return
    hooks = connection.run_on_commit, connection.run_commit_hooks_on_set_autocommit_on
    connection.run_on_commit, connection.run_commit_hooks_on_set_autocommit_on = [], False
    before, after = partial(_turn_autocommit, "on", connection), partial(_turn_autocommit, "off", connection)
    try:
        call_all([before, *steps, after] if is_manual else [before, *steps])
    finally:
        connection.run_on_commit, connection.run_commit_hooks_on_set_autocommit_on = hooks


def _turn_autocommit(to: Literal["on", "off"], connection: BaseDatabaseWrapper) -> None:
    with suppress(Error):
        connection.set_autocommit(to == "on")
