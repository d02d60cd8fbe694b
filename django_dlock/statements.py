"""Calls hooks before the statements that user code sends on one database connection.

Its wrapper is the first of the connection's execute wrappers, which live as long as the connection object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from django_dlock.watch import watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.base.base import BaseDatabaseWrapper

    Hook: TypeAlias = Callable[[BaseDatabaseWrapper, str, bool], None]

__all__ = ["Announcer", "announcer"]

# After an error PostgreSQL accepts nothing before the rollback to a savepoint.
_DJANGOS_OWN: Final = ("BEGIN", "RELEASE SAVEPOINT", "ROLLBACK TO SAVEPOINT")
_WITHOUT_SNAPSHOT: Final = (*_DJANGOS_OWN, "SAVEPOINT", "SHOW ", "SET ")


class Announcer:
    """The execute wrapper of one connection; hooks never hear of each other's statements or their own."""

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.quietly = _Quietly()
        """A block in which no hook is called."""

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, *rest: Any) -> Any:
        """Stand in for Django's execute(sql, params, many, context)."""
        connection, text = rest[1]["connection"], _text(sql)
        transaction = watch(connection).transaction()
        if not self.quietly.depth:
            self.announce(connection, text, inside=transaction is not None)
        if transaction is not None and self._may_take_snapshot(text):
            transaction.has_spoken = True
        if transaction is not None and transaction.comment and isinstance(sql, str) and not rest[0]:
            sql = transaction.comment + sql  # not of many: drivers read how those begin
        return execute(sql, params, *rest)

    def announce(self, connection: BaseDatabaseWrapper, sql: str, *, inside: bool) -> None:
        if sql.startswith(_DJANGOS_OWN) or (sql.startswith("SAVEPOINT") and not inside):
            return
        with self.quietly:
            for hook in self.hooks:
                hook(connection, sql, inside)

    def _may_take_snapshot(self, sql: str) -> bool:
        if sql.startswith("SET STATEMENT"):  # MariaDB: a statement of any kind
            return not self.quietly.depth  # ours locks a row, which takes no snapshot there
        return not sql.startswith(_WITHOUT_SNAPSHOT)

    def tell(self, hook: Hook) -> None:
        """Have a hook called before every statement from now on; asking again changes nothing."""
        if hook not in self.hooks:
            self.hooks.append(hook)


class _Quietly:
    """Blocks inside of each other, all of one thread: the connection's."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


def announcer(connection: BaseDatabaseWrapper) -> Announcer:
    """The announcer of a connection, set up when first asked for."""
    for wrapper in connection.execute_wrappers:
        if isinstance(wrapper, Announcer):
            return wrapper
    new = Announcer()
    if (transaction := watch(connection).transaction()) is not None:
        transaction.has_spoken = True  # before we listened
    # Not at the end: execute_wrapper() takes away whatever is last when its block is left.
    connection.execute_wrappers.insert(0, new)
    return new


def _text(sql: Any) -> str:
    """The statement as text: psycopg also takes bytes and its own composed objects."""
    if isinstance(sql, bytes):
        return sql.decode(errors="replace")
    return str(sql.as_string(None) if hasattr(sql, "as_string") else sql)
