"""The fence: a row per lock in the application's database that refuses old tokens, in the very transaction it protects.

admit: raise the row to (token, holder) before the first read, and let COMMIT depend on it under its row lock. Then
critical sections are serial in the order in which they were admitted, whatever happens to the lock service: wrong
clocks, pauses, lost data. (Model-checked; the idea of the token: Kleppmann 2016, "How to do distributed locking"; why
checking it when writing is not enough, and the proof: docs/explanation/fencing.md.)

Two forms. "transaction": the admit is a statement of the transaction and its row lock lasts to COMMIT. "lease": the row
is raised and committed right after the grant, and each transaction ends with `confirm`.

Shared leases leave a mark, `s_token`, greater than the token of every exclusive one that was admitted before them: an
exclusive admit or confirm needs a token greater than the mark. In the "transaction" form the first shared lease after
an exclusive one leaves the mark, and all of them hold the row's share lock; in the "lease" form each raises the mark to
its own token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from dlock_core.errors import DLockError, RowLocked, SnapshotTooOld, StaleToken
from dlock_core.leases import engine
from dlock_core.observability import hooks
from dlock_core.runtime import clock
from dlock_core.sql.driver_errors import DatabaseFailure, failure_of_statement
from dlock_core.sql.row_locks import MAX_TIMEOUT_S, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlock_core.leases.lease import LeaseRecord
    from dlock_core.runtime import DatabaseRuntime

__all__ = [
    "HIGHEST",
    "Fence",
    "FenceDialect",
    "FenceEntry",
    "FenceForm",
    "FenceGate",
    "StatementExecutor",
    "admit",
    "announce",
    "confirm",
    "is_yes",
    "params",
    "prepare",
]

FenceForm = Literal["transaction", "lease", False]

MAX_TRIES_TO_MARK: Final = 10
"""How often a shared lease checks for the mark, and writes it, before its transaction."""


class FenceEntry(NamedTuple):
    """What a lease presents to the fence; `limit` is the longest wait for a row lock, in seconds (None: forever).

    `found` is the exclusive token that the first admit of a shared lease found in the row; None before.
    """

    name: str
    token: int
    holder: str
    shared: bool = False
    limit: float | None = None
    found: int | None = None


class StatementExecutor(Protocol):
    """Sends one statement with `:name` parameters on the fence's connection."""

    def execute(self, sql: str, params: Mapping[str, Any]) -> tuple[int, tuple[Any, ...] | None]:
        """Return the number of changed rows, and the first row of the result if it has rows."""


@dataclass(frozen=True, slots=True)
class FenceDialect:
    """The statements of one database; a changed row, or a first column above 0, means that the lease was admitted.

    Where one statement is not enough there are several, of which the last one gives the answer.
    """

    admit: tuple[str, ...]
    share: str
    """Lock the row for share and return its exclusive token, if the mark is above that; no row otherwise."""
    is_marked: str
    """A plain read whether the mark is above the exclusive token; the first column is the answer."""
    mark: str
    """Raise the mark to our token, unless it is already above the exclusive token."""
    announce: tuple[str, ...]
    confirm: str
    confirm_shared: str
    analyze_anew: str | None = None
    """Causes prepared statements to be analyzed again, if they may refer to a table that is no longer the fence.

    In that case they admit nothing, so a refusal is accepted only after the statement was repeated.
    """


def admit(database: StatementExecutor, dialect: FenceDialect, entry: FenceEntry) -> int | None:
    """Admit a lease into the open transaction, before anything is read in it.

    Waits for an older holder's transaction at most `entry.limit` seconds; the database's lock timeout error is not
    caught. Returns the exclusive token that a shared lease has found, for its later admits. Raises StaleToken if a
    newer holder was admitted before.
    """
    if entry.shared:
        return _admit_shared(database, dialect, entry)
    if not _ask(database, dialect, dialect.admit, entry):
        raise _stale(database, entry)
    return None


def prepare(database: StatementExecutor, dialect: FenceDialect, entry: FenceEntry) -> None:
    """Write the mark of shared holders, if it is missing; each statement is a separate transaction.

    Errors are left to the admit, which meets them again. If many leases arrive at once, one of two that write a mark
    may be the victim of a deadlock: then the other one has written the same mark, or that of a neighbouring name.
    """
    for _ in range(MAX_TRIES_TO_MARK):
        _, row = database.execute(dialect.is_marked, params(entry))
        if row is not None and row[0]:
            return
        try:
            database.execute(dialect.mark, params(entry))
        except Exception as error:
            if failure_of_statement(error) not in (DatabaseFailure.DEADLOCK, DatabaseFailure.SERIALIZATION):
                raise
        else:
            return


def announce(database: StatementExecutor, dialect: FenceDialect, entry: FenceEntry) -> None:
    """Raise the row for a lease over several transactions, in a separate transaction; raises StaleToken."""
    if not _ask(database, dialect, dialect.announce if entry.shared else dialect.admit, entry):
        raise _stale(database, entry)


def confirm(database: StatementExecutor, dialect: FenceDialect, entry: FenceEntry) -> None:
    """Verify as the last statement before COMMIT that the row is still ours, and keep it locked; raises StaleToken."""
    if not _ask(database, dialect, (dialect.confirm_shared if entry.shared else dialect.confirm,), entry):
        raise _stale(database, entry)


def _admit_shared(database: StatementExecutor, dialect: FenceDialect, entry: FenceEntry) -> int:
    newest = _share_or_mark(database, dialect, entry)
    if newest is None and dialect.analyze_anew is not None:
        database.execute(dialect.analyze_anew, {})
        newest = _share_or_mark(database, dialect, entry)
    if newest is None or newest >= entry.token:
        raise _stale(database, entry)
    if entry.found is not None and newest != entry.found:  # a newer holder may have changed what this lease has read
        raise StaleToken(entry.name, token=entry.token, highest=newest)
    return newest


def _share_or_mark(database: StatementExecutor, dialect: FenceDialect, entry: FenceEntry) -> int | None:
    newest = _share(database, dialect, entry)
    if newest is None:  # not prepared, or an exclusive holder came in between: this transaction writes the mark
        database.execute(dialect.mark, params(entry))
        newest = _share(database, dialect, entry)
    return newest


def _share(database: StatementExecutor, dialect: FenceDialect, entry: FenceEntry) -> int | None:
    _, row = database.execute(dialect.share, params(entry))
    return None if row is None else row[0]


def _ask(database: StatementExecutor, dialect: FenceDialect, statements: tuple[str, ...], entry: FenceEntry) -> bool:
    values = params(entry)
    for sql in statements[:-1]:
        database.execute(sql, values)
    last = statements[-1]
    if is_yes(*database.execute(last, values)):
        return True
    if dialect.analyze_anew is None:
        return False
    database.execute(dialect.analyze_anew, {})
    return is_yes(*database.execute(last, values))


def is_yes(changed: int, row: tuple[Any, ...] | None) -> bool:
    """Return whether the answer to an admit or confirm is yes."""
    return (changed if row is None else row[0] or 0) > 0


def _stale(database: StatementExecutor, entry: FenceEntry) -> StaleToken:
    _, row = database.execute(HIGHEST, {"name": entry.name, "token": entry.token})
    return StaleToken(entry.name, token=entry.token, highest=None if row is None else row[0])


def params(entry: FenceEntry) -> dict[str, Any]:
    """Return the parameters of every statement."""
    return {
        "name": entry.name,
        "token": entry.token,
        "holder": entry.holder,
        "milliseconds": "0" if entry.limit is None else str(milliseconds(entry.limit)),
        "seconds": MAX_TIMEOUT_S if entry.limit is None else max(0, min(round(entry.limit), MAX_TIMEOUT_S)),
    }


HIGHEST: Final = """\
SELECT MAX(CASE WHEN s_token > token THEN s_token ELSE token END) FROM dlock_fence
WHERE name = :name OR (name = '' AND :token >= 1000000000000000)"""
"""The token that the next token of a refused holder has to exceed."""


class Fence(Protocol):
    """The fence of one lock as an integration implements it: how a step is sent on one of its connections.

    Each step raises StaleToken, and RowLocked or SnapshotTooOld for the corresponding errors of the database.
    """

    supports_shared: bool

    def keeps_snapshot(self, connection: Any) -> bool:
        """Return whether its transactions read from a snapshot that is older than the row locks that they wait for."""

    def admit(self, connection: Any, entry: FenceEntry) -> int | None:
        """See the function `admit`."""

    def prepare(self, connection: Any, entry: FenceEntry) -> None:
        """See the function `prepare`."""

    def announce(self, connection: Any, entry: FenceEntry) -> None:
        """See the function `announce`."""

    def confirm(self, connection: Any, entry: FenceEntry) -> None:
        """See the function `confirm`."""


class FenceGate:
    """One lease at the fence of its lock, in each database that it protects.

    Args:
        held: The lease.
        fence: Its lock's fence.
        wait: The wait of the acquire in seconds, None for no limit; it also limits each later wait for a row lock.
        deadline: The end of that acquire on the clock of `runtime`, which limits the first wait for a row lock.
        runtime: Executes the request for a greater token, in the middle of a statement.
    """

    __slots__ = ("_found", "_is_proven", "announced", "deadline", "fence", "forms", "held", "runtime", "wait")

    def __init__(
        self, held: LeaseRecord, fence: Fence, *, wait: float | None, deadline: float, runtime: DatabaseRuntime
    ) -> None:
        self.held, self.fence, self.wait, self.deadline, self.runtime = held, fence, wait, deadline, runtime
        self.forms: dict[Any, FenceForm] = {}
        """The databases that the lease protects, and in which form."""
        self.announced: set[Any] = set()
        """The databases in which the row was raised before the first transaction, or can no longer be."""
        self._is_proven = False
        self._found: dict[Any, int] = {}
        """The exclusive token that a shared lease found at its first admit in each database."""

    def protect(self, database: Any, form: FenceForm, connection: Any, *, is_inside: bool) -> None:
        """Protect a database from now on. `is_inside`: a transaction is open, which is the first to be protected."""
        if form and is_inside:
            form = "transaction"  # a separate commit would not be part of the open transaction,
            self.announced.add(database)  # and its snapshot might not show the raised row
        elif form == "lease":
            self._pass(self.fence.announce, connection, database)
        elif form and self.held.request.shared:
            self.fence.prepare(connection, self.entry())
        elif form and self.fence.supports_shared and self.fence.keeps_snapshot(connection):
            self.announce(connection, database)
        self.forms[database] = form

    def admit(self, connection: Any, database: Any) -> None:
        """Admit the lease into the connection's open transaction, before anything is read in it."""
        self._pass(self.fence.admit, connection, database)

    def announce(self, connection: Any, database: Any) -> None:
        """Raise the row before a transaction whose snapshot would miss what shared holders commit during its admit."""
        self._pass(self.fence.announce, connection, database)
        self.announced.add(database)

    def confirm(self, connection: Any, database: Any) -> None:
        """Verify just before COMMIT that no newer holder was announced."""
        self._pass(self.fence.confirm, connection, database)

    def _pass(self, step: Callable[[Any, FenceEntry], int | None], connection: Any, database: Any) -> None:
        """Execute a step; request a greater token from the store once if the fence refuses the first one as too small.

        A store that lost its data, and whose clock stepped back, has assigned too small a token to a current holder.
        The token is never replaced after the first admit, because what was read under it may be outdated.
        """
        try:
            try:
                found = step(connection, self.entry(database))
            except StaleToken as error:
                if self._is_proven or not self.runtime.finish(engine.raise_token, self.held, error.highest or 0):
                    raise
                found = step(connection, self.entry(database))
        except StaleToken as error:
            hooks.emit_conflict(error)
            raise
        self._is_proven = True
        if found is not None:
            self._found.setdefault(database, found)

    def entry(self, database: Any = None) -> FenceEntry:
        """Return what the lease presents to the fence of a database now."""
        request, limit = self.held.request, self.wait
        if limit is not None and not self._is_proven:
            limit = max(0.0, self.deadline - clock())
        token, found = self.held.granted.token, self._found.get(database)
        return FenceEntry(request.name, token, request.holder, request.shared, limit, found)


def refusal(error: BaseException, entry: FenceEntry, database: str) -> DLockError | None:
    """Return the meaning of a database error at the fence: RowLocked, SnapshotTooOld; None if it has no other."""
    trouble = failure_of_statement(error)
    if trouble is DatabaseFailure.LOCK_TIMEOUT:
        return RowLocked(entry.name, waited=entry.limit or 0.0, is_database=database == "sqlite")
    if trouble is DatabaseFailure.SERIALIZATION and database == "sqlite":
        return SnapshotTooOld(entry.name, isolation="deferred SQLite")
    return None
