"""What an integration provides: connections in AUTOCOMMIT, and a place where blocking functions may run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlock_core.runtime import Runtime

__all__ = ["Connection", "Connector"]

T = TypeVar("T")


class Connection(Protocol):
    """One connection in AUTOCOMMIT, used by one step at a time; its methods block and raise the driver's errors."""

    vendor: str
    """postgresql, mariadb, mysql or sqlite."""
    driver: Any
    """The driver's own connection, for what only drivers can do."""

    def execute(self, sql: str, params: Mapping[str, Any] = ...) -> list[tuple[Any, ...]]:
        """Run one statement with `:name` parameters, and commit it; give its rows, none where it has none.

        A percent sign in the text is a percent sign, and a cast is written CAST(… AS …).
        """

    def changed(self) -> int:
        """Return how many rows the last statement has changed."""

    def listen(self, channel: str, heard: Callable[[str], None], ended: Callable[[], None]) -> None:
        """PostgreSQL: have `heard` called with the payload of each NOTIFY until the session is cut, and `ended` then.

        It is of no other use from now on, and cutting it closes it, too.
        """

    def close(self) -> None:
        """Close the connection; never raises."""

    def abort(self) -> None:
        """Break the connection off, from any thread; a caller that waits for an answer gets an error. Never raises."""


class Connector(Protocol):
    """Makes sessions with one database; `connect` blocks, so it is only called inside `call`."""

    vendor: str
    """postgresql, mysql (which may turn out to be mariadb) or sqlite: known without I/O."""
    title: str
    """Names the database in errors, without a password: "the database 'default'"."""
    remedy: str
    """What to run when a table of ours is missing: "python manage.py migrate"."""
    errors: tuple[type[Exception], ...]
    """What the driver raises, while it connects, too."""

    def connect(self, limit: float) -> Connection:
        """Open a connection within `limit` seconds; raises one of `errors`, OSError or TimeoutError."""

    async def call(self, runtime: Runtime, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking function where this database's sessions may be used, to its end even when cancelled."""
