"""A picture of locks on a terminal: a table, or below some 60 columns a few short lines for each lock."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.cells import cell_len
from rich.padding import Padding
from rich.text import Text

from dlock_core.cli.tables import Column, Row, fitted, printed
from dlock_core.cli.text import middle, plain, seconds
from dlock_core.cli.trees import has_chains, tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    from dlock_core.inspect import Entry, Picture

__all__ = ["Listing", "counted", "troubles"]

COLUMNS: Final = (
    Column("source", least=8, spare=1),
    Column("kind", spare=5),
    Column("lock", least=14),
    Column("mode", least=9, spare=2),
    Column("who", least=32),
    Column("for", right=True),
    Column("ttl left", spare=3, right=True),
    Column("token", spare=4),
)


class Listing(NamedTuple):
    """All holders and waiters of a picture, its cycles, and whom could not be asked."""

    picture: Picture

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType | Segment]:
        entries, width = self.picture.entries, options.max_width
        if entries:
            yield from printed(fitted(COLUMNS, list(_rows(entries)), width) or _cards(entries, width))
        if has_chains(entries) or self.picture.cycles:
            yield Text("")
            yield tree(entries, width)
        yield Text(counted(entries))
        yield from troubles(self.picture)


def counted(entries: Sequence[Entry]) -> str:
    """Count holders and waiters."""
    return ", ".join(_number(sum(entry.role == role for entry in entries), role) for role in ("holder", "waiter"))


def troubles(picture: Picture) -> Iterator[RenderableType]:
    """Name the deadlocks, and the sources that could not be asked, in red."""
    for cycle in picture.cycles:
        yield Text("deadlock:", "red")
        for step in cycle.steps():
            yield Padding(Text(plain(step), "red"), (0, 0, 0, 2), expand=False)
    for source, number in picture.left_out.items():
        yield Text(plain(f"{source}: {number} more locks, for which nobody waits"))
    for each in picture.unreadable:
        yield Text(plain(f"{each.source}: {each.reason}"), "red")


def grouped(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Bring the entries of each lock together, holders first, waiters in order."""
    locks: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
    for entry in entries:
        locks[entry.source, entry.kind, entry.name].append(entry)
    return [sorted(lock, key=lambda entry: (entry.role == "waiter", entry.place or 0)) for lock in locks.values()]


def _rows(entries: Sequence[Entry]) -> Iterator[Row]:
    sources, kinds = {entry.source for entry in entries}, {entry.kind for entry in entries}
    for lock in grouped(entries):
        for place, entry in enumerate(lock):
            source = entry.source if place == 0 and len(sources) > 1 else ""
            kind = entry.kind if place == 0 and kinds != {"lease"} else ""
            yield _row(entry, plain(source), kind, is_first=place == 0)


def _row(entry: Entry, source: str, kind: str, *, is_first: bool) -> Row:
    waits = entry.role == "waiter"
    who = f"{_waits(entry)} {entry.described}" if waits else entry.described
    name, token = plain(entry.name) if is_first else "", "" if entry.token is None else str(entry.token)
    cells = (source, kind, name, plain(entry.mode), plain(who), seconds(entry.seconds), _left(entry), token)
    return Row(cells, "dim" if waits else "")


def _cards(entries: Sequence[Entry], width: int) -> Iterator[tuple[str, str]]:
    are_many = len({entry.source for entry in entries}) > 1
    for lock in grouped(entries):
        source = f"  {middle(plain(lock[0].source), width // 3)}" if are_many else ""
        yield middle(plain(lock[0].name), width - cell_len(source)) + source, "bold"
        for entry in lock:
            yield from _card(entry, width)


def _card(entry: Entry, width: int) -> Iterator[tuple[str, str]]:
    style = "dim" if entry.role == "waiter" else ""
    who = f"{_waits(entry)} {entry.described}" if entry.role == "waiter" else entry.described
    facts = [seconds(entry.seconds), plain(entry.mode)]
    if left := _left(entry):
        facts.insert(1, left if entry.expires_in is None else f"{left} left")
    lines = [who, ", ".join(facts), *([] if entry.token is None else [f"token {entry.token}"])]
    for line in lines:
        yield middle(f"  {plain(line)}", width), style


def _waits(entry: Entry) -> str:
    return f"waits ({entry.place}):" if entry.place else "waits:"


def _left(entry: Entry) -> str:
    if entry.kind != "lease" or entry.role == "waiter":
        return ""
    return "no expiry" if entry.expires_in is None else seconds(entry.expires_in)


def _number(number: int, role: str) -> str:
    return f"{number} {role}" + ("" if number == 1 else "s")
