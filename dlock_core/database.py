"""A database that an operator looks at: what the integrations give to the inspector and the doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Database"]


class Database(Protocol):
    """A database that is asked for its locks, on a connection of its own and never in the caller's transaction."""

    @property
    def alias(self) -> str:
        """What it is called in listings."""

    @property
    def vendor(self) -> str:
        """The database: postgresql, mysql, mariadb or sqlite; may have to ask it, see `query`."""

    def query(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Read rows, `%s` standing for each parameter; raises BackendUnavailable, within a few seconds."""

    def close(self) -> None:
        """Close the connection that `query` has opened."""
