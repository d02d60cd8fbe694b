"""The fence on the protected row itself: the statements for a table with the columns `dlock_token` and `dlock_holder`.

Two columns instead of a row in `dlock_fence`: the admit is one guarded UPDATE of the row, and locks it. It knows no
shared locks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from dlock_core import fence_sql

__all__ = ["RowStatements", "statements"]

_OLDER: Final = "(dlock_token < {t} OR (dlock_token = {t} AND dlock_holder = :holder))"
_OURS: Final = "dlock_token = {t} AND dlock_holder = :holder"
_UPDATE: Final = "UPDATE {{table}} SET {set}{{lim}} WHERE {{key}} AND {condition}"
_ADMIT: Final = _UPDATE.format(set="dlock_token = {t}, dlock_holder = :holder", condition=_OLDER)
_CONFIRM: Final = _UPDATE.format(set="dlock_holder = :holder", condition=_OURS)
_HIGHEST: Final = "SELECT dlock_token FROM {table} WHERE {key}"
# A plain read would take the transaction's snapshot, before the wait for a row in `dlock_fence`.
_SHARE: Final = f"{_HIGHEST} LOCK IN SHARE MODE"
_LOCKING: Final = {"mysql": _SHARE, "mariadb": fence_sql.FOR + _SHARE}


@dataclass(frozen=True, slots=True)
class RowStatements:
    """With the parameters of a claim, and those of the key; a changed row, or a first column above 0, is a yes."""

    admit: str
    confirm: str
    highest: str


@lru_cache(maxsize=256)
def statements(database: str, table: str, key: str) -> RowStatements:
    """Write the statements for a row of `table`, which `key`, an SQL condition, selects; both are trusted text."""
    write = {"postgresql": _postgresql, "mariadb": _mariadb}.get(database, _plain)
    read = _LOCKING.get(database, _HIGHEST).format(table=table, key=key)
    return RowStatements(write(_ADMIT, table, key), write(_CONFIRM, table, key), read)


def _plain(template: str, table: str, key: str) -> str:
    return template.format(table=table, key=key, t=":token", lim="")


def _mariadb(template: str, table: str, key: str) -> str:
    return fence_sql.FOR + _plain(template, table, key)


def _postgresql(template: str, table: str, key: str) -> str:
    update = template.format(table=table, key=key, t=fence_sql.BIGINT, lim=" FROM lim")
    return fence_sql.limited(update)
