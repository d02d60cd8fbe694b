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

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from dlock_core.errors import StaleToken

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DIALECTS",
    "Claim",
    "Database",
    "Dialect",
    "Fence",
    "admit",
    "announce",
    "confirm",
    "is_yes",
    "limited",
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
    """The statements of one database; a changed row, or a first column above 0, tells that the lease was admitted."""

    admit: str
    admit_again: tuple[str, ...]
    """What is tried after `admit` changed nothing, in this order, where one statement cannot do it all."""
    share: str
    share_first: str
    look: str
    """Whether there is a row: the first column is none of the answers above."""
    announce: str
    announce_again: tuple[str, ...]
    confirm: str
    confirm_shared: str


async def admit(database: Database, dialect: Dialect, claim: Claim) -> None:
    """Admit a lease into the open transaction, before anything is read in it.

    Waits for an older holder's transaction at most `claim.limit` seconds; the database's lock timeout error passes
    through. Raises StaleToken when a newer holder was admitted before.
    """
    if claim.shared:
        await _admit_shared(database, dialect, claim)
    elif not await _any(database, (dialect.admit, *dialect.admit_again), claim):
        raise await _stale(database, claim)


async def prepare(database: Database, dialect: Dialect, claim: Claim) -> None:
    """Make the row on which shared holders will meet, in a transaction of its own, if there is none yet."""
    _, row = await database.execute(dialect.look, params(claim))
    if row is None:
        await database.execute(dialect.share_first, params(claim))


async def announce(database: Database, dialect: Dialect, claim: Claim) -> None:
    """Raise the row for a lease of several transactions, in a transaction of its own; raises StaleToken."""
    if claim.shared:
        admitted = await _any(database, (dialect.announce, *dialect.announce_again), claim)
    else:
        admitted = await _any(database, (dialect.admit, *dialect.admit_again), claim)
    if not admitted:
        raise await _stale(database, claim)


async def confirm(database: Database, dialect: Dialect, claim: Claim) -> None:
    """Prove, as the last statement before COMMIT, that the row is still ours, and keep it so; raises StaleToken."""
    if not await _any(database, (dialect.confirm_shared if claim.shared else dialect.confirm,), claim):
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


async def _any(database: Database, statements: tuple[str, ...], claim: Claim) -> bool:
    for sql in statements:
        if is_yes(*await database.execute(sql, params(claim))):
            return True
    return False


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


_TOKEN: Final = "SELECT token FROM dlock_fence WHERE name = :name"

# The row named '' is the floor that `dlock purge` left: a missing row counts as that high. Tokens below 10**15 are no
# times (revisions of etcd, for one), are never purged and have no floor.
_ABOVE_FLOOR: Final = """\
({t} < 1000000000000000 OR NOT EXISTS (SELECT 1 FROM dlock_fence AS p WHERE p.name = '' AND p.token >= {t}))"""

HIGHEST: Final = """\
SELECT MAX(CASE WHEN s_token > token THEN s_token ELSE token END) FROM dlock_fence
WHERE name = :name OR (name = '' AND :token >= 1000000000000000)"""
"""What the token of a holder that was refused has to exceed."""

_UPSERT: Final = """\
INSERT INTO dlock_fence AS f (name, token, holder, s_token) SELECT :name, {t}, :holder, 0 {source}WHERE {above_floor}
ON CONFLICT (name) DO UPDATE SET token = excluded.token, holder = excluded.holder
WHERE f.s_token < excluded.token
AND (f.token < excluded.token OR (f.token = excluded.token AND f.holder = excluded.holder))"""
_UPSERT_FIRST: Final = """\
INSERT INTO dlock_fence (name, token, holder, s_token) SELECT :name, 0, '', 0 {source}WHERE {above_floor}
ON CONFLICT (name) DO NOTHING"""
_UPSERT_SHARED: Final = """\
INSERT INTO dlock_fence AS f (name, token, holder, s_token) SELECT :name, 0, '', {t} {source}WHERE {above_floor}
ON CONFLICT (name) DO UPDATE
SET s_token = CASE WHEN f.s_token > excluded.s_token THEN f.s_token ELSE excluded.s_token END
WHERE f.token < excluded.s_token"""


def _filled(template: str, token: str = ":token", source: str = "") -> str:
    return template.format(t=token, source=source, above_floor=_ABOVE_FLOOR.format(t=token))


_OURS: Final = "name = :name AND token = :token AND holder = :holder AND s_token < :token"
_NOT_NEWER: Final = "name = :name AND token < :token"

SQLITE: Final = Dialect(
    admit=_filled(_UPSERT),
    admit_again=(),
    share=_TOKEN,  # one snapshot for the check and all later reads: nothing newer can slip in between
    share_first=_filled(_UPSERT_FIRST),
    look=_TOKEN,
    announce=_filled(_UPSERT_SHARED),
    announce_again=(),
    confirm=f"UPDATE dlock_fence SET holder = holder WHERE {_OURS}",  # noqa: S608 - an UPDATE takes the write lock
    confirm_shared=f"UPDATE dlock_fence SET holder = holder WHERE {_NOT_NEWER}",  # noqa: S608
)


BIGINT: Final = "CAST(:token AS bigint)"
_LIMITED: Final = """\
WITH old AS MATERIALIZED (SELECT current_setting('lock_timeout') AS v),
lim AS MATERIALIZED (SELECT set_config('lock_timeout', :milliseconds, true) FROM old){more}
SELECT c.n, CAST(pg_current_xact_id_if_assigned() AS text), set_config('lock_timeout', old.v, true)
FROM old LEFT JOIN ({result}) AS c ON true"""
"""Wait for row locks only so long, and give the session its own limit back, in one statement.

The second column is the transaction's id, by which `pg_xact_status` tells how a COMMIT of unknown outcome has ended.
"""


def limited(change: str) -> str:
    """Write a PostgreSQL statement that reads FROM lim so that it waits for row locks only so long."""
    return _LIMITED.format(more=f",\nwon AS ({change} RETURNING 1)", result="SELECT count(*) AS n FROM won")


def _postgres(upsert: str) -> str:
    return limited(_filled(upsert, BIGINT, "FROM lim "))


def _postgres_locked(column: str, condition: str, lock: str) -> str:
    found = f"SELECT {column} AS n FROM dlock_fence AS f, lim WHERE {condition} FOR {lock} OF f"  # noqa: S608
    return _LIMITED.format(more="", result=found)


POSTGRESQL: Final = Dialect(
    admit=_postgres(_UPSERT),
    admit_again=(),
    share=_postgres_locked("f.token", "name = :name", "SHARE"),
    share_first=_postgres(_UPSERT_FIRST),
    look=_TOKEN,
    announce=_postgres(_UPSERT_SHARED),
    announce_again=(),
    confirm=_postgres_locked("1", _OURS, "UPDATE"),
    confirm_shared=_postgres_locked("1", _NOT_NEWER, "SHARE"),
)

_UPDATE: Final = """\
UPDATE dlock_fence SET token = :token, holder = :holder WHERE name = :name
AND s_token < :token AND (token < :token OR (token = :token AND holder = :holder))"""
_UPDATE_SHARED: Final = """\
UPDATE dlock_fence SET s_token = GREATEST(s_token, :token) WHERE name = :name AND token < :token"""
# The row count of ON DUPLICATE KEY UPDATE cannot tell a refusal from an unchanged row: three plain statements do.
_INSERT: Final = """\
INSERT IGNORE INTO dlock_fence (name, token, holder, s_token) SELECT :name, {values} FROM DUAL WHERE {above_floor}"""


def _insert(values: str) -> str:
    return _INSERT.format(values=values, above_floor=_ABOVE_FLOOR.format(t=":token"))


MYSQL: Final = Dialect(
    admit=_UPDATE,
    admit_again=(_insert(":token, :holder, 0"), _UPDATE),
    share=f"{_TOKEN} LOCK IN SHARE MODE",
    share_first=_insert("0, '', 0"),
    look=_TOKEN,
    announce=_UPDATE_SHARED,
    announce_again=(_insert("0, '', :token"), _UPDATE_SHARED),
    confirm=f"SELECT 1 FROM dlock_fence WHERE {_OURS} FOR UPDATE",  # noqa: S608
    confirm_shared=f"SELECT 1 FROM dlock_fence WHERE {_NOT_NEWER} LOCK IN SHARE MODE",  # noqa: S608
)
FOR: Final = "SET STATEMENT innodb_lock_wait_timeout = :seconds FOR "

MARIADB: Final = replace(
    MYSQL,
    admit=FOR + MYSQL.admit,
    admit_again=tuple(FOR + statement for statement in MYSQL.admit_again),
    share=FOR + MYSQL.share,
    share_first=FOR + MYSQL.share_first,
    look=FOR + MYSQL.look,  # under SERIALIZABLE it waits for a row lock, too
    announce=FOR + MYSQL.announce,
    announce_again=tuple(FOR + statement for statement in MYSQL.announce_again),
    confirm=FOR + MYSQL.confirm,
    confirm_shared=FOR + MYSQL.confirm_shared,
)

DIALECTS: Final = {"sqlite": SQLITE, "postgresql": POSTGRESQL, "mysql": MYSQL, "mariadb": MARIADB}
"""By the name of the database; MySQL waits for a row lock as long as its own innodb_lock_wait_timeout says."""
