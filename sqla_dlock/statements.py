"""Calls hooks before the first statement of a connection's transaction, and again when their work may be undone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sqlalchemy import event

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

    Hook: TypeAlias = Callable[[Connection], None]

__all__ = ["Gate"]

# After an error PostgreSQL accepts nothing before the rollback to a savepoint.
_ENDS_SAVEPOINT: Final = ("RELEASE SAVEPOINT", "ROLLBACK TO SAVEPOINT")


class Gate:
    """What every statement of one connection's transaction has to pass; hooks never hear of their own statements."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._due: list[Hook] = []
        self._in_savepoint: list[Hook] = []
        """Those called inside a savepoint: its rollback would undo their work."""
        self._is_busy = self._listens = False
        self._comment = ""

    def add(self, hook: Hook) -> None:
        """Have a hook called by the next `open()`, once."""
        self.discard(hook)
        self._due.append(hook)

    def discard(self, hook: Hook) -> None:
        """Call a hook no more."""
        for hooks in (self._due, self._in_savepoint):
            while hook in hooks:
                hooks.remove(hook)

    def open(self) -> None:
        """Call the hooks that are due. One that raises stays due: no statement passes before it has succeeded."""
        if self._is_busy or not self._due:
            return
        self._is_busy = True
        try:
            while self._due:
                self._call(self._due[0])
        except BaseException:
            self._listen()
            raise
        finally:
            self._is_busy = False

    def mark(self, comment: str) -> None:
        """Have a comment stand before each statement, but not of many: drivers read how those begin."""
        self._comment = comment
        self._listen()

    def close(self) -> None:
        """Hear that everything is being rolled back: what that takes has to pass."""
        self._due, self._in_savepoint = [], []

    def undone(self) -> None:
        """Hear that a savepoint was rolled back."""
        self._due += self._in_savepoint
        self._in_savepoint = []
        if self._due:
            self._listen()

    def end(self) -> None:
        """Hear that the transaction has ended; its connection may go on."""
        if self._listens:
            event.remove(self.connection, "before_cursor_execute", self._before_statement)

    def _call(self, hook: Hook) -> None:
        may_be_undone = self.connection.in_nested_transaction()
        hook(self.connection)
        if hook in self._due:  # it may have been discarded meanwhile
            self._due.remove(hook)
            if may_be_undone:
                self._in_savepoint.append(hook)

    def _listen(self) -> None:
        if not self._listens:
            self._listens = True
            event.listen(self.connection, "before_cursor_execute", self._before_statement, retval=True)

    def _before_statement(
        self, _connection: Connection, _cursor: object, statement: str, parameters: Any, *rest: Any
    ) -> tuple[str, Any]:
        if not statement.startswith(_ENDS_SAVEPOINT):
            self.open()
        _context, many = rest
        return statement if many else self._comment + statement, parameters
