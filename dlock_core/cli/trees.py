"""Who waits for whom, as a tree: at its root those who wait for nobody, and have to end before others go on."""

from __future__ import annotations

from collections import defaultdict
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


def has_chains(entries: Sequence[Entry]) -> bool:
    """Tell whether somebody who waits is waited for: then a list does not say who is to blame."""
    found = [wait for each in _behind(entries).values() for wait in each]
    return not {wait.waiter.party for wait in found}.isdisjoint(wait.behind.party for wait in found)


def tree(entries: Sequence[Entry], width: int) -> RenderableType:
    """Draw it; a party is drawn once, with all who wait for it."""
    behind = _behind(entries)
    waiting = {wait.waiter.party for each in behind.values() for wait in each}
    roots = [party for party in behind if party not in waiting]
    drawn: set[str] = set()
    top = Tree(Text("who waits for whom"), hide_root=True)
    for party in [*roots, *sorted(waiting)]:  # those who are left then wait for each other
        if party in behind and party not in drawn:
            first = behind[party][0].behind
            root = top.add(Text(middle(plain(first.described), width), "bold"))
            _grow(root, party, behind, drawn, width - GUIDE)
    return top


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


def _grow(node: Tree, party: str, behind: dict[str, list[Wait]], drawn: set[str], width: int) -> None:
    drawn.add(party)
    for wait in behind.get(party, ()):
        other = wait.waiter.party
        is_again = other in drawn and other in behind
        branch = node.add(_label(wait.waiter, width, again=is_again))
        if not is_again:
            _grow(branch, other, behind, drawn, width - GUIDE)


def _label(waiter: Entry, width: int, *, again: bool) -> Text:
    what, mark = f"waits for {waiter.kind} ", " (see above)" if again else ""
    if width < NARROW:
        who = middle(plain(waiter.described), width - len(mark)) + mark
        return Text(f"{who}\n{middle(what + plain(waiter.name), width)}")
    name, time = middle(plain(waiter.name), width // 3), f", {seconds(waiter.seconds)}"
    room = width - cell_len(f" {what}{name}{time}{mark}")
    return Text(f"{middle(plain(waiter.described), room)} {what}{name}{time}{mark}")
