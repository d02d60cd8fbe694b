"""What a statement does, from its text: whether it surely only reads, and whether it ends a transaction.

Only known kinds count as reads, so that a comment, a second statement or a new kind of statement cannot hide a write.
What a function does that a SELECT calls cannot be seen, nor what follows the body of a routine in the same text.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import takewhile
from typing import Final

__all__ = ["ends_transaction", "is_data_statement", "surely_reads"]

_COMMENT: Final = r"--[^\n]*|/\*.*?\*/"
_DOLLARS: Final = r"(?<![\w$])(?P<quote>\$(?:[A-Za-z_]\w*)?\$).*?(?P=quote)"
"""A literal of PostgreSQL, in which the body of a function is written."""
_SKIPPED: Final = (
    re.compile(rf"""({_COMMENT})|'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|{_DOLLARS}""", re.DOTALL),
    re.compile(rf"""({_COMMENT})|'(?:[^'\\]|''|\\.)*'|"(?:[^"\\]|""|\\.)*"|`[^`]*`|{_DOLLARS}""", re.DOTALL),
)
"""Comments, literals and quoted names, once with a backslash as a plain character and once as an escape.

Which of the two a server takes depends on its settings, so both readings must agree.
"""
_DATA_STATEMENTS: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")
_READS: Final = re.compile(
    r"[\s(]*(?:(?:SELECT|WITH|VALUES|TABLE|SHOW|DESCRIBE|DESC|PRAGMA|FETCH|MOVE|DECLARE|CLOSE|LISTEN|UNLISTEN|USE|RESET|DISCARD"
    r"|BEGIN|START\s+TRANSACTION|COMMIT|END|ROLLBACK|ABORT|SAVEPOINT|RELEASE)\b"
    r"|SET\b(?!\s+STATEMENT\b)|EXPLAIN\b(?!.*\bANALY[SZ]E\b))",
    re.IGNORECASE | re.DOTALL,
)
_WRITES: Final = re.compile(
    r"\b(?:INSERT\s+(?:OR\s+\w+\s+)?INTO|DELETE\s+FROM|MERGE\s+INTO|INTO|(?<!FOR )(?<!KEY )UPDATE)\b", re.IGNORECASE
)
_EXECUTED: Final = re.compile(r"/\*M?!\d*")
"""Begins a comment whose content MySQL and MariaDB execute."""
_ENDS: Final = re.compile(
    r"[\s\ufeff]*(?:COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION|ROLLBACK(?!(?:\s+\w+)?\s+TO\b))\b",
    re.IGNORECASE,
)
_ROUTINE: Final = re.compile(r"CREATE\b.*\b(?:TRIGGER|FUNCTION|PROCEDURE|EVENT)\b.*\bBEGIN\b", re.IGNORECASE)
"""The head of a routine; in the body that follows, BEGIN and END enclose a block and end no transaction."""


MAX_REMEMBERED_CHARACTERS: Final = 4096
MAX_REMEMBERED_TEXTS: Final = 256


def surely_reads(sql: str) -> bool:
    """Return whether each statement in a text is of a kind that reads, or only begins or ends a transaction.

    An ORM sends the same few texts again and again, so the answers for those that are not long are remembered.
    """
    return _remembered(sql) if len(sql) <= MAX_REMEMBERED_CHARACTERS else _surely_reads(sql)


@lru_cache(maxsize=MAX_REMEMBERED_TEXTS)
def _remembered(sql: str) -> bool:
    return _surely_reads(sql)


def _surely_reads(sql: str) -> bool:
    if _EXECUTED.search(sql):
        return False
    return all(_reads(part) for skipped in _SKIPPED for part in _parts(sql, skipped))


def is_data_statement(sql: str) -> bool:
    """Return whether a text is surely one statement that reads or writes rows; most are, and few steps tell.

    Such a statement ends no transaction, and makes or ends no savepoint.
    """
    return sql.startswith(_DATA_STATEMENTS) and ";" not in sql


def ends_transaction(sql: str) -> bool:
    """Return whether a text has a statement that ends the open transaction, or begins another one."""
    if is_data_statement(sql):
        return False
    texts = {sql, _EXECUTED.sub(" ", sql)}
    readings = (takewhile(_is_no_routine, _parts(text, skipped)) for text in texts for skipped in _SKIPPED)
    return any(_ENDS.match(part) for parts in readings for part in parts)


def _parts(sql: str, skipped: re.Pattern[str]) -> list[str]:
    plain = skipped.sub(lambda found: " " if found[1] else " q ", sql)
    return [part for each in plain.split(";") if (part := " ".join(each.split()))]


def _is_no_routine(part: str) -> bool:
    return _ROUTINE.match(part) is None


def _reads(part: str) -> bool:
    return _READS.match(part) is not None and _WRITES.search(part) is None
