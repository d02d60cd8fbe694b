"""Who waits for whom, as a tree: at its root those who wait for nobody, and have to end before others go on."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len
from rich.text import Text
from rich.tree import Tree

from dlock_core.cli.text import middle, plain, seconds
from dlock_core.inspect import waits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

    from dlock_core.inspect import Entry, Wait

__all__ = ["has_chains", "tree"]

GUIDE: Final = 4
"""Cells by which a level is indented."""
NARROW: Final = 66
"""Cells below which a node takes two lines."""
LEAST: Final = 24
"""Cells that a node needs."""


def has_chains(entries: Sequence[Entry]) -> bool:
    """Tell whether somebody who waits is waited for: then a list does not say who is to blame."""
    found = [wait for each in _behind(entries).values() for wait in each]
    return not {wait.waiter.party for wait in found}.isdisjoint(wait.behind.party for wait in found)


def tree(entries: Sequence[Entry], width: int) -> RenderableType:
    """Draw it; a party is drawn once, with all who wait for it. What would have no room to its right begins anew."""
    return _Drawing(_behind(entries), width).tree()


def _behind(entries: Iterable[Entry]) -> dict[str, list[Wait]]:
    """Give the waits by whom they are for: the holders, or who is next in the queue where no holder is in the way."""
    by_waiter: dict[tuple[str, ...], list[Wait]] = defaultdict(list)
    for wait in waits(entries):
        waiter = wait.waiter
        by_waiter[waiter.party, waiter.source, waiter.kind, waiter.name].append(wait)
    found: dict[str, list[Wait]] = defaultdict(list)
    for each in by_waiter.values():
        for wait in [wait for wait in each if wait.behind.role == "holder"] or each:
            found[wait.behind.party].append(wait)
    return found


class _Drawing:
    """The parties that were drawn, and those that are to come."""

    def __init__(self, behind: dict[str, list[Wait]], width: int) -> None:
        self._behind, self._width = behind, width
        waiting = {wait.waiter.party for each in behind.values() for wait in each}
        roots = [party for party in behind if party not in waiting]
        self._todo = deque([*roots, *sorted(waiting & behind.keys())])  # those who are left then wait for each other
        self._drawn: set[str] = set()

    def tree(self) -> Tree:
        top = Tree(Text("who waits for whom"), hide_root=True)
        while self._todo:
            if (party := self._todo.popleft()) not in self._drawn:
                first = self._behind[party][0].behind
                root = top.add(Text(middle(plain(first.described), self._width), "bold"))
                self._grow(root, party, self._width - GUIDE)
        return top

    def _grow(self, node: Tree, party: str, width: int) -> None:
        self._drawn.add(party)
        for wait in self._behind[party]:
            other = wait.waiter.party
            mark = self._mark(other, width)
            branch = node.add(_label(wait.waiter, width, mark))
            if other in self._behind and not mark:
                self._grow(branch, other, width - GUIDE)

    def _mark(self, party: str, width: int) -> str:
        """Say where those are drawn who wait for a party, when it is not here."""
        if party not in self._behind:
            return ""
        if party in self._drawn:
            return " (see above)"
        if width - GUIDE >= LEAST:
            return ""
        self._todo.appendleft(party)
        return " (see below)"


def _label(waiter: Entry, width: int, mark: str) -> Text:
    what = f"waits for {waiter.kind} "
    if width < NARROW:
        who = middle(plain(waiter.described), width - len(mark)) + mark
        return Text(f"{who}\n{middle(what + plain(waiter.name), width)}")
    name, time = middle(plain(waiter.name), width // 3), f", {seconds(waiter.seconds)}"
    room = width - cell_len(f" {what}{name}{time}{mark}")
    return Text(f"{middle(plain(waiter.described), room)} {what}{name}{time}{mark}")
