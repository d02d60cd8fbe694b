"""Statements through libpq directly, on our own connections of psycopg 3: its cursors cost more than the lock.

The session is the same, and so are the errors. (psycopg documents `pq` for such use.)
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any, Final

from psycopg.errors import OperationalError, error_from_result
from psycopg.pq import ExecStatus

from dlock_core.sql.database import numbered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from psycopg import Connection
    from psycopg.pq.abc import PGresult

__all__ = ["Libpq"]

_DONE: Final = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)
_READ: Final[dict[int, Callable[[bytes], Any]]] = {16: b"t".__eq__, 20: int, 21: int, 23: int, 701: float}
"""Parsers by the number of a type: boolean, three sizes of integer, double precision. All others are texts."""


class Libpq:
    """One connection; nothing else uses it at the same time."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._pgconn, self._encoding = connection.pgconn, connection.info.encoding
        self._names: dict[str, bytes] = {}
        """The names of its prepared statements."""
        self._arrived = select.poll()
        self._arrived.register(self._pgconn.socket, select.POLLIN)

    def execute(self, sql: str, params: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement with `:name` parameters, and return its rows; raises psycopg's errors."""
        text, order = numbered(sql)
        self._pgconn.send_query_params(self._bytes(text), self._values(params, order))
        return self._rows(self._answer())

    def prepared(self, sql: str, params: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """The same for a statement that is repeated often."""
        text, order = numbered(sql)
        name = self._names.get(sql) or self._prepare(sql, text)
        self._pgconn.send_query_prepared(name, self._values(params, order))
        return self._rows(self._answer())

    def _prepare(self, sql: str, text: str) -> bytes:
        name = b"dlock_%d" % len(self._names)
        self._pgconn.send_prepare(name, self._bytes(text))
        self._answer()
        self._names[sql] = name
        return name

    def _answer(self) -> PGresult:
        # libpq returns None after the last result, and has to be read until then: a remaining result would be taken for
        # the answer to the next statement.
        answer = None
        while (result := self._next()) is not None:
            answer = result
        if answer is None:
            raise OperationalError("the server has closed the connection")
        if answer.status not in _DONE:
            raise error_from_result(answer)
        return answer

    def _next(self) -> PGresult | None:
        """Return the next result of the statement that was sent, None after the last one."""
        # libpq's own PQgetResult waits in C, where Python runs no signal handler: a Ctrl-C would take effect only when
        # the lock is granted, which may take hours. So the wait is a poll in Python. No flush is needed first, because
        # our statements are smaller than a socket's buffer.
        while self._pgconn.is_busy():
            self._arrived.poll()
            self._pgconn.consume_input()
        return self._pgconn.get_result()

    def _values(self, params: Mapping[str, Any], order: tuple[str, ...]) -> list[bytes]:
        return [self._bytes(str(params[name])) for name in order]

    def _bytes(self, text: str) -> bytes:
        return text.encode(self._encoding)

    def _rows(self, result: PGresult) -> list[tuple[Any, ...]]:
        columns = [(number, _READ.get(result.ftype(number), self._text)) for number in range(result.nfields)]
        values = result.get_value
        return [
            tuple([None if (value := values(row, number)) is None else read(value) for number, read in columns])
            for row in range(result.ntuples)
        ]

    def _text(self, value: bytes) -> str:
        return value.decode(self._encoding)
