"""Statements through libpq itself, on connections of ours that psycopg 3 made: its cursors cost more than the lock.

The session is the same, and so are the errors. (psycopg documents `pq` for such use.)
"""

from __future__ import annotations

import re
import select
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from psycopg.errors import OperationalError, error_from_result
from psycopg.pq import ExecStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from psycopg.pq.abc import PGconn, PGresult

__all__ = ["Libpq"]

_PARAMETER: Final = re.compile(r"(?<!:):(\w+)")
_DONE: Final = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)
_READ: Final[dict[int, Callable[[bytes], Any]]] = {16: b"t".__eq__, 20: int, 21: int, 23: int, 701: float}
"""By the number of a type: boolean, three sizes of integer, double precision. All others are texts."""


class Libpq:
    """One connection, which nobody else uses meanwhile."""

    def __init__(self, pgconn: PGconn) -> None:
        self._pgconn = pgconn
        self._names: dict[str, bytes] = {}
        """What its prepared statements are called."""
        self._arrived = select.poll()
        self._arrived.register(pgconn.socket, select.POLLIN)

    def execute(self, sql: str, params: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement with `:name` parameters, and give its rows; raises what psycopg raises."""
        text, order = _numbered(sql)
        self._pgconn.send_query_params(text, _values(params, order))
        return _rows(self._answer())

    def prepared(self, sql: str, params: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """The same for a statement that comes again and again."""
        text, order = _numbered(sql)
        name = self._names.get(sql) or self._prepare(sql, text)
        self._pgconn.send_query_prepared(name, _values(params, order))
        return _rows(self._answer())

    def _prepare(self, sql: str, text: bytes) -> bytes:
        name = b"dlock_%d" % len(self._names)
        self._pgconn.send_prepare(name, text)
        self._answer()
        self._names[sql] = name
        return name

    def _answer(self) -> PGresult:
        answer = None
        while (result := self._next()) is not None:
            answer = result
        if answer is None:
            raise OperationalError("the server has closed the connection")
        if answer.status not in _DONE:
            raise error_from_result(answer)
        return answer

    def _next(self) -> PGresult | None:
        """Wait in Python, where signals come through; what was sent is small, and does not wait to be sent."""
        while self._pgconn.is_busy():
            self._arrived.poll()
            self._pgconn.consume_input()
        return self._pgconn.get_result()


def _values(params: Mapping[str, Any], order: tuple[str, ...]) -> list[bytes]:
    return [str(params[name]).encode() for name in order]


def _rows(result: PGresult) -> list[tuple[Any, ...]]:
    columns = [(number, _READ.get(result.ftype(number), bytes.decode)) for number in range(result.nfields)]
    return [
        tuple([None if (value := result.get_value(row, number)) is None else read(value) for number, read in columns])
        for row in range(result.ntuples)
    ]


@lru_cache(maxsize=64)
def _numbered(sql: str) -> tuple[bytes, tuple[str, ...]]:
    """Write `:name` parameters as $1, $2; and tell whose value each is."""
    names = tuple(dict.fromkeys(_PARAMETER.findall(sql)))
    return _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", sql).encode(), names
