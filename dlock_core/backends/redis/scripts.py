"""The Lua scripts, read once from their files; each file's header tells its keys, arguments and reply."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Final

__all__ = ["Script", "script"]

_INCLUDE: Final = re.compile(r"^--#include (\S+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text, and the digest by which the server knows it once it was loaded."""

    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Read a script; a line `--#include FILE` stands for that file's text, the first time it is met."""
    text = _expanded(f"{name}.lua", set())
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def _expanded(file: str, included: set[str]) -> str:
    if file in included:
        return ""
    included.add(file)
    text = files(__package__).joinpath("lua", file).read_text(encoding="ascii")
    return _INCLUDE.sub(lambda found: _expanded(found[1], included), text)
