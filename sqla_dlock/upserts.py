"""Which columns an upsert sets: an INSERT with a clause of its dialect that updates the row which is already there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.sql import visitors

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["upserted_keys"]

_CLAUSES: Final = {"on_conflict_do_update": "update_values_to_set", "on_duplicate_key_update": "update"}
"""The clauses that turn an INSERT into an UPDATE, and the attribute in which each keeps what it sets."""


def upserted_keys(statement: Any) -> Iterator[set[str]]:
    """Yield the keys of the columns that each such clause of a statement sets, also in its CTEs."""
    for clause in visitors.iterate(statement):
        values: Any = getattr(clause, _CLAUSES.get(clause.__visit_name__, ""), None)
        if values is not None:
            yield {str(getattr(column, "key", column)) for column in dict(values)}
