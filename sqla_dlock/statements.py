"""What a statement writes where it is easily overlooked: in the clause that makes an INSERT an upsert, and in CTEs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Insert, Update
from sqlalchemy.sql import visitors

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["upserted_keys", "writes_in_ctes"]

_CLAUSES: Final = {"on_conflict_do_update": "update_values_to_set", "on_duplicate_key_update": "update"}
"""The clauses that turn an INSERT into an UPDATE, and the attribute in which each keeps what it sets."""


def upserted_keys(statement: Any) -> Iterator[set[str]]:
    """Yield the keys of the columns that each such clause of a statement sets, also in its CTEs."""
    for clause in visitors.iterate(statement):
        values: Any = getattr(clause, _CLAUSES.get(clause.__visit_name__, ""), None)
        if values is not None:
            yield {str(getattr(column, "key", column)) for column in dict(values)}


def writes_in_ctes(context: Any) -> Iterator[Any]:
    """Yield each UPDATE and INSERT in a CTE of the statement that is executed in this context.

    The compiled statement has its CTEs at hand, so that a statement without any costs nothing.
    """
    for cte in getattr(getattr(context, "compiled", None), "ctes", None) or ():
        if isinstance(cte.element, Update | Insert):
            yield cte.element
