"""The lease table of MariaDB (10.6 or newer) and of MySQL (8.0.4 or newer).

Assignments of an upsert are made from left to right: what the others go by comes last.
"""

from __future__ import annotations

from typing import Final

from dlock_core.backends.table.dialect import Dialect, listing, look, note, other

__all__ = ["MARIADB", "MYSQL"]

# Not UNIX_TIMESTAMP(NOW(6)): the hour that the end of summer time repeats would be one.
_NOW: Final = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
_FREE: Final = f"expires_at <= {_NOW} AND (wanted_until <= {_NOW} OR NOT :newcomer)"
_TAKE: Final = f"""\
INSERT INTO dlock_lease (name, token, holder, owner, since, expires_at, wanted_until)
VALUES (:name, GREATEST(:floor + 1, {_NOW}), :holder, :owner, {_NOW}, {_NOW} + :ttl, 0)
ON DUPLICATE KEY UPDATE
token = IF({_FREE} OR (holder = VALUES(holder) AND token <= :floor),
GREATEST(token + 1, VALUES(token)), token),
owner = IF({_FREE}, VALUES(owner), owner),
since = IF({_FREE}, VALUES(since), since),
holder = IF({_FREE}, VALUES(holder), holder),
expires_at = IF(holder = VALUES(holder), VALUES(expires_at), expires_at)"""  # noqa: S608
_ANSWER: Final = f"holder = :holder, token, expires_at - {_NOW}, owner"
_END: Final = f"""\
UPDATE dlock_lease SET holder = '', owner = '', expires_at = 0
WHERE name = :name AND {{which}} AND expires_at > {_NOW}"""  # noqa: S608
_GIVEN: Final = """\
JSON_TABLE(:leases, '$[*]' COLUMNS (name varchar(512) CHARACTER SET ascii COLLATE ascii_bin PATH '$.name',
holder varchar(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$.holder', ttl bigint PATH '$.ttl')) AS r
JOIN dlock_lease AS l ON l.name = r.name AND l.holder = r.holder"""

MYSQL: Final = Dialect(
    take=(_TAKE, f"SELECT {_ANSWER} FROM dlock_lease WHERE name = :name"),  # noqa: S608
    look=look(_NOW),
    note=note(_NOW),
    end=_END.format(which="holder = :holder"),
    force=_END.format(which="token = :token"),
    other=other(_NOW),
    renew=f"UPDATE {_GIVEN} SET l.expires_at = {_NOW} + r.ttl WHERE l.expires_at > {_NOW}",  # noqa: S608
    ours=f"SELECT l.holder FROM {_GIVEN} WHERE l.expires_at > {_NOW}",  # noqa: S608
    listing=listing(_NOW, ":name"),
)
MARIADB: Final = Dialect(
    take=(f"{_TAKE}\nRETURNING {_ANSWER}",),
    look=MYSQL.look,
    note=MYSQL.note,
    end=MYSQL.end,
    force=MYSQL.force,
    other=MYSQL.other,
    renew=MYSQL.renew,
    ours=MYSQL.ours,
    listing=MYSQL.listing,
)
