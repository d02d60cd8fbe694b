"""The fence's statements in each database's words; `fencing` says what they are for."""

from __future__ import annotations

from typing import Final

from dlock_core.fencing import Dialect

__all__ = ["BIGINT", "DIALECTS", "FOR", "limited"]

_TOKEN: Final = "SELECT token FROM dlock_fence WHERE name = :name"

# The row named '' is the floor that `dlock purge` left: a missing row counts as that high. Tokens below 10**15 are no
# times (revisions of etcd, for one), are never purged and have no floor.
_ABOVE_FLOOR: Final = """\
({t} < 1000000000000000 OR NOT EXISTS (SELECT 1 FROM dlock_fence AS p WHERE p.name = '' AND p.token >= {t}))"""

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
    admit=(_filled(_UPSERT),),
    share=_TOKEN,  # one snapshot for the check and all later reads: nothing newer can slip in between
    share_first=_filled(_UPSERT_FIRST),
    look=_TOKEN,
    announce=(_filled(_UPSERT_SHARED),),
    confirm=f"UPDATE dlock_fence SET holder = holder WHERE {_OURS}",  # noqa: S608 - an UPDATE takes the write lock
    confirm_shared=f"UPDATE dlock_fence SET holder = holder WHERE {_NOT_NEWER}",  # noqa: S608
)


BIGINT: Final = "CAST(:token AS bigint)"
_LIMITED: Final = """\
WITH old AS MATERIALIZED (SELECT current_setting('lock_timeout') AS v),
lim AS MATERIALIZED (SELECT set_config('lock_timeout', :milliseconds, true),
set_config('application_name', left(replace(current_setting('application_name'), {mark}, ''), 48) || {mark}, true)
FROM old){more}
SELECT c.n, CAST(pg_current_xact_id_if_assigned() AS text), set_config('lock_timeout', old.v, true)
FROM old LEFT JOIN ({result}) AS c ON true"""
"""Wait for row locks only so long, and give the session its own limit back, in one statement.

The second column is the transaction's id, by which `pg_xact_status` tells how a COMMIT of unknown outcome has ended.
Until then the session's application_name tells the inspector under whose lease it works.
"""


_MARK: Final = "' dlock:' || left(CAST(:holder AS text), 8)"


def limited(change: str) -> str:
    """Write a PostgreSQL statement that reads FROM lim so that it waits for row locks only so long."""
    return _LIMITED.format(mark=_MARK, more=f",\nwon AS ({change} RETURNING 1)", result="SELECT count(*) AS n FROM won")


def _postgres(upsert: str) -> str:
    return limited(_filled(upsert, BIGINT, "FROM lim "))


def _postgres_locked(column: str, condition: str, lock: str) -> str:
    found = f"SELECT {column} AS n FROM dlock_fence AS f, lim WHERE {condition} FOR {lock} OF f"  # noqa: S608
    return _LIMITED.format(mark=_MARK, more="", result=found)


POSTGRESQL: Final = Dialect(
    admit=(_postgres(_UPSERT),),
    share=_postgres_locked("f.token", "name = :name", "SHARE"),
    share_first=_postgres(_UPSERT_FIRST),
    look=_TOKEN,
    announce=(_postgres(_UPSERT_SHARED),),
    confirm=_postgres_locked("1", _OURS, "UPDATE"),
    confirm_shared=_postgres_locked("1", _NOT_NEWER, "SHARE"),
)

# The INSERT comes first: an UPDATE of a row that is not there would lock its gap, and two new names each other out.
# Assignments are made from left to right; the row count cannot tell a refusal from an unchanged row.
_INSERT: Final = """\
INSERT {ignore}INTO dlock_fence (name, token, holder, s_token) SELECT :name, {values} FROM DUAL WHERE {above_floor}"""
_RAISE: Final = """
ON DUPLICATE KEY UPDATE
holder = IF(s_token < VALUES(token) AND dlock_fence.token < VALUES(token), VALUES(holder), dlock_fence.holder),
token = IF(s_token < VALUES(token), GREATEST(dlock_fence.token, VALUES(token)), dlock_fence.token)"""
_RAISE_SHARED: Final = """
ON DUPLICATE KEY UPDATE s_token =
IF(dlock_fence.token < VALUES(s_token), GREATEST(dlock_fence.s_token, VALUES(s_token)), dlock_fence.s_token)"""


def _insert(values: str, ignore: str = "") -> str:
    return _INSERT.format(ignore=ignore, values=values, above_floor=_ABOVE_FLOOR.format(t=":token"))


_ADMIT: Final = _insert(":token, :holder, 0") + _RAISE
_ANNOUNCE: Final = _insert("0, '', :token") + _RAISE_SHARED

MYSQL: Final = Dialect(
    admit=(_ADMIT, f"SELECT 1 FROM dlock_fence WHERE {_OURS} FOR UPDATE"),  # noqa: S608
    share=f"{_TOKEN} LOCK IN SHARE MODE",
    share_first=_insert("0, '', 0", ignore="IGNORE "),
    look=None,  # under SERIALIZABLE it locks the gap
    announce=(_ANNOUNCE, f"SELECT 1 FROM dlock_fence WHERE {_NOT_NEWER} FOR UPDATE"),  # noqa: S608
    confirm=f"SELECT 1 FROM dlock_fence WHERE {_OURS} FOR UPDATE",  # noqa: S608
    confirm_shared=f"SELECT 1 FROM dlock_fence WHERE {_NOT_NEWER} LOCK IN SHARE MODE",  # noqa: S608
)
FOR: Final = "SET STATEMENT innodb_lock_wait_timeout = :seconds FOR "

MARIADB: Final = Dialect(
    admit=(f"{FOR}{_ADMIT}\nRETURNING token = :token AND holder = :holder AND s_token < :token",),
    share=FOR + MYSQL.share,
    share_first=FOR + MYSQL.share_first,
    look=None,
    announce=(f"{FOR}{_ANNOUNCE}\nRETURNING token < :token",),
    confirm=FOR + MYSQL.confirm,
    confirm_shared=FOR + MYSQL.confirm_shared,
)

DIALECTS: Final = {"sqlite": SQLITE, "postgresql": POSTGRESQL, "mysql": MYSQL, "mariadb": MARIADB}
"""By the name of the database; MySQL's statements wait as long as the session's innodb_lock_wait_timeout says."""
