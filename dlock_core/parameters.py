"""The `:name` parameters of SQL statements, written as drivers take them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

__all__ = ["numbered", "pyformat"]

_PARAMETER: Final = re.compile(r"(?<!:):(\w+)")


@lru_cache(maxsize=256)
def pyformat(sql: str) -> str:
    """Write them as %(name)s."""
    return _PARAMETER.sub(r"%(\1)s", sql.replace("%", "%%"))


@lru_cache(maxsize=64)
def numbered(sql: str) -> tuple[str, tuple[str, ...]]:
    """Write them as $1, $2, and tell whose value each is."""
    names = tuple(dict.fromkeys(_PARAMETER.findall(sql)))
    return _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", sql), names
