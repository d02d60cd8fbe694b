"""Tables that fit: columns that matter least go first, and long cells give way, so that no line is ever broken."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from dlock_core.cli.text import middle

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Column", "Row", "fitted"]

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


def fitted(columns: Sequence[Column], rows: Sequence[Row], width: int) -> Table | None:
    """Lay out a table within a width; None when even what must stay does not fit."""
    natural = [
        max(cell_len(column.head), *[cell_len(row.cells[n]) for row in rows]) for n, column in enumerate(columns)
    ]
    least = [
        size if column.least is None else min(size, column.least) for column, size in zip(columns, natural, strict=True)
    ]
    kept = [n for n in range(len(columns)) if any(row.cells[n] for row in rows)]
    while _needed(least, kept) > width:
        going = [n for n in kept if columns[n].spare]
        if not going:
            return None
        kept.remove(max(going, key=lambda n: columns[n].spare))
    sizes = _shared_out(least, natural, kept, width - _needed(least, kept))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for n in kept:
        column = columns[n]
        table.add_column(column.head, width=sizes[n], no_wrap=True, justify="right" if column.right else "left")
    for row in rows:
        table.add_row(*[Text(middle(row.cells[n], sizes[n])) for n in kept], style=row.style)
    return table


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
