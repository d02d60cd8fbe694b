"""The fence: a row per lock in the application's database that refuses old tokens, in the very transaction it protects.

admit: raise the row to (token, holder) before the first read, and let COMMIT depend on it under its row lock. Then
critical sections are serial in the order in which they were admitted, whatever the lock service does: clocks, pauses,
lost data. (Model-checked; the idea of the token: Kleppmann 2016, "How to do distributed locking"; why checking it when
writing is not enough, and the proof: docs/explanation/fencing.md.)

Two forms. "transaction": the admit is a statement of the transaction and its row lock lasts to COMMIT. "lease": the row
is raised and committed right after the grant, and each transaction ends with `confirm`.

Shared leases leave a mark, `s_token`, greater than the token of every exclusive one that was admitted before them: an
exclusive admit or confirm needs a token greater than the mark. In the "transaction" form the first shared lease after
an exclusive one leaves the mark, and all of them hold the row's share lock; in the "lease" form each raises the mark to
its own token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from dlock_core.errors import DLockError, RowLocked, SnapshotTooOld, StaleToken
from dlock_core.leases import engine
from dlock_core.observability import hooks
from dlock_core.runtime import blocking, clock
from dlock_core.sql.driver_errors import Trouble, classify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlock_core.leases.lease import Held

__all__ = [
    "HIGHEST",
    "Claim",
    "Database",
    "Dialect",
    "Fence",
    "admit",
    "announce",
    "confirm",
    "is_yes",
    "params",
    "prepare",
]

Fence = Literal["transaction", "lease"]

MAX_TRIES_TO_MARK: Final = 3
"""How often a shared lease looks for the mark, and leaves it, before its transaction."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a lease shows to the fence; `limit` bounds the wait for another's row lock, in seconds (None: for ever).

    `found` is the exclusive token that the first admit of a shared lease has found in the row; None before.
    """

    name: str
    token: int
    holder: str
    shared: bool = False
    limit: float | None = None
    found: int | None = None


class Database(Protocol):
    """Runs one statement with `:name` parameters."""

    async def execute(self, sql: str, params: Mapping[str, Any]) -> tuple[int, tuple[Any, ...] | None]:
        """Give the number of rows changed, and the first row of the answer if it has rows."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The statements of one database; a changed row, or a first column above 0, tells that the lease was admitted.

    Where one statement cannot do it all there are several, of which the last tells.
    """

    admit: tuple[str, ...]
    share: str
    """Lock the row for share and give its exclusive token, if the mark is above that; no row otherwise."""
    is_marked: str
    """A plain look whether the mark is above the exclusive token; the first column tells."""
    mark: str
    """Raise the mark to our token, unless it is above the exclusive token already."""
    announce: tuple[str, ...]
    confirm: str
    confirm_shared: str


async def admit(database: Database, dialect: Dialect, claim: Claim) -> int | None:
    """Admit a lease into the open transaction, before anything is read in it.

    Waits for an older holder's transaction at most `claim.limit` seconds; the database's lock timeout error passes
    through. Return the exclusive token that a shared lease has found, for its later claims. Raises StaleToken when a
    newer holder was admitted before.
    """
    if claim.shared:
        return await _admit_shared(database, dialect, claim)
    if not await _ask(database, dialect.admit, claim):
        raise await _stale(database, claim)
    return None


async def prepare(database: Database, dialect: Dialect, claim: Claim) -> None:
    """Leave the mark of shared holders, if it is missing; each statement is a transaction of its own.

    What stands in its way is left for the admit to tell. When many come at once, one of two that leave the mark may be
    the victim of a deadlock: the other one has left it then.
    """
    for _ in range(MAX_TRIES_TO_MARK):
        _, row = await database.execute(dialect.is_marked, params(claim))
        if row is not None and row[0]:
            return
        try:
            await database.execute(dialect.mark, params(claim))
        except Exception as error:
            if classify(error) not in (Trouble.DEADLOCK, Trouble.SERIALIZATION):
                raise
        else:
            return


async def announce(database: Database, dialect: Dialect, claim: Claim) -> None:
    """Raise the row for a lease of several transactions, in a transaction of its own; raises StaleToken."""
    if not await _ask(database, dialect.announce if claim.shared else dialect.admit, claim):
        raise await _stale(database, claim)


async def confirm(database: Database, dialect: Dialect, claim: Claim) -> None:
    """Prove, as the last statement before COMMIT, that the row is still ours, and keep it so; raises StaleToken."""
    if not await _ask(database, (dialect.confirm_shared if claim.shared else dialect.confirm,), claim):
        raise await _stale(database, claim)


async def _admit_shared(database: Database, dialect: Dialect, claim: Claim) -> int:
    newest = await _share(database, dialect, claim)
    if newest is None:  # nothing was prepared, or an exclusive one came between: this transaction leaves the mark
        await database.execute(dialect.mark, params(claim))
        newest = await _share(database, dialect, claim)
    if newest is None or newest >= claim.token:
        raise await _stale(database, claim)
    if claim.found is not None and newest != claim.found:  # it may have changed what this lease has read
        raise StaleToken(claim.name, token=claim.token, highest=newest)
    return newest


async def _share(database: Database, dialect: Dialect, claim: Claim) -> int | None:
    _, row = await database.execute(dialect.share, params(claim))
    return None if row is None else row[0]


async def _ask(database: Database, statements: tuple[str, ...], claim: Claim) -> bool:
    *before, last = statements
    for sql in before:
        await database.execute(sql, params(claim))
    return is_yes(*await database.execute(last, params(claim)))


def is_yes(changed: int, row: tuple[Any, ...] | None) -> bool:
    """Read the answer to an admit or confirm."""
    return (changed if row is None else row[0] or 0) > 0


async def _stale(database: Database, claim: Claim) -> StaleToken:
    _, row = await database.execute(HIGHEST, {"name": claim.name, "token": claim.token})
    return StaleToken(claim.name, token=claim.token, highest=None if row is None else row[0])


def params(claim: Claim) -> dict[str, Any]:
    """Give the parameters of every statement."""
    milliseconds = 0 if claim.limit is None else max(1, round(claim.limit * 1000))
    return {
        "name": claim.name,
        "token": claim.token,
        "holder": claim.holder,
        "milliseconds": str(milliseconds),
        "seconds": 100_000_000 if claim.limit is None else max(0, round(claim.limit)),
    }


HIGHEST: Final = """\
SELECT MAX(CASE WHEN s_token > token THEN s_token ELSE token END) FROM dlock_fence
WHERE name = :name OR (name = '' AND :token >= 1000000000000000)"""
"""What the token of a holder that was refused has to exceed."""


class Guard:
    """One lease at the fence; `deadline`, the end of its acquire, bounds the first wait for a row lock."""

    def __init__(
        self, held: Held, *, wait: float | None, deadline: float, finish: Callable[..., Any] = blocking
    ) -> None:
        self.held, self.wait, self.deadline, self.finish = held, wait, deadline, finish
        self._is_proven = False
        self._found: dict[object, int] = {}
        """What a shared lease has found at its first admit in each database."""

    def __call__(self, step: Callable[[Claim], int | None], database: object = None) -> None:
        """Carry out an admit, announce or confirm in a database; raises StaleToken.

        A store that lost its data and its time gave a current holder too small a token: it gets a greater one, but
        never after the first admit, since what was read under the smaller one may be old by now.
        """
        try:
            found = self._prove(step, database)
        except StaleToken as error:
            hooks.refused(error)
            raise
        self._is_proven = True
        if found is not None:
            self._found.setdefault(database, found)

    def _prove(self, step: Callable[[Claim], int | None], database: object) -> int | None:
        try:
            return step(self.claim(database))
        except StaleToken as error:
            if self._is_proven or not self.finish(engine.raise_token, self.held, error.highest or 0):
                raise
            return step(self.claim(database))

    def claim(self, database: object = None) -> Claim:
        """Say what the lease shows to the fence of a database now."""
        request = self.held.request
        limit = self.wait if self._is_proven else max(0.0, self.deadline - clock())
        return Claim(
            request.name,
            self.held.token,
            request.holder,
            request.shared,
            None if self.wait is None else limit,
            self._found.get(database),
        )


def refusal(error: BaseException, claim: Claim, database: str) -> DLockError | None:
    """Say what an error of the database means at the fence: RowLocked, SnapshotTooOld; None: what its driver says."""
    trouble = classify(error)
    if trouble is Trouble.LOCK_TIMEOUT:
        return RowLocked(claim.name, waited=claim.limit or 0.0, is_database=database == "sqlite")
    if trouble is Trouble.SERIALIZATION and database == "sqlite":
        return SnapshotTooOld(claim.name, isolation="deferred SQLite")
    return None
