"""What a statement does, by its text: whether it certainly only reads, and whether it ends a transaction.

Only known kinds count as reads, so that a comment, a second statement or a new kind of statement cannot hide a write.
The effects of a function that a SELECT calls cannot be seen, nor a statement after the body of a routine in the same
text.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "commits_by_itself",
    "commits_implicitly",
    "ends_transaction",
    "is_data_statement",
    "is_single",
    "may_run_another",
    "savepoint_changes",
    "surely_reads",
]

_COMMENT: Final = r"--[^\n]*|/\*.*?\*/"
_DOLLARS: Final = r"(?<![\w$])(?P<quote>\$(?:[A-Za-z_]\w*)?\$).*?(?P=quote)"
"""A literal of PostgreSQL, in which the body of a function is written."""
_QUOTED: Final = (
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`""",
    r"""'(?:[^'\\]|''|\\.)*'|"(?:[^"\\]|""|\\.)*"|`[^`]*`""",
)
_SKIPPED: Final = tuple(
    re.compile(rf"({comment})|{quoted}|{_DOLLARS}", re.DOTALL)
    for comment in (_COMMENT, rf"{_COMMENT}|\#[^\n]*")
    for quoted in _QUOTED
)
"""Comments, literals and quoted names, with a backslash as a plain character and as an escape.

The last two patterns treat # as the beginning of a comment, as MySQL does. The reading depends on the kind and the
settings of the server, so all readings must agree.
"""
_SKIPPED_IN_SQLITE: Final = re.compile(rf"({_COMMENT})|{_QUOTED[0]}|\[[^\]]*\]", re.DOTALL)
"""SQLite also has names in brackets, in which a quote begins no literal."""
_INNER_COMMENT: Final = re.compile(r"/\*(?:(?!/\*|\*/).)*\*/", re.DOTALL)
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
_MINUS_OR_COMMENT: Final = re.compile(r"--(?=\S)")
"""Begins a comment, but not for MySQL and MariaDB."""
_ENDS: Final = re.compile(
    r"[\s\ufeff]*(?:COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION|ROLLBACK(?!(?:\s+\w+)?\s+TO\b))\b",
    re.IGNORECASE,
)
_COMMITS: Final = re.compile(
    r"[\s\ufeff]*(?:SET\s+STATEMENT\b.*?\bFOR\s+)?(?:"
    r"COMMIT|ROLLBACK(?!(?:\s+\w+)?\s+TO\b)|BEGIN|START|STOP|CHANGE|ALTER|CREATE(?!\s+(?:OR\s+REPLACE\s+)?TEMPORARY\b)"
    r"|DROP(?!\s+(?:TEMPORARY|PREPARE)\b)|TRUNCATE|RENAME|GRANT|REVOKE|FLUSH|RESET|BACKUP|XA|INSTALL|UNINSTALL"
    r"|(?:UN)?LOCK\s+TABLES?|(?:ANALYZE|OPTIMIZE|REPAIR|CHECK)\s+(?:(?:NO_WRITE_TO_BINLOG|LOCAL)\s+)?(?:TABLES?|VIEW)"
    r"|CACHE\s+INDEX|LOAD\s+INDEX|SET\s+(?:PASSWORD|DEFAULT\s+ROLE))\b|[\s\ufeff]*SET\b.*\bautocommit\b\W*=(?!\s*(?:0|OFF|FALSE)\b)",
    re.IGNORECASE,
)
_IS_COMPLETE: Final = re.compile(
    r"[\s\ufeff(]*(?:SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH|VALUES|TABLE|SHOW|DESCRIBE|DESC|EXPLAIN|ANALYZE|USE|LOAD|DO"
    r"|HANDLER|KILL|HELP|CHECKSUM|PREPARE|DEALLOCATE|SAVEPOINT|RELEASE|ROLLBACK|CREATE|DROP|SET(?!\s+STATEMENT\b))\b",
    re.IGNORECASE,
)
"""A statement of MySQL and MariaDB that runs no other: neither CALL nor EXECUTE, nor a compound statement."""
_PLAIN_COMMENT: Final = re.compile(r"--[^\r\n]*|/\*(?!M?!)(?:(?!/\*).)*?\*/", re.DOTALL)
"""A comment for every server."""
_SAVEPOINT: Final = re.compile(
    r"\s*(?P<verb>(?i:SAVEPOINT|RELEASE(?:\s+SAVEPOINT)?|ROLLBACK(?:\s+(?:WORK|TRANSACTION))?\s+TO(?:\s+SAVEPOINT)?))"
    r"\s+(?:(?P<plain>[A-Za-z_][A-Za-z0-9_]*)|(?P<quote>[\"`])(?P<quoted>[a-z_][a-z0-9_]*)(?P=quote))\s*",
    re.ASCII,
)
"""A statement that creates or ends a savepoint with a plain name."""
_UNDOES: Final = re.compile(r"[\s\ufeff]*(?:SET\s+STATEMENT\b.*?\bFOR\s+)?(?:ROLLBACK|ABORT)\b", re.IGNORECASE)
_RELEASES: Final = re.compile(r"[\s\ufeff]*(?:SET\s+STATEMENT\b.*?\bFOR\s+)?RELEASE\b", re.IGNORECASE)
_ROUTINE: Final = re.compile(r"CREATE\b.*\b(?:TRIGGER|FUNCTION|PROCEDURE|EVENT)\b.*\bBEGIN\b", re.IGNORECASE)
"""The head of a routine; in the body that follows, BEGIN and END enclose a block and end no transaction."""


MAX_REMEMBERED_CHARACTERS: Final = 4096
MAX_REMEMBERED_TEXTS: Final = 256


def surely_reads(sql: str) -> bool:
    """Return whether each statement in a text is of a kind that reads, or only begins or ends a transaction.

    An ORM sends the same few texts repeatedly, so the answers for short texts are cached.
    """
    return _remembered(sql) if len(sql) <= MAX_REMEMBERED_CHARACTERS else _surely_reads(sql)


@lru_cache(maxsize=MAX_REMEMBERED_TEXTS)
def _remembered(sql: str) -> bool:
    return _surely_reads(sql)


def _surely_reads(sql: str) -> bool:
    if _EXECUTED.search(sql):
        return False
    return all(_reads(part) for parts in _readings(sql) for part in parts)


def commits_by_itself(sql: str) -> bool:
    """Return whether SQLite may commit a statement at once if no transaction is open, although its driver begins some.

    Python's sqlite3 sends BEGIN only before INSERT, UPDATE, DELETE and REPLACE: not before DDL, or a WITH that writes.
    """
    return not (is_data_statement(sql) or surely_reads(sql))


def is_data_statement(sql: str) -> bool:
    """Return whether a text is certainly one statement that reads or writes rows; most are, and the check is quick.

    Such a statement ends no transaction, and creates or ends no savepoint.
    """
    return sql.startswith(_DATA_STATEMENTS) and ";" not in sql


def is_single(sql: str, kind: re.Pattern[str]) -> bool:
    """Return whether a text is certainly one statement, which begins as a pattern says; its literals are left out."""
    if _EXECUTED.search(sql) or (";" in sql and _MINUS_OR_COMMENT.search(sql)):
        return False
    return all(len(parts) == 1 and kind.match(parts[0]) is not None for parts in _readings(sql))


def ends_transaction(sql: str) -> bool:
    """Return whether a text has a statement that ends the open transaction, or begins another one."""
    if is_data_statement(sql):
        return False
    return any(_ENDS.match(part) for part in _statements(sql))


def commits_implicitly(sql: str) -> bool:
    """Return whether MySQL and MariaDB commit the open transaction with a statement of this text.

    The list is their manuals': https://dev.mysql.com/doc/refman/8.4/en/implicit-commit.html,
    https://mariadb.com/kb/en/sql-statements-that-cause-an-implicit-commit/
    """
    return not is_data_statement(sql) and any(_COMMITS.match(part) for part in _statements(sql))


def may_run_another(sql: str) -> bool:
    """Return whether MySQL and MariaDB may run statements that are not in this text, such as those of a procedure."""
    if is_data_statement(sql):
        return False
    return _EXECUTED.search(sql) is not None or not all(_IS_COMPLETE.match(part) for part in _statements(sql))


SavepointChange: TypeAlias = tuple[str, str | None]


def savepoint_changes(sql: str) -> list[SavepointChange]:
    """Return what a text does to savepoints: SAVEPOINT, RELEASE or ROLLBACK, each with the savepoint's name.

    Two names are equal only if every server considers them equal. None stands for any name: the text, or the name in
    it, cannot be parsed with certainty. A savepoint that is created under such a name is left out.
    """
    parts = [part for part in _PLAIN_COMMENT.sub(" ", sql).split(";") if part.strip()]
    found = [each for part in parts if (each := _SAVEPOINT.fullmatch(part))]
    if len(found) == len(parts):
        return [(each["verb"].split()[0].upper(), (each["plain"] or "").lower() or each["quoted"]) for each in found]
    kinds = {"ROLLBACK": _UNDOES, "RELEASE": _RELEASES}
    return [(verb, None) for verb, kind in kinds.items() if any(kind.match(part) for part in _statements(sql))]


def _statements(sql: str) -> Iterator[str]:
    """Return each statement in a text, in every reading, with the executed comments as comments and as statements."""
    for text in {sql, _EXECUTED.sub(" ", sql)}:
        for parts in _readings(text):
            for part in parts:
                yield part
                if _ROUTINE.match(part):
                    break


def _readings(sql: str) -> Iterator[list[str]]:
    """Return the parts of a text in every reading; PostgreSQL's comments can be nested."""
    for text in {sql, _without_nested_comments(sql)}:
        for skipped in _SKIPPED if "#" in text else _SKIPPED[:2]:
            yield _parts(text, skipped)
        if "[" in text:
            yield _parts(text, _SKIPPED_IN_SQLITE)


def _without_nested_comments(sql: str) -> str:
    if sql.count("/*") < 2:
        return sql
    while (shorter := _INNER_COMMENT.sub(" ", sql)) != sql:
        sql = shorter
    return sql


def _parts(sql: str, skipped: re.Pattern[str]) -> list[str]:
    plain = skipped.sub(lambda found: " " if found[1] else " q ", sql)
    return [part for each in plain.split(";") if (part := " ".join(each.split()))]


def _reads(part: str) -> bool:
    return _READS.match(part) is not None and _WRITES.search(part) is None
