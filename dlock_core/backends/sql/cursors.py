"""Cursors of drivers, closed in the end without hiding what went wrong."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cursor_of"]


@contextmanager
def cursor_of(connection: Any) -> Iterator[Any]:
    """Give a cursor for a block; mysqlclient's `close()` fails after a Ctrl-C, and would turn it into another error."""
    cursor = connection.cursor()
    try:
        yield cursor
    except BaseException:
        with suppress(Exception):
            cursor.close()
        raise
    cursor.close()
