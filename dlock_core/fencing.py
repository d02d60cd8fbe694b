"""The fence: a row per lock in the application's database that refuses old tokens, in the very transaction it protects.

admit: raise the row to (token, holder) before the first read, and let COMMIT depend on it under its row lock. Then
critical sections are serial in the order in which they were admitted, whatever the lock service does: clocks, pauses,
lost data. (Model-checked; the idea of the token: Kleppmann 2016, "How to do distributed locking"; why checking it when
writing is not enough, and the proof: docs/explanation/fencing.md.)

Two forms. "transaction": the admit is a statement of the transaction and its row lock lasts to COMMIT; a shared lease
holds the row's share lock in its stead. "lease": the row is raised and committed right after the grant, and each
transaction ends with `confirm`; shared leases raise `s_token`, which a confirm of an exclusive one must exceed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from dlock_core.errors import StaleToken

if TYPE_CHECKING:
    from collections.abc import Mapping

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


@dataclass(frozen=True, slots=True)
class Claim:
    """What a lease shows to the fence; `limit` bounds the wait for another's row lock, in seconds (None: for ever)."""

    name: str
    token: int
    holder: str
    shared: bool = False
    limit: float | None = None


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
    share_first: str
    look: str | None
    """Whether there is a row, where asking first is sound; the first column is none of the answers above."""
    announce: tuple[str, ...]
    confirm: str
    confirm_shared: str


async def admit(database: Database, dialect: Dialect, claim: Claim) -> None:
    """Admit a lease into the open transaction, before anything is read in it.

    Waits for an older holder's transaction at most `claim.limit` seconds; the database's lock timeout error passes
    through. Raises StaleToken when a newer holder was admitted before.
    """
    if claim.shared:
        await _admit_shared(database, dialect, claim)
    elif not await _ask(database, dialect.admit, claim):
        raise await _stale(database, claim)


async def prepare(database: Database, dialect: Dialect, claim: Claim) -> None:
    """Make the row on which shared holders will meet, in a transaction of its own, if there is none yet."""
    row = None
    if dialect.look is not None:
        _, row = await database.execute(dialect.look, params(claim))
    if row is None:
        await database.execute(dialect.share_first, params(claim))


async def announce(database: Database, dialect: Dialect, claim: Claim) -> None:
    """Raise the row for a lease of several transactions, in a transaction of its own; raises StaleToken."""
    if not await _ask(database, dialect.announce if claim.shared else dialect.admit, claim):
        raise await _stale(database, claim)


async def confirm(database: Database, dialect: Dialect, claim: Claim) -> None:
    """Prove, as the last statement before COMMIT, that the row is still ours, and keep it so; raises StaleToken."""
    if not await _ask(database, (dialect.confirm_shared if claim.shared else dialect.confirm,), claim):
        raise await _stale(database, claim)


async def _admit_shared(database: Database, dialect: Dialect, claim: Claim) -> None:
    highest = await _shared_row(database, dialect, claim)
    if highest is None:  # a share lock needs a row: the first one here makes it
        await database.execute(dialect.share_first, params(claim))
        highest = await _shared_row(database, dialect, claim)
    if highest is None or highest >= claim.token:
        raise await _stale(database, claim)


async def _shared_row(database: Database, dialect: Dialect, claim: Claim) -> int | None:
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
