"""The statements on the lease table for PostgreSQL, MariaDB, MySQL and SQLite, one `Dialect` each.

A row per lock, deleted some time after its last use: the next token is the time, which is greater. Times are
microseconds since 1970 by the database's clock at the start of the statement: before any wait for the row, so that no
lease is considered expired too early, or valid too long. `expires_at` alone decides whether a row is held; a release
writes the negated time there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Dialect", "counted", "forget", "listing", "look", "note", "other", "unused"]

TEN_YEARS: Final = 315_576_000_000_000
KEPT: Final = 3_600_000_000
"""Microseconds for which a row stays after its last use; if the clock steps back by less, tokens still grow."""
UNUSED: Final = 32
"""Rows that are deleted together, at most."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The statements of one database; parameters are given by name, leases as a JSON list of name, holder, ttl."""

    take: tuple[str, ...]
    """name, holder, owner, ttl, floor, newcomer → ours, token, remaining µs, owner. The first with a row is the answer.

    Where releases are not notified, a newcomer does not take a free row as long as it is marked as contended.
    """
    look: str
    """name, sleep in µs → remaining µs; 0, or no row: try again.

    Where it does not mark the row as contended, it also returns for how long it is marked, in µs.
    """
    note: str
    """name, sleep in µs: mark the row as contended; empty where `look` does it."""
    end: str
    """name, holder → how many grants were ended; in the rows, or as rows changed. Notifies the waiters."""
    force: str
    """The same by name, token."""
    other: str
    """name → a row if the lock is held."""
    renew: str
    """leases → the holders that were renewed, or as many changed rows. None is shortened: this may arrive late."""
    ours: str
    """leases → the holders that still hold."""
    unused: str
    """→ names of some rows that have not been used for long."""
    forget: str
    """name: delete its row, unless it was used recently."""
    listing: str
    """name, or an empty text for all → name, holder, token, owner, held for, remaining µs."""


_LOOK: Final = "SELECT expires_at - {now}, wanted_until - {now} FROM dlock_lease WHERE name = :name"
_NOTE: Final = "UPDATE dlock_lease SET wanted_until = {now} + 2 * :sleep WHERE name = :name AND expires_at > {now}"
_OTHER: Final = "SELECT 1 FROM dlock_lease WHERE name = :name AND expires_at > {now}"
_LISTING: Final = """\
SELECT name, holder, token, owner, {now} - since, expires_at - {now} FROM dlock_lease
WHERE expires_at > {now} {which}ORDER BY name"""


_IS_UNUSED: Final = "expires_at > {kept} - {now} AND expires_at < {now} - {kept} AND token < {now} - {kept}"


def counted(token: str, now: str) -> str:
    """Return the SQL for the next token; one more than ten years ahead of the clock is damaged, and is ignored."""
    return f"CASE WHEN {token} < {now} + {TEN_YEARS} THEN {token} + 1 ELSE 0 END"


def unused(now: str) -> str:
    """Return `Dialect.unused`; it locks nothing."""
    return f"SELECT name FROM dlock_lease WHERE {_IS_UNUSED.format(now=now, kept=KEPT)} LIMIT {UNUSED}"  # noqa: S608


def forget(now: str, name: str) -> str:
    """Return `Dialect.forget`; `name` is the parameter."""
    return f"DELETE FROM dlock_lease WHERE name = {name} AND {_IS_UNUSED.format(now=now, kept=KEPT)}"  # noqa: S608


def look(now: str) -> str:
    """Return `Dialect.look` for databases where it only reads."""
    return _LOOK.format(now=now)


def note(now: str) -> str:
    """Write `Dialect.note`."""
    return _NOTE.format(now=now)


def other(now: str) -> str:
    """Write `Dialect.other`."""
    return _OTHER.format(now=now)


def listing(now: str, name: str) -> str:
    """Return `Dialect.listing`; `name` is the parameter."""
    return _LISTING.format(now=now, which=f"AND ({name} = '' OR name = {name}) ")


CHANNEL: Final = "dlock_lease"
LISTEN: Final = f"LISTEN {CHANNEL}"
TELL: Final = f"SELECT pg_notify('{CHANNEL}', CAST(:payload AS text))"

_POSTGRESQL_NOW: Final = "CAST(extract(epoch FROM statement_timestamp()) * 1000000 AS bigint)"
_NAME: Final = 'CAST(:name AS text) COLLATE "C"'
_HOLDER: Final = "CAST(:holder AS text)"
_OWNER: Final = "CAST(:owner AS text)"
_TTL: Final = "CAST(:ttl AS bigint)"
_FLOOR: Final = "CAST(:floor AS bigint)"
_SLEEP: Final = "CAST(:sleep AS bigint)"
_TOKEN: Final = "CAST(:token AS bigint)"

# An upsert would lock a row that is held, and its release would wait for every failed attempt. This only reads it.
_POSTGRESQL_TAKE: Final = f"""\
UPDATE dlock_lease AS l SET
token = CASE WHEN l.expires_at > {_POSTGRESQL_NOW} AND l.token > {_FLOOR} THEN l.token
ELSE GREATEST({counted("l.token", _POSTGRESQL_NOW)}, {_FLOOR} + 1, {_POSTGRESQL_NOW}) END,
since = CASE WHEN l.expires_at > {_POSTGRESQL_NOW} THEN l.since ELSE {_POSTGRESQL_NOW} END,
holder = {_HOLDER}, owner = {_OWNER}, expires_at = GREATEST(l.expires_at, {_POSTGRESQL_NOW} + {_TTL})
WHERE l.name = {_NAME} AND (l.expires_at <= {_POSTGRESQL_NOW} OR l.holder = {_HOLDER})
RETURNING true, l.token, 0, ''"""  # noqa: S608
_MAKE: Final = f"""\
WITH made AS (
INSERT INTO dlock_lease (name, token, holder, owner, since, expires_at, wanted_until)
VALUES ({_NAME}, GREATEST({_FLOOR} + 1, {_POSTGRESQL_NOW}), {_HOLDER}, {_OWNER}, {_POSTGRESQL_NOW},
{_POSTGRESQL_NOW} + {_TTL}, 0)
ON CONFLICT DO NOTHING RETURNING token)
SELECT true, token, CAST(0 AS bigint), '' FROM made UNION ALL
SELECT false, token, expires_at - {_POSTGRESQL_NOW}, owner FROM dlock_lease WHERE name = {_NAME}"""  # noqa: S608

# Between our read and our mark it may have been released without a notification: then 0 is left, so try again.
_POSTGRESQL_LOOK: Final = f"""\
WITH noted AS (
UPDATE dlock_lease SET wanted_until = {_POSTGRESQL_NOW} + 2 * {_SLEEP}
WHERE name = {_NAME} AND expires_at > {_POSTGRESQL_NOW}
AND wanted_until < {_POSTGRESQL_NOW} + {_SLEEP} RETURNING expires_at - {_POSTGRESQL_NOW})
SELECT * FROM noted UNION ALL
SELECT CASE WHEN wanted_until < {_POSTGRESQL_NOW} + {_SLEEP} THEN 0 ELSE expires_at - {_POSTGRESQL_NOW} END
FROM dlock_lease
WHERE name = {_NAME} AND NOT EXISTS (SELECT 1 FROM noted)"""  # noqa: S608

_POSTGRESQL_END: Final = f"""\
WITH ended AS (
UPDATE dlock_lease SET holder = '', owner = '', expires_at = -{_POSTGRESQL_NOW}
WHERE name = {_NAME} AND {{which}} AND expires_at > {_POSTGRESQL_NOW} RETURNING name, wanted_until)
SELECT count(*), count(pg_notify('{CHANNEL}', name)) FILTER (WHERE wanted_until > {_POSTGRESQL_NOW}) FROM ended"""  # noqa: S608

_POSTGRESQL_RENEW: Final = (
    "UPDATE dlock_lease AS l SET expires_at = GREATEST(l.expires_at, {now} + r.ttl) "
    "FROM {given} WHERE {held} RETURNING l.holder"
)
_POSTGRESQL_GIVEN: Final = (
    "json_to_recordset(CAST(CAST(:leases AS text) AS json)) AS r(name text, holder text, ttl bigint)"
)
_POSTGRESQL_HELD: Final = f'l.name = r.name COLLATE "C" AND l.holder = r.holder AND l.expires_at > {_POSTGRESQL_NOW}'

POSTGRESQL: Final = Dialect(
    take=(_POSTGRESQL_TAKE, _MAKE),
    look=_POSTGRESQL_LOOK,
    note="",
    end=_POSTGRESQL_END.format(which=f"holder = {_HOLDER}"),
    force=_POSTGRESQL_END.format(which=f"token = {_TOKEN}"),
    other=other(_POSTGRESQL_NOW).replace(":name", _NAME),
    renew=_POSTGRESQL_RENEW.format(now=_POSTGRESQL_NOW, given=_POSTGRESQL_GIVEN, held=_POSTGRESQL_HELD),
    ours=f"SELECT l.holder FROM dlock_lease AS l, {_POSTGRESQL_GIVEN} WHERE {_POSTGRESQL_HELD}",  # noqa: S608
    unused=unused(_POSTGRESQL_NOW),
    forget=forget(_POSTGRESQL_NOW, _NAME),
    listing=listing(_POSTGRESQL_NOW, _NAME),
)


# Not UNIX_TIMESTAMP(NOW(6)): it cannot distinguish the two hours at the end of summer time.
_MYSQL_NOW: Final = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
_FREE: Final = f"expires_at <= {_MYSQL_NOW} AND (wanted_until <= {_MYSQL_NOW} OR NOT :newcomer)"
_MYSQL_TAKE: Final = f"""\
INSERT INTO dlock_lease (name, token, holder, owner, since, expires_at, wanted_until)
VALUES (:name, GREATEST(:floor + 1, {_MYSQL_NOW}), :holder, :owner, {_MYSQL_NOW}, {_MYSQL_NOW} + :ttl, 0)
ON DUPLICATE KEY UPDATE
token = IF({_FREE} OR (holder = VALUES(holder) AND token <= :floor),
GREATEST({counted("token", _MYSQL_NOW)}, VALUES(token)), token),
owner = IF({_FREE}, VALUES(owner), owner),
since = IF({_FREE}, VALUES(since), since),
holder = IF({_FREE}, VALUES(holder), holder),
expires_at = IF(holder = VALUES(holder), GREATEST(expires_at, VALUES(expires_at)), expires_at)"""  # noqa: S608
_ANSWER: Final = f"holder = :holder, token, expires_at - {_MYSQL_NOW}, owner"
_MYSQL_END: Final = f"""\
UPDATE dlock_lease SET holder = '', owner = '', expires_at = -{_MYSQL_NOW}
WHERE name = :name AND {{which}} AND expires_at > {_MYSQL_NOW}"""  # noqa: S608
_MYSQL_GIVEN: Final = """\
JSON_TABLE(:leases, '$[*]' COLUMNS (name varchar(512) CHARACTER SET ascii COLLATE ascii_bin PATH '$.name',
holder varchar(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$.holder', ttl bigint PATH '$.ttl')) AS r
JOIN dlock_lease AS l ON l.name = r.name AND l.holder = r.holder"""

MYSQL: Final = Dialect(
    take=(_MYSQL_TAKE, f"SELECT {_ANSWER} FROM dlock_lease WHERE name = :name"),  # noqa: S608
    look=look(_MYSQL_NOW),
    note=note(_MYSQL_NOW),
    end=_MYSQL_END.format(which="holder = :holder"),
    force=_MYSQL_END.format(which="token = :token"),
    other=other(_MYSQL_NOW),
    renew=f"UPDATE {_MYSQL_GIVEN} SET l.expires_at = GREATEST(l.expires_at, {_MYSQL_NOW} + r.ttl) "  # noqa: S608
    f"WHERE l.expires_at > {_MYSQL_NOW}",
    ours=f"SELECT l.holder FROM {_MYSQL_GIVEN} WHERE l.expires_at > {_MYSQL_NOW}",  # noqa: S608
    unused=unused(_MYSQL_NOW),
    forget=forget(_MYSQL_NOW, ":name"),
    listing=listing(_MYSQL_NOW, ":name"),
)
MARIADB: Final = Dialect(
    take=(f"{_MYSQL_TAKE}\nRETURNING {_ANSWER}",),
    look=MYSQL.look,
    note=MYSQL.note,
    end=MYSQL.end,
    force=MYSQL.force,
    other=MYSQL.other,
    renew=MYSQL.renew,
    ours=MYSQL.ours,
    unused=MYSQL.unused,
    forget=MYSQL.forget,
    listing=MYSQL.listing,
)


_SQLITE_NOW: Final = "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)"
# Two locks in one millisecond must have different tokens.
_NEXT: Final = f"(SELECT coalesce(max(token), 0) + 1 FROM dlock_lease WHERE token < {_SQLITE_NOW} + {TEN_YEARS})"  # noqa: S608
_SQLITE_TAKE: Final = f"""\
INSERT INTO dlock_lease AS l (name, token, holder, owner, since, expires_at)
VALUES (:name, max(:floor + 1, {_SQLITE_NOW}, {_NEXT}), :holder, :owner, {_SQLITE_NOW}, {_SQLITE_NOW} + :ttl)
ON CONFLICT (name) DO UPDATE SET
token = CASE WHEN l.expires_at > {_SQLITE_NOW} AND l.token > :floor THEN l.token
ELSE max({counted("l.token", _SQLITE_NOW)}, excluded.token) END,
since = CASE WHEN l.expires_at > {_SQLITE_NOW} THEN l.since ELSE excluded.since END,
holder = excluded.holder, owner = excluded.owner,
expires_at = max(l.expires_at, excluded.expires_at)
WHERE (l.expires_at <= {_SQLITE_NOW} AND (l.wanted_until <= {_SQLITE_NOW} OR NOT :newcomer))
OR l.holder = excluded.holder
RETURNING 1, token, 0, ''"""  # noqa: S608
_SQLITE_END: Final = f"""\
UPDATE dlock_lease SET holder = '', owner = '', expires_at = -{_SQLITE_NOW}
WHERE name = :name AND {{which}} AND expires_at > {_SQLITE_NOW} RETURNING 1"""  # noqa: S608
_SQLITE_RENEW: Final = (
    "UPDATE dlock_lease AS l SET expires_at = max(l.expires_at, {now} + r.ttl) "
    "FROM {given} WHERE {held} RETURNING holder"
)
_SQLITE_GIVEN: Final = """\
(SELECT json_extract(value, '$.name') AS name, json_extract(value, '$.holder') AS holder,
json_extract(value, '$.ttl') AS ttl FROM json_each(:leases)) AS r"""
_SQLITE_HELD: Final = f"l.name = r.name AND l.holder = r.holder AND l.expires_at > {_SQLITE_NOW}"

SQLITE: Final = Dialect(
    take=(_SQLITE_TAKE, f"SELECT 0, token, expires_at - {_SQLITE_NOW}, owner FROM dlock_lease WHERE name = :name"),  # noqa: S608
    look=look(_SQLITE_NOW),
    note=note(_SQLITE_NOW),
    end=_SQLITE_END.format(which="holder = :holder"),
    force=_SQLITE_END.format(which="token = :token"),
    other=other(_SQLITE_NOW),
    renew=_SQLITE_RENEW.format(now=_SQLITE_NOW, given=_SQLITE_GIVEN, held=_SQLITE_HELD),
    ours=f"SELECT l.holder FROM dlock_lease AS l, {_SQLITE_GIVEN} WHERE {_SQLITE_HELD}",  # noqa: S608
    unused=unused(_SQLITE_NOW),
    forget=forget(_SQLITE_NOW, ":name"),
    listing=listing(_SQLITE_NOW, ":name"),
)
