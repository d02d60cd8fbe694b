"""The columns of `FencedMixin`, which only the fence writes: other statements that would set them are refused.

A token that was set back would let older holders in again. INSERTs of new rows and textual SQL are not covered.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Insert, Update
from sqlalchemy.orm import FromStatement

from dlock_core.errors import NotSupported
from sqla_dlock.statements import upserted_keys, writes_in_ctes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["FENCE_COLUMNS", "refuse_fence_columns", "refuse_fence_columns_in_ctes"]

FENCE_COLUMNS: Final = ("dlock_token", "dlock_holder")


def refuse_fence_columns(_connection: Any, statement: Any, many: Any, params: Any, _options: Any) -> None:
    """Raise NotSupported for an UPDATE or upsert that sets a column of the fence; a listener to "before_execute"."""
    statement = statement.element if isinstance(statement, FromStatement) else statement
    if isinstance(statement, Update | Insert):
        _refuse(statement, many, params)


def refuse_fence_columns_in_ctes(*execution: Any) -> None:
    """Do the same for the CTEs of a statement; a listener to "before_cursor_execute"."""
    for statement in writes_in_ctes(execution[4]):
        _refuse(statement, None, None)


def _refuse(statement: Any, many: Any, params: Any) -> None:
    table: Any = getattr(statement.table, "element", statement.table)  # of an alias
    if FENCE_COLUMNS[0] not in table.c:
        return
    sets = upserted_keys(statement) if isinstance(statement, Insert) else [_set_by_update(statement, many, params)]
    if found := sorted(set(FENCE_COLUMNS).intersection(chain.from_iterable(sets))):
        raise NotSupported(
            f"only the fence of a lock writes {' and '.join(found)} of {table.name}, or an older holder "
            f"could commit: leave {'them' if len(found) > 1 else 'it'} out of what the "
            f"{'upsert sets' if isinstance(statement, Insert) else 'UPDATE sets'}"
        )


def _set_by_update(statement: Any, many: Any, params: Any) -> Iterator[str]:
    yield from _names(statement._values or ())  # noqa: SLF001 - nothing public tells what a statement sets
    yield from _names(dict(getattr(statement, "_ordered_values", None) or ()))  # before SQLAlchemy 2.1
    yield from params or ()
    yield from many[0] if many else ()


def _names(columns: Iterable[Any]) -> Iterator[str]:
    return (getattr(column, "key", column) for column in columns)
