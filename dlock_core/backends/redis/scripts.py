"""The Lua scripts, read once from their files; each file's header tells its keys, arguments and reply."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files

__all__ = ["Script", "script"]


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text, and the digest by which the server knows it once it was loaded."""

    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Read a script; a line `--#include FILE` stands for that file's text."""
    text = _read(f"{name}.lua").replace("--#include queue.lua\n", _read("queue.lua"))
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def _read(file: str) -> str:
    return files(__package__).joinpath("lua", file).read_text(encoding="ascii")
