"""Follows the database transaction of one Connection to its end, from the calls that SQLAlchemy makes to end it.

The calls are intercepted on the one Connection object, from when somebody asks until the transaction has ended.
SQLAlchemy's own events come before COMMIT and ROLLBACK, and say nothing of how they went.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Protocol

from dlock_core.callbacks import call_all
from dlock_core.commit_errors import is_refusal
from dlock_core.tie import Outcome
from sqla_dlock.commit_status import outcome_of
from sqla_dlock.statements import Gate

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

__all__ = ["Member", "Watch", "watch", "watch_of"]

_INTERCEPTED: Final = (
    "_commit_impl",
    "_rollback_impl",
    "_rollback_to_savepoint_impl",
    "_prepare_twophase_impl",
    "_commit_twophase_impl",
    "_rollback_twophase_impl",
)


class Member(Protocol):
    """A session's transaction that takes part in the database transaction."""

    def check(self) -> None:
        """Hear that COMMIT is next; what it raises prevents it."""

    def ended(self, connection: Connection, outcome: Outcome, *, failed: bool) -> None:
        """Hear how the connection's transaction has ended; `failed`: by an error of ROLLBACK."""


class Watch:
    """What we know of one Connection's transaction."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.gate = Gate(connection)
        self.members: list[Member] = []
        self.xid: str | None = None
        self.undo: list[tuple[set[str], Callable[[], None]]] = []
        """What to call when one of these savepoints is rolled back."""
        self._is_in_doubt = False
        self.sqlalchemy = SimpleNamespace(**{name: getattr(connection, name) for name in _INTERCEPTED})
        vars(connection).update({name: getattr(self, name) for name in _INTERCEPTED}, _dlock_watch=self)

    def _commit_impl(self) -> None:
        self._finish(self.sqlalchemy._commit_impl)

    def _finish(self, commit: Callable[[], None]) -> None:
        outcome = Outcome.ROLLED_BACK
        try:
            self._check()
            if self._is_in_doubt or _is_alive(self.connection):
                outcome = Outcome.UNKNOWN
            commit()
            outcome = Outcome.COMMITTED
        except BaseException as error:
            self._clean_up()
            if outcome is Outcome.UNKNOWN:
                outcome = self._judge(error)
            raise
        finally:
            self._end(outcome)

    def _check(self) -> None:
        self.gate.open()
        for member in self.members:
            member.check()

    def _clean_up(self) -> None:
        """Roll back what a failed COMMIT may leave open: SQLAlchemy does not, not even for its pool."""
        if not self._is_in_doubt:
            with suppress(Exception):
                self.sqlalchemy._rollback_impl()

    def _judge(self, error: BaseException) -> Outcome:
        if self._is_in_doubt:
            return Outcome.UNKNOWN  # still prepared, or committed
        return Outcome.ROLLED_BACK if is_refusal(error) else outcome_of(self.connection.engine, self.xid)

    def _rollback_impl(self) -> None:
        self._roll_back(self.sqlalchemy._rollback_impl)

    def _roll_back(self, rollback: Callable[[], None]) -> None:
        is_left = self._is_in_doubt and not _is_alive(self.connection)  # a prepared transaction outlives its connection
        self.gate.close()
        try:
            rollback()
        except BaseException:
            self._end(Outcome.UNKNOWN if self._is_in_doubt else Outcome.ROLLED_BACK, failed=True)
            raise
        self._end(Outcome.UNKNOWN if is_left else Outcome.ROLLED_BACK)

    def _rollback_to_savepoint_impl(self, name: str) -> None:
        self.sqlalchemy._rollback_to_savepoint_impl(name)
        self.gate.undone()
        undone = [each for each in self.undo if name in each[0]]
        self.undo = [each for each in self.undo if each not in undone]
        call_all([restore for _, restore in undone])

    def _prepare_twophase_impl(self, xid: Any) -> None:
        self._check()
        self._is_in_doubt = _is_alive(self.connection)
        try:
            self.sqlalchemy._prepare_twophase_impl(xid)
        except BaseException as error:
            self._is_in_doubt &= not is_refusal(error)
            raise

    def _commit_twophase_impl(self, xid: Any, is_prepared: bool) -> None:  # noqa: FBT001 - SQLAlchemy's form
        self._finish(partial(self.sqlalchemy._commit_twophase_impl, xid, is_prepared))

    def _rollback_twophase_impl(self, xid: Any, is_prepared: bool) -> None:  # noqa: FBT001 - SQLAlchemy's form
        self._roll_back(partial(self.sqlalchemy._rollback_twophase_impl, xid, is_prepared))

    def _end(self, outcome: Outcome, *, failed: bool = False) -> None:
        for name in (*_INTERCEPTED, "_dlock_watch"):
            vars(self.connection).pop(name, None)
        self.gate.end()
        members, self.members = self.members, []
        for member in members:
            member.ended(self.connection, outcome, failed=failed)


def watch(connection: Connection) -> Watch:
    """The watch over a Connection's transaction, set up when first asked for."""
    return watch_of(connection) or Watch(connection)


def watch_of(connection: Connection) -> Watch | None:
    """The watch over a Connection's transaction, if there is one."""
    found: Watch | None = vars(connection).get("_dlock_watch")
    return found


def _is_alive(connection: Connection) -> bool:
    """As far as SQLAlchemy knows."""
    return not (connection.closed or connection.invalidated)
