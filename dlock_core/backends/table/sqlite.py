"""The lease table of SQLite (3.35 or newer), in the sibling of the database; its clock has milliseconds."""

from __future__ import annotations

from typing import Final

from dlock_core.backends.table.dialect import Dialect, listing, look, note, other

__all__ = ["SQLITE"]

_NOW: Final = "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)"
_NEXT: Final = "(SELECT coalesce(max(token), 0) + 1 FROM dlock_lease)"  # two locks in one millisecond
_TAKE: Final = f"""\
INSERT INTO dlock_lease AS l (name, token, holder, owner, since, expires_at)
VALUES (:name, max(:floor + 1, {_NOW}, {_NEXT}), :holder, :owner, {_NOW}, {_NOW} + :ttl)
ON CONFLICT (name) DO UPDATE SET
token = CASE WHEN l.expires_at > {_NOW} AND l.token > :floor THEN l.token ELSE max(l.token + 1, excluded.token) END,
since = CASE WHEN l.expires_at > {_NOW} THEN l.since ELSE excluded.since END,
holder = excluded.holder, owner = excluded.owner, expires_at = excluded.expires_at
WHERE (l.expires_at <= {_NOW} AND (l.wanted_until <= {_NOW} OR NOT :newcomer)) OR l.holder = excluded.holder
RETURNING 1, token, 0, ''"""  # noqa: S608
_END: Final = f"""\
UPDATE dlock_lease SET holder = '', owner = '', expires_at = 0
WHERE name = :name AND {{which}} AND expires_at > {_NOW} RETURNING 1"""  # noqa: S608
_RENEW: Final = "UPDATE dlock_lease AS l SET expires_at = {now} + r.ttl FROM {given} WHERE {held} RETURNING holder"
_GIVEN: Final = """\
(SELECT json_extract(value, '$.name') AS name, json_extract(value, '$.holder') AS holder,
json_extract(value, '$.ttl') AS ttl FROM json_each(:leases)) AS r"""
_HELD: Final = f"l.name = r.name AND l.holder = r.holder AND l.expires_at > {_NOW}"

SQLITE: Final = Dialect(
    take=(_TAKE, f"SELECT 0, token, expires_at - {_NOW}, owner FROM dlock_lease WHERE name = :name"),  # noqa: S608
    look=look(_NOW),
    note=note(_NOW),
    end=_END.format(which="holder = :holder"),
    force=_END.format(which="token = :token"),
    other=other(_NOW),
    renew=_RENEW.format(now=_NOW, given=_GIVEN, held=_HELD),
    ours=f"SELECT l.holder FROM dlock_lease AS l, {_GIVEN} WHERE {_HELD}",  # noqa: S608
    listing=listing(_NOW, ":name"),
)
