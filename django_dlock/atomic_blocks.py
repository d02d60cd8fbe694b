"""Django's `atomic()` blocks: what it records of them on a connection, a test case's, and dlock's own.

Django's lists are read, and in two places corrected: where a block has no savepoint although dlock must see its end,
and where a block was not entered although Django takes itself to be in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.transaction import atomic

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.transaction import Atomic

__all__ = ["NoSavepoint", "anchor_of", "has_open_transaction", "own_block", "undo_begun_block"]


class NoSavepoint(str):
    """Replaces Django's None for a block with savepoint=False: dlock sees its end, the database does not."""

    __slots__ = ()


def has_open_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Return Django's state; a test case's own blocks, always the outermost ones, do not count."""
    blocks: list[Any] = connection.atomic_blocks
    if blocks:
        return not blocks[-1]._from_testcase and not connection.closed_in_transaction
    if connection.connection is None:
        return not connection.settings_dict["AUTOCOMMIT"]
    return not connection.autocommit


def anchor_of(connection: BaseDatabaseWrapper) -> str | None:
    """Return the savepoint that stands for the program's outermost transaction inside a test case's, otherwise None."""
    blocks: list[Any] = connection.atomic_blocks
    savepoints = connection.savepoint_ids
    first = next((n for n, block in enumerate(blocks) if not block._from_testcase), 0)
    if first == 0:
        return None
    index = first - (len(blocks) - len(savepoints))
    savepoints[index] = savepoints[index] or NoSavepoint("none")
    return savepoints[index]


def undo_begun_block(connection: BaseDatabaseWrapper) -> None:
    """Undo what Django has recorded of an outermost `atomic()` whose savepoint is refused.

    Without autocommit Django makes a savepoint for the outermost block, too, and expects it to succeed: otherwise it
    would take itself to be in the block from then on, and refuse every `rollback()`. In any other block, the list of
    savepoints is not empty, or the block is to be committed.
    """
    if not connection.commit_on_exit and not connection.savepoint_ids:
        connection.in_atomic_block = False


def own_block(using: str) -> Atomic:
    """Return `atomic()` for work of dlock's own, to be entered at once: its end never commits the caller's transaction.

    With autocommit off, sqlite3 sends BEGIN only before the first write. Sent before that, the savepoint of `atomic()`
    is the whole transaction to SQLite, and its RELEASE a COMMIT.
    """
    connection: Any = connections[using]
    if connection.vendor == "sqlite" and not connection.in_atomic_block and not connection.get_autocommit():
        driver = connection.connection  # No hook is called for this BEGIN, nor for the one that sqlite3 sends.
        if not driver.in_transaction and getattr(driver, "autocommit", None) is not True:  # then COMMIT has no effect
            with connection.wrap_database_errors:
                driver.execute("BEGIN")
    return atomic(using)
