"""Tables and trees that fit the terminal: the least important columns are dropped first, and long cells shortened."""

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

__all__ = ["Column", "TableRow", "as_segments", "fit_table"]


COLUMN_GAP = 2
"""Cells between two columns."""


class Column(NamedTuple):
    """A column of a table."""

    head: str
    min_width: int | None = None
    """Cells to which it may shrink; None: not at all."""
    drop_order: int = 0
    """The column with the greatest number is dropped first; 0: it always stays."""
    right: bool = False
    """Align it to the right."""


class TableRow(NamedTuple):
    """A row of a table; its cells are printable texts."""

    cells: tuple[str, ...]
    style: str = ""


def as_segments(lines: Iterable[tuple[str, str]]) -> Iterator[Segment]:
    """Yield lines that already fit, each in its style; rich's own tables cost 0.3 ms a row."""
    for text, style in lines:
        yield Segment(text, Style.parse(style))
        yield Segment.line()


def fit_table(columns: Sequence[Column], rows: Sequence[TableRow], width: int) -> list[tuple[str, str]] | None:
    """Return a table as lines with their styles; None if even the columns that must stay do not fit."""
    natural = [max(cells(each.head), *[cells(row.cells[n]) for row in rows]) for n, each in enumerate(columns)]
    smallest = [
        size if each.min_width is None else min(size, each.min_width)
        for each, size in zip(columns, natural, strict=True)
    ]
    shown = [n for n in range(len(columns)) if any(row.cells[n] for row in rows)]
    while _needed_width(smallest, shown) > width:
        droppable = [n for n in shown if columns[n].drop_order]
        if not droppable:
            return None
        shown.remove(max(droppable, key=lambda n: columns[n].drop_order))
    sizes = _distribute(smallest, natural, shown, width - _needed_width(smallest, shown))
    head = TableRow(tuple(column.head for column in columns), "bold")
    return [(_row_text(row, columns, sizes), row.style) for row in (head, *rows)]


def _row_text(row: TableRow, columns: Sequence[Column], sizes: dict[int, int]) -> str:
    return (" " * COLUMN_GAP).join([_cell(row.cells[n], size, columns[n]) for n, size in sizes.items()]).rstrip()


def _cell(text: str, size: int, column: Column) -> str:
    short = shorten(text, size)
    padding = " " * (size - cells(short))
    return padding + short if column.right else short + padding


def _needed_width(sizes: Sequence[int], shown: Sequence[int]) -> int:
    return sum(sizes[n] for n in shown) + COLUMN_GAP * (len(shown) - 1)


def _distribute(smallest: Sequence[int], natural: Sequence[int], shown: Sequence[int], free: int) -> dict[int, int]:
    """Return the widths of the shown columns, after sharing free cells equally among those that want more.

    The column that wants least comes first, so that what it does not need goes to the others.
    """
    sizes = {n: smallest[n] for n in shown}
    wanting = sorted((n for n in shown if natural[n] > smallest[n]), key=lambda n: natural[n] - smallest[n])
    for index, n in enumerate(wanting):
        more = min(natural[n] - smallest[n], free // (len(wanting) - index))
        sizes[n] += more
        free -= more
    return sizes


INDENT: Final = 4
"""Cells by which a level of the tree is indented."""
NARROW_WIDTH: Final = 66
"""Cells below which a node of the tree takes two lines."""
MIN_NODE_WIDTH: Final = 24
"""Cells that a node of the tree needs."""


def has_chains(entries: Sequence[Entry]) -> bool:
    """Return whether a waiter blocks another waiter: then a list does not show what blocks everything."""
    found = [wait for each in _waits_by_blocker(entries).values() for wait in each]
    return not {wait.waiter.actor for wait in found}.isdisjoint(wait.blocker.actor for wait in found)


def tree(entries: Sequence[Entry], width: int) -> RenderableType:
    """Return a tree of the waits; each actor is a node once, with its waiters below it.

    A node that would have no room to its right becomes a root further down.
    """
    return _TreeDrawing(_waits_by_blocker(entries), width).tree()


def _waits_by_blocker(entries: Iterable[Entry]) -> dict[str, list[Wait]]:
    """Return the waits by the actors they are for: the holders, or the next in the queue where no holder blocks."""
    by_waiter: dict[tuple[str, ...], list[Wait]] = defaultdict(list)
    for wait in waits(entries):
        waiter = wait.waiter
        by_waiter[waiter.actor, waiter.source, waiter.kind, waiter.name].append(wait)
    found: dict[str, list[Wait]] = defaultdict(list)
    for each in by_waiter.values():
        for wait in [wait for wait in each if wait.blocker.role == "holder"] or each:
            found[wait.blocker.actor].append(wait)
    return found


class _TreeDrawing:
    """A tree in the making: the actors that were drawn, and those still to be drawn."""

    def __init__(self, waits_by_blocker: dict[str, list[Wait]], width: int) -> None:
        self._waits, self._width = waits_by_blocker, width
        waiting = {wait.waiter.actor for each in waits_by_blocker.values() for wait in each}
        roots = [actor for actor in waits_by_blocker if actor not in waiting]
        # Whatever the roots do not reach is a deadlock, which has no root: any of its actors may begin.
        self._todo = deque([*roots, *sorted(waiting & waits_by_blocker.keys())])
        self._drawn: set[str] = set()

    def tree(self) -> Tree:
        top = Tree(Text("waits"), hide_root=True)
        while self._todo:
            if (actor := self._todo.popleft()) not in self._drawn:
                first = self._waits[actor][0].blocker
                root = top.add(Text(shorten(plain(first.described), self._width), "bold"))
                self._grow(root, actor, self._width - INDENT)
        return top

    def _grow(self, node: Tree, actor: str, width: int) -> None:
        self._drawn.add(actor)
        for wait in self._waits[actor]:
            other = wait.waiter.actor
            reference = self._reference(other, width)
            branch = node.add(_label(wait.waiter, width, reference))
            if other in self._waits and not reference:
                self._grow(branch, other, width - INDENT)

    def _reference(self, actor: str, width: int) -> str:
        """Return the text that refers to the waiters of an actor, if they are not drawn below this node."""
        if actor not in self._waits:
            return ""
        if actor in self._drawn:
            return " (see above)"
        if width - INDENT >= MIN_NODE_WIDTH:
            return ""
        self._todo.appendleft(actor)
        return " (see below)"


def _label(waiter: Entry, width: int, reference: str) -> Text:
    what = f"waits for {waiter.kind} "
    if width < NARROW_WIDTH:
        who = shorten(plain(waiter.described), width - len(reference)) + reference
        return Text(f"{who}\n{shorten(what + plain(waiter.name), width)}")
    name, time = shorten(plain(waiter.name), width // 3), f", {seconds(waiter.seconds)}"
    room = width - cell_len(f" {what}{name}{time}{reference}")
    return Text(f"{shorten(plain(waiter.described), room)} {what}{name}{time}{reference}")


ELLIPSIS: Final = "…"


def plain(text: str) -> str:
    """Replace unprintable characters by "?": escapes, line ends, marks that reverse the direction of writing."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def cells(text: str) -> int:
    """Return the number of terminal cells that a printable text takes."""
    return len(text) if text.isascii() else cell_len(text)


def shorten(text: str, width: int) -> str:
    """Shorten a printable text to a number of cells by leaving out its middle, since both ends distinguish names."""
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
    for index, char in enumerate(text):
        used += cell_len(char)
        if used > width:
            return text[:index]
    return text


def seconds(time: float | None) -> str:
    """Format a time for people: 2.6 s, 4 min 10 s, 3 h 5 min; "?" if it is unknown."""
    if time is None:
        return "?"
    if time < 120:
        return f"{time:.1f} s"
    minutes, remainder = divmod(int(time), 60)
    if minutes < 120:
        return f"{minutes} min {remainder} s"
    return f"{minutes // 60} h {minutes % 60} min"
