"""The hooks that run before the first statement of one connection's transaction."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sqlalchemy import event
from sqlalchemy.exc import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

    Hook: TypeAlias = Callable[[Connection], None]

__all__ = ["EVADED", "FirstStatementHooks"]

EVADED: Final = (
    "dlock: because of an exception while this transaction began, the lock does not protect it: roll it back"
)
"""Why a COMMIT is refused."""

# After an error PostgreSQL accepts no statement before the rollback to a savepoint.
_ENDS_SAVEPOINT: Final = ("RELEASE SAVEPOINT", "ROLLBACK TO SAVEPOINT")
# On MySQL and MariaDB any other statement may take the transaction's snapshot, which must not be older than the hooks.
_WITHOUT_SNAPSHOT: Final = re.compile(r"\s*(?:SET(?!\s+STATEMENT\b)|USE)\b", re.IGNORECASE)


class FirstStatementHooks:
    """Hooks that are called once, before the first statement of one connection's transaction: the fence's admit.

    A hook that has succeeded is called again if its work may have been undone: by a savepoint that was rolled back, or
    by a database that has rolled back everything and continues. Hooks are not called for statements that hooks send.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.due: list[Hook] = []
        """The hooks that are due."""
        self._done: list[Hook] = []
        self._in_savepoint: list[Hook] = []
        """The hooks that were called inside a savepoint, whose rollback would undo their work."""
        self.is_busy = False
        """Whether one of them is being called, and sends its statements."""
        self.is_unanswered = False
        """Whether a statement has failed, or was interrupted: the database may have rolled everything back."""
        self.listens = False
        """Whether statements of the connection are intercepted, or are about to be."""
        self._hears = False
        """Whether they certainly are: no interrupt came in between."""
        self._is_held: Callable[[], bool] = _never
        self._comment = ""

    def add(self, *hooks: Hook) -> None:
        """Call hooks in the next `run()`, once, and again if their work may have been undone."""
        if self.due or self._done or self._in_savepoint:
            for hook in hooks:
                self.discard(hook)
        self.due.extend(hooks)

    def postpone(self, is_held: Callable[[], bool]) -> None:
        """Call the hooks before the first statement that is sent while `is_held()` is false, or before COMMIT."""
        self._is_held = is_held
        self._listen()

    def discard(self, hook: Hook) -> None:
        """Remove a hook."""
        for hooks in (self.due, self._done, self._in_savepoint):
            while hook in hooks:
                hooks.remove(hook)

    def run(self) -> None:
        """Call the hooks that are due. A hook that raises stays due: no statement passes before it has succeeded."""
        if self.is_busy or not self.due:
            return
        try:
            self.is_busy = True
            while self.due:
                hook, may_be_undone = self.due[0], self.connection.in_nested_transaction()
                hook(self.connection)
                if hook in self.due:  # it may have removed itself
                    (self._in_savepoint if may_be_undone else self._done).append(hook)
                    self.due.remove(hook)  # last, because an interrupt before this could lose it
        except BaseException:
            self._listen()
            raise
        finally:
            self.is_busy = False

    def run_last(self) -> None:
        """Call the hooks that are due, before COMMIT, unless statements may have bypassed one of them."""
        if self.is_busy or not self._hears:
            raise InvalidRequestError(EVADED)
        self.run()

    def mark(self, comment: str) -> None:
        """Put a comment before each statement, except for executemany: drivers parse the beginning of those."""
        self._comment = comment
        self._listen()

    def clear(self) -> None:
        """Remove all hooks, because everything is being rolled back, and the statements for that must pass."""
        self.due, self._done, self._in_savepoint = [], [], []

    def make_up(self) -> None:
        """Call all hooks again: the database may have rolled everything back, and the program swallowed its error."""
        self.due += self._done
        self._done = []
        self.note_savepoint_undone()
        self.is_unanswered = False

    def note_savepoint_undone(self) -> None:
        """Call again the hooks whose work a savepoint's rollback has undone."""
        self.due += self._in_savepoint
        self._in_savepoint = []
        if self.due:
            self._listen()

    def end(self) -> None:
        """Stop intercepting: the transaction has ended, and its connection may be used further."""
        self._hears = False
        with suppress(InvalidRequestError, ValueError):  # an interrupt came in the middle of this, or of `_listen`
            event.remove(self.connection, "before_cursor_execute", self._before_statement)
        self.listens = False

    def _listen(self) -> None:
        if not self._hears:
            if self.listens:
                self.end()
            self.listens = True
            event.listen(self.connection, "before_cursor_execute", self._before_statement, retval=True)
            self._hears = True

    def _before_statement(
        self, _connection: Connection, _cursor: object, statement: str, parameters: Any, *rest: Any
    ) -> tuple[str, Any]:
        if not statement.startswith(_ENDS_SAVEPOINT) and not self._may_pass(statement):
            self.run()
        _context, many = rest
        return statement if many else self._comment + statement, parameters

    def _may_pass(self, statement: str) -> bool:
        may_take_snapshot = self.connection.dialect.name in ("mysql", "mariadb")
        return self._is_held() and not (may_take_snapshot and not _WITHOUT_SNAPSHOT.match(statement))


def _never() -> bool:
    return False
