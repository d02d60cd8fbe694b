"""Tables that fit: columns that matter least go first, and long cells give way, so that no line is ever broken."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.segment import Segment
from rich.style import Style

from dlock_core.cli.text import cells, middle

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Column", "Row", "fitted", "printed"]

GAP = 2


class Column(NamedTuple):
    """A column; `least` is the width to which it may shrink (None: not at all), `spare` the order in which columns go.

    Columns without `spare` stay.
    """

    head: str
    least: int | None = None
    spare: int = 0
    right: bool = False


class Row(NamedTuple):
    """A line of printable cells."""

    cells: tuple[str, ...]
    style: str = ""


def printed(lines: Iterable[tuple[str, str]]) -> Iterator[Segment]:
    """Print lines that fit already, each in its style; rich's own tables cost 0.3 ms a row."""
    for text, style in lines:
        yield Segment(text, Style.parse(style))
        yield Segment.line()


def fitted(columns: Sequence[Column], rows: Sequence[Row], width: int) -> list[tuple[str, str]] | None:
    """Lay out a table, as lines and their styles; None when even what must stay does not fit."""
    natural = [max(cells(each.head), *[cells(row.cells[n]) for row in rows]) for n, each in enumerate(columns)]
    least = [size if each.least is None else min(size, each.least) for each, size in zip(columns, natural, strict=True)]
    kept = [n for n in range(len(columns)) if any(row.cells[n] for row in rows)]
    while _needed(least, kept) > width:
        going = [n for n in kept if columns[n].spare]
        if not going:
            return None
        kept.remove(max(going, key=lambda n: columns[n].spare))
    sizes = _shared_out(least, natural, kept, width - _needed(least, kept))
    head = Row(tuple(column.head for column in columns), "bold")
    return [(_line(row, columns, sizes), row.style) for row in (head, *rows)]


def _line(row: Row, columns: Sequence[Column], sizes: dict[int, int]) -> str:
    return (" " * GAP).join([_cell(row.cells[n], size, columns[n]) for n, size in sizes.items()]).rstrip()


def _cell(text: str, size: int, column: Column) -> str:
    short = middle(text, size)
    room = " " * (size - cells(short))
    return room + short if column.right else short + room


def _needed(sizes: Sequence[int], kept: Sequence[int]) -> int:
    return sum(sizes[n] for n in kept) + GAP * (len(kept) - 1)


def _shared_out(least: Sequence[int], natural: Sequence[int], kept: Sequence[int], spare: int) -> dict[int, int]:
    """Give what is to spare to the columns that want more, in equal parts, the modest first."""
    sizes = {n: least[n] for n in kept}
    wanting = sorted((n for n in kept if natural[n] > least[n]), key=lambda n: natural[n] - least[n])
    for place, n in enumerate(wanting):
        more = min(natural[n] - least[n], spare // (len(wanting) - place))
        sizes[n] += more
        spare -= more
    return sizes
