"""The lease table of PostgreSQL: a taken lock is only read; a release tells those who wait by NOTIFY, if there are any.

NOTIFY makes commits wait for each other in the whole cluster, so it is sent only where `wanted_until` says that
somebody waits. Whoever waits writes that, and listens, before the last look that sends him to sleep.
"""

from __future__ import annotations

from typing import Final

from dlock_core.backends.table.dialect import Dialect, listing, other

__all__ = ["CHANNEL", "LISTEN", "POSTGRESQL", "TELL"]

CHANNEL: Final = "dlock_lease"
LISTEN: Final = f"LISTEN {CHANNEL}"
TELL: Final = f"SELECT pg_notify('{CHANNEL}', CAST(:payload AS text))"

_NOW: Final = "CAST(extract(epoch FROM statement_timestamp()) * 1000000 AS bigint)"
_NAME: Final = 'CAST(:name AS text) COLLATE "C"'
_HOLDER: Final = "CAST(:holder AS text)"
_OWNER: Final = "CAST(:owner AS text)"
_TTL: Final = "CAST(:ttl AS bigint)"
_FLOOR: Final = "CAST(:floor AS bigint)"
_SLEEP: Final = "CAST(:sleep AS bigint)"
_TOKEN: Final = "CAST(:token AS bigint)"

# An upsert would lock a row that is taken, and its release would wait for all who fail. This only reads it.
_TAKE: Final = f"""\
UPDATE dlock_lease AS l SET
token = CASE WHEN l.expires_at > {_NOW} AND l.token > {_FLOOR} THEN l.token
ELSE GREATEST(l.token + 1, {_FLOOR} + 1, {_NOW}) END,
since = CASE WHEN l.expires_at > {_NOW} THEN l.since ELSE {_NOW} END,
holder = {_HOLDER}, owner = {_OWNER}, expires_at = {_NOW} + {_TTL}
WHERE l.name = {_NAME} AND (l.expires_at <= {_NOW} OR l.holder = {_HOLDER})
RETURNING true, l.token, 0, ''"""  # noqa: S608
_MAKE: Final = f"""\
WITH made AS (
INSERT INTO dlock_lease (name, token, holder, owner, since, expires_at, wanted_until)
VALUES ({_NAME}, GREATEST({_FLOOR} + 1, {_NOW}), {_HOLDER}, {_OWNER}, {_NOW}, {_NOW} + {_TTL}, 0)
ON CONFLICT DO NOTHING RETURNING token)
SELECT true, token, CAST(0 AS bigint), '' FROM made UNION ALL
SELECT false, token, expires_at - {_NOW}, owner FROM dlock_lease WHERE name = {_NAME}"""  # noqa: S608

# Between our look and our note it may have been released, without a word to us: then nothing is left, so ask again.
_LOOK: Final = f"""\
WITH noted AS (
UPDATE dlock_lease SET wanted_until = {_NOW} + 2 * {_SLEEP}
WHERE name = {_NAME} AND expires_at > {_NOW} AND wanted_until < {_NOW} + {_SLEEP} RETURNING expires_at - {_NOW})
SELECT * FROM noted UNION ALL
SELECT CASE WHEN wanted_until < {_NOW} + {_SLEEP} THEN 0 ELSE expires_at - {_NOW} END FROM dlock_lease
WHERE name = {_NAME} AND NOT EXISTS (SELECT 1 FROM noted)"""  # noqa: S608

_END: Final = f"""\
WITH ended AS (
UPDATE dlock_lease SET holder = '', owner = '', expires_at = 0
WHERE name = {_NAME} AND {{which}} AND expires_at > {_NOW} RETURNING name, wanted_until)
SELECT count(*), count(pg_notify('{CHANNEL}', name)) FILTER (WHERE wanted_until > {_NOW}) FROM ended"""  # noqa: S608

_RENEW: Final = "UPDATE dlock_lease AS l SET expires_at = {now} + r.ttl FROM {given} WHERE {held} RETURNING l.holder"
_GIVEN: Final = "json_to_recordset(CAST(CAST(:leases AS text) AS json)) AS r(name text, holder text, ttl bigint)"
_HELD: Final = f'l.name = r.name COLLATE "C" AND l.holder = r.holder AND l.expires_at > {_NOW}'

POSTGRESQL: Final = Dialect(
    take=(_TAKE, _MAKE),
    look=_LOOK,
    note="",
    end=_END.format(which=f"holder = {_HOLDER}"),
    force=_END.format(which=f"token = {_TOKEN}"),
    other=other(_NOW).replace(":name", _NAME),
    renew=_RENEW.format(now=_NOW, given=_GIVEN, held=_HELD),
    ours=f"SELECT l.holder FROM dlock_lease AS l, {_GIVEN} WHERE {_HELD}",  # noqa: S608
    listing=listing(_NOW, _NAME),
)
