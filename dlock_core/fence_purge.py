"""Keep the fence table small: old rows give way to one floor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    Execute = Callable[[str, tuple[Any, ...]], list[tuple[Any, ...]]]
    """Send one statement in autocommit, `%s` standing for each parameter, and give its rows."""

__all__ = ["purge"]

DAY: Final = 86_400_000_000
BATCH: Final = 500

_NEWEST: Final = "CASE WHEN token > s_token THEN token ELSE s_token END"
# Tokens below 10**15 are no times in microseconds: they have no age.
_OLD: Final = f"name <> '' AND {_NEWEST} >= 1000000000000000 AND {_NEWEST} < %s"
_HIGHEST: Final = f"SELECT MAX({_NEWEST}) FROM dlock_fence WHERE {_OLD}"  # noqa: S608

_INSERT: Final = "INSERT INTO dlock_fence (name, token, holder, s_token) VALUES ('', %s, '', 0)"
_RAISE: Final = """
ON CONFLICT (name) DO UPDATE SET token = excluded.token WHERE dlock_fence.token < excluded.token"""
_RAISE_MYSQL: Final = "\nON DUPLICATE KEY UPDATE token = GREATEST(token, VALUES(token))"

_SOME: Final = f"SELECT name FROM dlock_fence WHERE {_OLD} LIMIT {BATCH}"  # noqa: S608
_SKIPPING: Final = " FOR UPDATE SKIP LOCKED"
_DELETE: Final = f"DELETE FROM dlock_fence WHERE {_OLD} AND name IN "  # noqa: S608


def purge(execute: Execute, vendor: str, days: int) -> int:
    """Replace fence rows whose token is older than so many days by a floor that refuses all such tokens; tell how many.

    Only tokens that are times in microseconds (10**15 and more) have an age; others stay. Rows that a transaction is
    at work on stay, too; one that begins in the very moment may be waited for.
    """
    before = int(time.time() * 1_000_000) - days * DAY
    ((highest,),) = execute(_HIGHEST, (before,))
    if highest is None:
        return 0
    raised = _RAISE_MYSQL if vendor in ("mysql", "mariadb") else _RAISE
    execute(_INSERT + raised, (highest,))  # committed before the first row goes: a missing row is never without a floor
    look, removed = _SOME if vendor == "sqlite" else _SOME + _SKIPPING, 0
    while names := [name for (name,) in execute(look, (before,))]:
        execute(f"{_DELETE}({', '.join(['%s'] * len(names))})", (before, *names))
        removed += len(names)
    return removed
