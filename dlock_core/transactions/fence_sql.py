"""The fence's statements for each database: the table, rows that carry their own fence, and the purge."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from dlock_core.errors import StaleToken
from dlock_core.transactions import fencing
from dlock_core.transactions.fencing import FenceDialect

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.transactions.fencing import FenceEntry, StatementExecutor

__all__ = ["BIGINT", "DIALECTS", "FOR", "MYSQL", "POSTGRESQL", "SCHEMA_OF_FUNCTIONS", "functions_in", "limited"]

_IS_MARKED: Final = "SELECT CASE WHEN s_token > token THEN 1 ELSE 0 END FROM dlock_fence WHERE name = :name"
_MARKED_TOKEN: Final = "SELECT token FROM dlock_fence WHERE name = :name AND s_token > token"
_UNMARKED: Final = "NOT EXISTS (SELECT 1 FROM dlock_fence AS m WHERE m.name = {n} AND m.s_token > m.token)"
"""A read that waits for no other shared holder, before the statement that would wait for all of them."""

# The row named '' is the floor that `dlock purge` left: a missing row counts as having that token. Tokens below 10**15
# are not times (revisions of etcd, for example); they are never purged and have no floor.
_ABOVE_FLOOR: Final = """\
({t} < 1000000000000000 OR NOT EXISTS (SELECT 1 FROM dlock_fence AS p WHERE p.name = '' AND p.token >= {t}))"""

_UPSERT: Final = """\
INSERT INTO dlock_fence AS f (name, token, holder, s_token) SELECT :name, {t}, :holder, 0 {source}WHERE {above_floor}
ON CONFLICT (name) DO UPDATE SET token = excluded.token, holder = excluded.holder
WHERE f.s_token < excluded.token
AND (f.token < excluded.token OR (f.token = excluded.token AND f.holder = excluded.holder))"""
_UPSERT_SHARED: Final = """\
INSERT INTO dlock_fence AS f (name, token, holder, s_token) SELECT :name, 0, '', {t} {source}WHERE {above_floor}
ON CONFLICT (name) DO UPDATE
SET s_token = CASE WHEN f.s_token > excluded.s_token THEN f.s_token ELSE excluded.s_token END
WHERE f.token < excluded.s_token"""
_UPSERT_MARK: Final = _UPSERT_SHARED.replace("{above_floor}", "{above_floor} AND " + _UNMARKED)


def _filled(template: str, token: str = ":token", source: str = "", name: str = ":name") -> str:
    return template.format(t=token, n=name, source=source, above_floor=_ABOVE_FLOOR.format(t=token))


_OURS: Final = "name = :name AND token = :token AND holder = :holder AND s_token < :token"
_NOT_NEWER: Final = "name = :name AND token < :token"

SQLITE: Final = FenceDialect(
    admit=(_filled(_UPSERT),),
    share=_MARKED_TOKEN,  # one snapshot for the check and all later reads: nothing newer can come in between
    is_marked=_IS_MARKED,
    mark=_filled(_UPSERT_MARK),
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
SELECT c.n, CAST(pg_current_xact_id_if_assigned() AS text) AS xid, set_config('lock_timeout', old.v, true)
FROM old LEFT JOIN ({result}) AS c ON true"""
"""Limit the wait for row locks, and restore the session's own limit, in one statement.

The column `xid` is the transaction's id, with which `pg_xact_status` reports how a COMMIT of unknown outcome has ended.
Until the end of the transaction the session's application_name shows the inspector under which lease it works.
"""


_MARK: Final = "' dlock:' || left(CAST(:holder AS text), 8)"


def limited(change: str) -> str:
    """Return a PostgreSQL statement, which reads FROM lim, with a limit for its waits for row locks."""
    return _LIMITED.format(mark=_MARK, more=f",\nwon AS ({change} RETURNING 1)", result="SELECT count(*) AS n FROM won")


_IS_CURRENT: Final = "CAST('dlock_fence' AS regclass) = to_regclass('dlock_fence')"
"""Whether a prepared statement's table is still the one that the search path leads to.

The cast is evaluated when the statement is analyzed, the function when it is executed. PostgreSQL does not analyze the
statement again for a table of the same name that was created later, in an earlier schema of an unchanged search path.
"""


def _postgres(upsert: str) -> str:
    template = upsert.replace("{above_floor}", f"{_IS_CURRENT} AND {{above_floor}}")
    return limited(_filled(template, BIGINT, "FROM lim ", "CAST(:name AS varchar)"))


def _postgres_locked(column: str, condition: str, lock: str) -> str:
    found = f"SELECT {column} AS n FROM dlock_fence AS f, lim WHERE {_IS_CURRENT} AND {condition} FOR {lock} OF f"  # noqa: S608
    return _LIMITED.format(mark=_MARK, more="", result=found)


POSTGRESQL: Final = FenceDialect(
    admit=(_postgres(_UPSERT),),
    share=_postgres_locked("f.token", "name = :name AND s_token > token", "SHARE"),
    is_marked=_IS_MARKED,
    mark=_postgres(_UPSERT_MARK),
    announce=(_postgres(_UPSERT_SHARED),),
    # It changes the row: a plain lock would be invisible to a waiter with an older snapshot, which misses our COMMIT.
    confirm=limited(f"UPDATE dlock_fence SET holder = holder FROM lim WHERE {_IS_CURRENT} AND {_OURS}"),  # noqa: S608
    confirm_shared=_postgres_locked("1", _NOT_NEWER, "SHARE"),
    analyze_anew="DISCARD PLANS",
)


@lru_cache
def functions_in(schema: str, *, with_xid: bool = False) -> FenceDialect:
    """Return the statements for PostgreSQL if the functions of `fence_functions` are in this quoted schema.

    They do the same as the long statements, which PostgreSQL would plan again for each transaction if the driver does
    not prepare them. The schema is named, because the search path may change after the lookup. `with_xid`: the answer
    is the transaction's id, in one column `xid`, which costs a client less than two columns; 0 is a refusal.
    """
    ask = _WITH_XID if with_xid else "SELECT {call}"
    calls = [f"{schema}.{name}(:name, :token, :holder, :milliseconds)" for name in ("dlock_admit", "dlock_confirm")]
    admit, confirm = (ask.format(call=call) for call in calls)
    return replace(POSTGRESQL, admit=(admit,), confirm=confirm)


_WITH_XID: Final = """\
SELECT CASE WHEN {call} > 0 THEN CAST(CAST(pg_current_xact_id() AS text) AS bigint) ELSE 0 END AS xid"""


_SIGNATURE: Final = "(varchar, bigint, varchar, text)"
SCHEMA_OF_FUNCTIONS: Final = f"""\
(SELECT quote_ident(n.nspname) FROM pg_proc AS a, pg_proc AS c, pg_namespace AS n
WHERE a.oid = to_regprocedure('dlock_admit{_SIGNATURE}') AND c.oid = to_regprocedure('dlock_confirm{_SIGNATURE}')
AND n.oid = a.pronamespace AND n.oid = c.pronamespace AND position(':' IN n.nspname) = 0
AND has_schema_privilege(n.oid, 'USAGE')
AND has_function_privilege(a.oid, 'EXECUTE') AND has_function_privilege(c.oid, 'EXECUTE'))"""  # noqa: S608
"""The quoted schema that has the functions; NULL if they are missing, or may not be called."""

# The INSERT comes first: an UPDATE of a row that does not exist would lock its gap, so that two new names block each
# other. Assignments are made from left to right; the row count cannot distinguish a refusal from an unchanged row.
_INSERT: Final = """\
INSERT INTO dlock_fence (name, token, holder, s_token) SELECT :name, {values} FROM DUAL WHERE {above_floor}"""
_RAISE: Final = """
ON DUPLICATE KEY UPDATE
holder = IF(s_token < VALUES(token) AND dlock_fence.token < VALUES(token), VALUES(holder), dlock_fence.holder),
token = IF(s_token < VALUES(token), GREATEST(dlock_fence.token, VALUES(token)), dlock_fence.token)"""
_RAISE_SHARED: Final = """
ON DUPLICATE KEY UPDATE s_token =
IF(dlock_fence.token < VALUES(s_token), GREATEST(dlock_fence.s_token, VALUES(s_token)), dlock_fence.s_token)"""


def _insert(values: str) -> str:
    return _INSERT.format(values=values, above_floor=_ABOVE_FLOOR.format(t=":token"))


_ADMIT: Final = _insert(":token, :holder, 0") + _RAISE
_ANNOUNCE: Final = _insert("0, '', :token") + _RAISE_SHARED
_LEAVE_MARK: Final = _insert("0, '', :token") + " AND " + _UNMARKED.format(n=":name") + _RAISE_SHARED

MYSQL: Final = FenceDialect(
    admit=(_ADMIT, f"SELECT 1 FROM dlock_fence WHERE {_OURS} FOR UPDATE"),  # noqa: S608
    share=f"{_MARKED_TOKEN} LOCK IN SHARE MODE",
    is_marked=_IS_MARKED,
    mark=_LEAVE_MARK,
    announce=(_ANNOUNCE, f"SELECT 1 FROM dlock_fence WHERE {_NOT_NEWER}"),  # noqa: S608 - the row is locked already
    confirm=f"SELECT 1 FROM dlock_fence WHERE {_OURS} FOR UPDATE",  # noqa: S608
    confirm_shared=f"SELECT 1 FROM dlock_fence WHERE {_NOT_NEWER} LOCK IN SHARE MODE",  # noqa: S608
)
FOR: Final = "SET STATEMENT innodb_lock_wait_timeout = :seconds FOR "

MARIADB: Final = FenceDialect(
    admit=(f"{FOR}{_ADMIT}\nRETURNING token = :token AND holder = :holder AND s_token < :token",),
    share=FOR + MYSQL.share,
    is_marked=FOR + MYSQL.is_marked,  # under SERIALIZABLE this locks the row
    mark=FOR + MYSQL.mark,
    announce=(f"{FOR}{_ANNOUNCE}\nRETURNING token < :token",),
    confirm=FOR + MYSQL.confirm,
    confirm_shared=FOR + MYSQL.confirm_shared,
)

DIALECTS: Final = {"sqlite": SQLITE, "postgresql": POSTGRESQL, "mysql": MYSQL, "mariadb": MARIADB}
"""By the name of the database; MySQL's statements wait for the session's innodb_lock_wait_timeout."""


_OLDER: Final = "(dlock_token < {t} OR (dlock_token = {t} AND dlock_holder = :holder))"
_ROW_IS_OURS: Final = "dlock_token = {t} AND dlock_holder = :holder"
_UPDATE: Final = "UPDATE {{table}} SET {set}{{lim}} WHERE {{key}} AND {condition}"
_FIRST_ADMIT: Final = _UPDATE.format(set="dlock_token = {t}, dlock_holder = :holder", condition=_OLDER)
_ADMIT_ROW: Final = f"{_FIRST_ADMIT} AND dlock_token > 0"
_CONFIRM: Final = _UPDATE.format(set="dlock_holder = :holder", condition=_ROW_IS_OURS)
_ROW_HIGHEST: Final = "SELECT dlock_token FROM {table} WHERE {key}"
# A plain read would take the transaction's snapshot, before the wait for a row in `dlock_fence`. Two holders that had
# locked the row for share could both not raise it.
_LOCKED_HIGHEST: Final = f"{_ROW_HIGHEST} FOR UPDATE"
_LOCKING: Final = {"mysql": _LOCKED_HIGHEST, "mariadb": FOR + _LOCKED_HIGHEST}
_LEAVE_TO_ROW: Final = "UPDATE dlock_fence SET holder = '' WHERE name = :name"


@dataclass(frozen=True, slots=True)
class RowStatements:
    """Statements with the parameters of an entry and of the key; a changed row, or a first column above 0, is a yes."""

    admit: str
    """Raise a row that has a token."""
    first_admit: str
    """Raise a row that has a token or not, after the table was asked."""
    confirm: str
    highest: str


@dataclass(frozen=True, slots=True)
class FencedRow:
    """A protected row: where it is, its statements, and the fence table that takes its place until it has a token.

    `database` adds the parameters of the key to every statement.
    """

    database: StatementExecutor
    statements: RowStatements
    dialect: FenceDialect


def admit(row: FencedRow, entry: FenceEntry) -> None:
    """Raise the row in the open transaction, before anything is read in it; raises StaleToken.

    A row without a token proves nothing: a newer holder, admitted in the table, may have created it. So the
    table is asked until the row has its first token.
    """
    if not _raise(row, row.statements.admit, entry):
        fencing.admit(row.database, row.dialect, entry)
        _raise(row, row.statements.first_admit, entry)


def announce(row: FencedRow, entry: FenceEntry) -> None:
    """Raise the row for a lease over several transactions, in a separate transaction; raises StaleToken."""
    if not _raise(row, row.statements.admit, entry):
        fencing.admit(row.database, row.dialect, entry)
        _raise_and_leave_to_row(row, entry)


def confirm(row: FencedRow, entry: FenceEntry) -> None:
    """Prove, as the last statement before COMMIT, that the row is still ours, and keep it so; raises StaleToken.

    A row that was created after the announce is raised now; the announce was recorded in the table.
    """
    if fencing.is_yes(*row.database.execute(row.statements.confirm, fencing.params(entry))):
        return
    _raise(row, row.statements.admit, entry)
    fencing.confirm(row.database, row.dialect, entry)
    _raise_and_leave_to_row(row, entry)


def _raise_and_leave_to_row(row: FencedRow, entry: FenceEntry) -> None:
    """Raise the row, and if it exists, let the table confirm this lease no longer.

    A newer holder is then admitted by the row alone, and if it deletes the row, the table would still show this one.
    """
    if _raise(row, row.statements.first_admit, entry):
        row.database.execute(_LEAVE_TO_ROW, fencing.params(entry))


def _raise(row: FencedRow, statement: str, entry: FenceEntry) -> bool:
    """Raise the row; return False if it has no token, or there is none. Raises StaleToken."""
    if fencing.is_yes(*row.database.execute(statement, fencing.params(entry))):
        return True
    _, found = row.database.execute(row.statements.highest, fencing.params(entry))
    if found is None or not found[0]:
        return False
    raise StaleToken(entry.name, token=entry.token, highest=found[0])


@lru_cache(maxsize=256)
def statements(database: str, table: str, key: str) -> RowStatements:
    """Return the statements for the row of `table` that the SQL condition `key` selects; both are trusted text."""
    write = {"postgresql": _postgresql, "mariadb": _mariadb}.get(database, _plain)
    read = _LOCKING.get(database, _ROW_HIGHEST).format(table=table, key=key)
    admit, first_admit, confirm = (write(each, table, key) for each in (_ADMIT_ROW, _FIRST_ADMIT, _CONFIRM))
    return RowStatements(admit, first_admit, confirm, read)


def _plain(template: str, table: str, key: str) -> str:
    return template.format(table=table, key=key, t=":token", lim="")


def _mariadb(template: str, table: str, key: str) -> str:
    return FOR + _plain(template, table, key)


def _postgresql(template: str, table: str, key: str) -> str:
    update = template.format(table=table, key=key, t=BIGINT, lim=" FROM lim")
    return limited(update)


def not_shared(name: str) -> str:
    """Return an error text: why a lock whose fence is the row cannot be shared, and what to do."""
    return (
        f"the fence of lock {name!r} is the row itself, which cannot have shared holders: give all its holders, also "
        "the exclusive ones, another name, whose fence is in the table; or pass fence=False if something else "
        "protects it"
    )


if TYPE_CHECKING:
    Execute = Callable[[str, tuple[Any, ...]], list[tuple[Any, ...]]]
    """Send one statement in autocommit, `%s` standing for each parameter, and return its rows."""


MICROSECONDS_PER_DAY: Final = 86_400_000_000
PURGE_BATCH_SIZE: Final = 500
"""Rows that are deleted in one statement."""

_NEWEST: Final = "CASE WHEN token > s_token THEN token ELSE s_token END"
# Tokens below 10**15 are not times in microseconds: they have no age. A row without any token contains no more
# information than a missing one.
_OLD: Final = f"name <> '' AND ({_NEWEST} >= 1000000000000000 OR {_NEWEST} = 0) AND {_NEWEST} < %s"
_HIGHEST_PURGED: Final = f"SELECT MAX({_NEWEST}) FROM dlock_fence WHERE {_OLD}"  # noqa: S608

_INSERT_FLOOR: Final = "INSERT INTO dlock_fence (name, token, holder, s_token) VALUES ('', %s, '', 0)"
_RAISE_FLOOR: Final = """
ON CONFLICT (name) DO UPDATE SET token = excluded.token WHERE dlock_fence.token < excluded.token"""
_RAISE_MYSQL: Final = "\nON DUPLICATE KEY UPDATE token = GREATEST(token, VALUES(token))"

_SOME: Final = f"SELECT name FROM dlock_fence WHERE {_OLD} LIMIT {PURGE_BATCH_SIZE}"  # noqa: S608
_SKIPPING: Final = " FOR UPDATE SKIP LOCKED"
_DELETE: Final = f"DELETE FROM dlock_fence WHERE {_OLD} AND name IN "  # noqa: S608


def purge(execute: Execute, vendor: str, days: int) -> int:
    """Replace fence rows whose token is older than `days` by a floor that refuses them all; return their number.

    Only tokens that are times in microseconds (10**15 and more) have an age; others stay, except rows that never had a
    token. Rows that are in use by a transaction stay, too; the purge may wait for a transaction that begins at that
    moment.
    """
    before = int(time.time() * 1_000_000) - days * MICROSECONDS_PER_DAY
    ((highest,),) = execute(_HIGHEST_PURGED, (before,))
    if highest is None:
        return 0
    raised = _RAISE_MYSQL if vendor in ("mysql", "mariadb") else _RAISE_FLOOR
    # The floor is committed before the first row is deleted, so that a missing row is never without a floor.
    execute(_INSERT_FLOOR + raised, (highest,))
    look, removed = _SOME if vendor == "sqlite" else _SOME + _SKIPPING, 0
    covered = highest + 1  # A row that was raised above the floor in the meantime stays: our clock may be days ahead.
    while names := [name for (name,) in execute(look, (covered,))]:
        execute(f"{_DELETE}({', '.join(['%s'] * len(names))})", (covered, *names))
        removed += len(names)
    return removed
