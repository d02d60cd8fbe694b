"""The columns of `FencedMixin`, which only the fence writes: other statements that would set them are refused.

A token that was set back would let older holders in again. INSERTs of new rows and textual SQL are not covered.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Insert, Update

from dlock_core.errors import NotSupported
from sqla_dlock.statements import is_replace, plain, set_values, upserted_values, without_alias, writes_in_ctes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["FENCE_COLUMNS", "refuse_fence_columns", "refuse_fence_columns_in_ctes"]

FENCE_COLUMNS: Final = ("dlock_token", "dlock_holder")


def refuse_fence_columns(_connection: Any, statement: Any, many: Any, params: Any, _options: Any) -> None:
    """Raise NotSupported for a write that sets a column of the fence of a row back; a listener to "before_execute"."""
    statement = plain(statement)
    if isinstance(statement, Update):
        _refuse_update(statement, params or (many[0] if many else ()))
    elif isinstance(statement, Insert):
        _refuse_replace(statement)
        _refuse_upsert(statement)


def refuse_fence_columns_in_ctes(*execution: Any) -> None:
    """Do the same for the CTEs of a statement; a listener to "before_cursor_execute"."""
    for statement in writes_in_ctes(execution[4]):
        refuse_fence_columns(None, statement, None, None, None)


def _refuse_update(statement: Update, parameters: Iterable[str]) -> None:
    """Refuse columns of the fence in the table of an UPDATE, and in the others that MySQL can write with it."""
    own = without_alias(statement.table)
    _refuse(own, chain(_names_of(own, statement), parameters), "UPDATE")
    for table in {without_alias(column.table) for column in set_values(statement) if hasattr(column, "table")} - {own}:
        _refuse(table, _names_of(table, statement), "UPDATE")


def _refuse_replace(statement: Insert) -> None:
    if FENCE_COLUMNS[0] in statement.table.c and is_replace(statement):
        raise NotSupported(
            f"REPLACE of {statement.table.name} would set {FENCE_COLUMNS[0]} back, and an older holder could commit: "
            "update the row, or insert it with on_conflict_do_update()"
        )


def _refuse_upsert(statement: Insert) -> None:
    _refuse(statement.table, chain.from_iterable(upserted_values(statement)), "upsert")


def _refuse(table: Any, names: Iterable[str], what: str) -> None:
    if FENCE_COLUMNS[0] in table.c and (found := sorted(set(FENCE_COLUMNS).intersection(names))):
        raise NotSupported(
            f"only the fence of a lock writes {' and '.join(found)} of {table.name}, or an older holder "
            f"could commit: leave {'them' if len(found) > 1 else 'it'} out of what the {what} sets"
        )


def _names_of(table: Any, statement: Update) -> Iterator[str]:
    """Yield the names of the columns of a table that an UPDATE sets; a name without a table may be one of any."""
    for column in set_values(statement):
        if not hasattr(column, "table"):
            yield column
        elif without_alias(column.table) == table:
            yield column.key
