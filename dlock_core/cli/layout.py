"""Tables and trees that fit the terminal: the least important columns go first, and long cells are shortened."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from rich.tree import Tree

from dlock_core.inspect import waits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import RenderableType

    from dlock_core.inspect import Entry, Wait

__all__ = ["Column", "TableRow", "fitted", "printed"]


GAP = 2


class Column(NamedTuple):
    """A column; `least` is the width to which it may shrink (None: not at all), `spare` the order in which columns go.

    Columns without `spare` stay.
    """

    head: str
    least: int | None = None
    spare: int = 0
    right: bool = False


class TableRow(NamedTuple):
    """A line of printable cells."""

    cells: tuple[str, ...]
    style: str = ""


def printed(lines: Iterable[tuple[str, str]]) -> Iterator[Segment]:
    """Print lines that fit already, each in its style; rich's own tables cost 0.3 ms a row."""
    for text, style in lines:
        yield Segment(text, Style.parse(style))
        yield Segment.line()


def fitted(columns: Sequence[Column], rows: Sequence[TableRow], width: int) -> list[tuple[str, str]] | None:
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
    head = TableRow(tuple(column.head for column in columns), "bold")
    return [(_line(row, columns, sizes), row.style) for row in (head, *rows)]


def _line(row: TableRow, columns: Sequence[Column], sizes: dict[int, int]) -> str:
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


GUIDE: Final = 4
"""Cells by which a level is indented."""
NARROW: Final = 66
"""Cells below which a node takes two lines."""
LEAST: Final = 24
"""Cells that a node needs."""


def has_chains(entries: Sequence[Entry]) -> bool:
    """Tell whether somebody who waits is waited for: then a list does not say who is to blame."""
    found = [wait for each in _behind(entries).values() for wait in each]
    return not {wait.waiter.actor for wait in found}.isdisjoint(wait.blocker.actor for wait in found)


def tree(entries: Sequence[Entry], width: int) -> RenderableType:
    """Draw it; an actor is drawn once, with all who wait for it. What would have no room to its right begins anew."""
    return _Drawing(_behind(entries), width).tree()


def _behind(entries: Iterable[Entry]) -> dict[str, list[Wait]]:
    """Give the waits by whom they are for: the holders, or who is next in the queue where no holder is in the way."""
    by_waiter: dict[tuple[str, ...], list[Wait]] = defaultdict(list)
    for wait in waits(entries):
        waiter = wait.waiter
        by_waiter[waiter.actor, waiter.source, waiter.kind, waiter.name].append(wait)
    found: dict[str, list[Wait]] = defaultdict(list)
    for each in by_waiter.values():
        for wait in [wait for wait in each if wait.blocker.role == "holder"] or each:
            found[wait.blocker.actor].append(wait)
    return found


class _Drawing:
    """The actors that were drawn, and those that are to come."""

    def __init__(self, behind: dict[str, list[Wait]], width: int) -> None:
        self._behind, self._width = behind, width
        waiting = {wait.waiter.actor for each in behind.values() for wait in each}
        roots = [actor for actor in behind if actor not in waiting]
        self._todo = deque([*roots, *sorted(waiting & behind.keys())])  # those who are left then wait for each other
        self._drawn: set[str] = set()

    def tree(self) -> Tree:
        top = Tree(Text("who waits for whom"), hide_root=True)
        while self._todo:
            if (actor := self._todo.popleft()) not in self._drawn:
                first = self._behind[actor][0].blocker
                root = top.add(Text(middle(plain(first.described), self._width), "bold"))
                self._grow(root, actor, self._width - GUIDE)
        return top

    def _grow(self, node: Tree, actor: str, width: int) -> None:
        self._drawn.add(actor)
        for wait in self._behind[actor]:
            other = wait.waiter.actor
            mark = self._mark(other, width)
            branch = node.add(_label(wait.waiter, width, mark))
            if other in self._behind and not mark:
                self._grow(branch, other, width - GUIDE)

    def _mark(self, actor: str, width: int) -> str:
        """Say where those are drawn who wait for an actor, when it is not here."""
        if actor not in self._behind:
            return ""
        if actor in self._drawn:
            return " (see above)"
        if width - GUIDE >= LEAST:
            return ""
        self._todo.appendleft(actor)
        return " (see below)"


def _label(waiter: Entry, width: int, mark: str) -> Text:
    what = f"waits for {waiter.kind} "
    if width < NARROW:
        who = middle(plain(waiter.described), width - len(mark)) + mark
        return Text(f"{who}\n{middle(what + plain(waiter.name), width)}")
    name, time = middle(plain(waiter.name), width // 3), f", {seconds(waiter.seconds)}"
    room = width - cell_len(f" {what}{name}{time}{mark}")
    return Text(f"{middle(plain(waiter.described), room)} {what}{name}{time}{mark}")


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
