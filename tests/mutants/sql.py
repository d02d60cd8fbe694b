"""The faults of an SQL text, which a Python string contains whole or in parts."""

import re
from collections.abc import Iterator
from typing import Final

IS_SQL: Final = re.compile(
    r"\b(SELECT|INSERT|UPDATE|DELETE|WHERE|SET|VALUES|ON CONFLICT|RETURNING|FOR SHARE|CASE|AND|OR)\b|[<>=] :\w|[<>=] $"
)
FAULTS: Final = (
    (re.compile(r"<="), "<"),
    (re.compile(r">="), ">"),
    (re.compile(r"<(?![=>])"), "<="),
    (re.compile(r"(?<![<>])>(?![=>])"), ">="),
    (re.compile(r"<>|!="), "="),
    (re.compile(r"(?<![<>!:=])=(?![=>])"), "<>"),
    (re.compile(r"\bAND\b"), "OR"),
    (re.compile(r"\bOR\b(?! REPLACE)"), "AND"),
    (re.compile(r"\bNOT (?=EXISTS|IN|LIKE|NULL\b|:)"), ""),
    (re.compile(r" FOR (NO KEY )?UPDATE\b"), ""),
    (re.compile(r" (FOR SHARE|LOCK IN SHARE MODE)\b"), ""),
    (re.compile(r"\bFOR UPDATE\b"), "FOR SHARE"),
    (re.compile(r"\bGREATEST\b"), "LEAST"),
    (re.compile(r"\bgreatest\("), "least("),
    (re.compile(r"\bmax\("), "min("),
    (re.compile(r" \+ "), " - "),
    (re.compile(r" - "), " + "),
    (re.compile(r"(?<!SELECT) \* "), " / "),
    (re.compile(r"\bDESC\b"), ""),
)


def is_sql(text: str) -> bool:
    return bool(IS_SQL.search(text))


def changed(text: str) -> Iterator[str]:
    """Yield every variant of the text with one fault."""
    for pattern, instead in FAULTS:
        for found in pattern.finditer(text):
            yield text[: found.start()] + instead + text[found.end() :]
