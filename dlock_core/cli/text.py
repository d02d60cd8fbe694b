"""Words of others on a terminal: nothing in them moves the cursor, and a long one loses its middle, not its end."""

from __future__ import annotations

from typing import Final

from rich.cells import cell_len

__all__ = ["ELLIPSIS", "cells", "middle", "plain", "seconds"]

ELLIPSIS: Final = "…"


def plain(text: str) -> str:
    """Replace what is not printable: escapes, line ends, marks that turn the direction of writing."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def cells(text: str) -> int:
    """Count the cells that a printable text takes."""
    return len(text) if text.isascii() else cell_len(text)


def middle(text: str, width: int) -> str:
    """Shorten a printable text to so many cells by leaving out its middle: both ends tell names apart."""
    if cells(text) <= width:
        return text
    if width < 1:
        return ""
    head = _head(text, width // 2)
    return head + ELLIPSIS + _head(text[::-1], width - 1 - cells(head))[::-1]


def _head(text: str, width: int) -> str:
    if text.isascii():
        return text[:width]
    used = 0
    for place, char in enumerate(text):
        used += cell_len(char)
        if used > width:
            return text[:place]
    return text


def seconds(time: float | None) -> str:
    """Write a time for people: 2.6 s, 4 min 10 s, 3 h 5 min."""
    if time is None:
        return "?"
    if time < 120:
        return f"{time:.1f} s"
    minutes, rest = divmod(int(time), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
