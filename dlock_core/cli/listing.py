"""What the commands print: a listing of locks, once or repeatedly, the details of one lock, and the doctor's report."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
from rich.cells import cell_len
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dlock_core.cli.layout import Column, TableRow, as_segments, fit_table, has_chains, plain, seconds, shorten, tree
from dlock_core.inspect import Snapshot
from dlock_core.names import canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    from dlock_core.cli.sources import CliContext
    from dlock_core.doctor import Finding, Level
    from dlock_core.inspect import Entry

__all__ = ["Details", "Listing", "Report", "matching", "parse_name", "possible_names", "repeat", "report_dict", "watch"]

COLUMNS: Final = (
    Column("source", min_width=8, drop_order=1),
    Column("kind", drop_order=5),
    Column("lock", min_width=14),
    Column("mode", min_width=9, drop_order=2),
    Column("who", min_width=32),
    Column("for", right=True),
    Column("ttl left", drop_order=3, right=True),
    Column("token", drop_order=4),
)


class Listing(NamedTuple):
    """All holders and waiters of a snapshot, its deadlocks, and the sources that could not be read.

    They are a table, or on a terminal of fewer than about 60 columns a few short lines for each lock.
    """

    snapshot: Snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType | Segment]:
        entries, width = self.snapshot.entries, options.max_width
        if entries:
            yield from as_segments(fit_table(COLUMNS, list(_rows(entries)), width) or _cards(entries, width))
        if has_chains(entries) or self.snapshot.cycles:
            yield Text("")
            yield tree(entries, width)
        yield Text(_summary(self.snapshot))
        yield from _problems(self.snapshot)


class _TimedListing(NamedTuple):
    """A listing below the time at which it was taken."""

    snapshot: Snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(time.strftime("%Y-%m-%d %H:%M:%S"), "bold")
        yield Listing(self.snapshot)


def watch(context: CliContext, look: Callable[[], Snapshot], interval: float) -> None:
    """Refresh a listing on the whole terminal, or print one after the other without a terminal, until Ctrl-C."""
    if not context.console.is_terminal:
        repeat(look, interval, lambda snapshot: context.print(_TimedListing(snapshot), ""))
        return
    with Live(console=context.console, screen=True, auto_refresh=False) as live:
        repeat(look, interval, lambda snapshot: live.update(_TimedListing(snapshot), refresh=True))


def repeat(look: Callable[[], Snapshot], interval: float, show: Callable[[Snapshot], None]) -> None:
    """Show a snapshot now and after every interval (seconds), until Ctrl-C."""
    try:
        while True:
            show(look())
            time.sleep(interval)
    except KeyboardInterrupt:
        return


def _summary(snapshot: Snapshot) -> str:
    """Count the holders and waiters, as far as they are known."""
    entries, unread = snapshot.entries, ", as far as could be read" if snapshot.unreadable else ""
    if unread and not entries:
        return "holders and waiters: unknown"
    numbers = (_counted(sum(entry.role == role for entry in entries), role) for role in ("holder", "waiter"))
    return ", ".join(numbers) + unread


def _problems(snapshot: Snapshot) -> Iterator[RenderableType]:
    """Yield the deadlocks, what was left out, and the sources that could not be read."""
    for cycle in snapshot.cycles:
        yield Text("deadlock:", "red")
        for step in cycle.steps():
            yield Padding(Text(plain(step), "red"), (0, 0, 0, 2), expand=False)
    for source, number in snapshot.left_out.items():
        yield Text(plain(f"{source}: {number} more locks without waiters"))
    for each in snapshot.unreadable:
        yield Text(plain(f"{each.source}: {each.reason}"), "red")


def grouped(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Return the entries of each lock together, holders first, then waiters in order."""
    locks: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
    for entry in entries:
        locks[entry.source, entry.kind, entry.name].append(entry)
    return [sorted(lock, key=lambda entry: (entry.role == "waiter", entry.position or 0)) for lock in locks.values()]


def _rows(entries: Sequence[Entry]) -> Iterator[TableRow]:
    sources, kinds = {entry.source for entry in entries}, {entry.kind for entry in entries}
    for lock in grouped(entries):
        for index, entry in enumerate(lock):
            source = entry.source if index == 0 and len(sources) > 1 else ""
            kind = entry.kind if index == 0 and kinds != {"lease"} else ""
            yield _row(entry, plain(source), kind, is_first=index == 0)


def _row(entry: Entry, source: str, kind: str, *, is_first: bool) -> TableRow:
    waits = entry.role == "waiter"
    who = f"{_waits(entry)} {entry.described}" if waits else entry.described
    name, token = plain(entry.name) if is_first else "", "" if entry.token is None else str(entry.token)
    cells = (source, kind, name, plain(entry.mode), plain(who), seconds(entry.seconds), _left(entry), token)
    return TableRow(cells, "dim" if waits else "")


def _cards(entries: Sequence[Entry], width: int) -> Iterator[tuple[str, str]]:
    are_many = len({entry.source for entry in entries}) > 1
    for lock in grouped(entries):
        source = f"  {shorten(plain(lock[0].source), width // 3)}" if are_many else ""
        yield shorten(plain(lock[0].name), width - cell_len(source)) + source, "bold"
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
        yield shorten(f"  {plain(line)}", width), style


def _waits(entry: Entry) -> str:
    return f"waits ({entry.position}):" if entry.position else "waits:"


def _left(entry: Entry) -> str:
    if entry.kind != "lease" or entry.role == "waiter":
        return ""
    return "no expiry" if entry.expires_in is None else seconds(entry.expires_in)


def _counted(number: int, role: str) -> str:
    return f"{number} {role}" + ("" if number == 1 else "s")


def parse_name(name: str) -> str:
    """Return a lock's name as stores know it; raises click.UsageError if it cannot be a name."""
    try:
        return canonical(name)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def possible_names(name: str) -> set[str]:
    """Return the names that a text may stand for: itself, for a row, and the canonical name of a lock."""
    try:
        return {name, canonical(name)}
    except ValueError:
        return {name}


def matching(whole: Snapshot, names: set[str]) -> Snapshot:
    """Return the part of a snapshot about the locks with these names, with their deadlocks."""
    cycles = [cycle for cycle in whole.cycles if any(wait.waiter.name in names for wait in cycle.waits)]
    return Snapshot([entry for entry in whole.entries if entry.name in names], whole.unreadable, cycles)


class Details(NamedTuple):
    """One lock in detail: its part of a snapshot, and all entries, from which the tree of waits is drawn."""

    snapshot: Snapshot
    everything: Sequence[Entry]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for lock in grouped(self.snapshot.entries):
            yield Text(plain(f"{lock[0].kind} {lock[0].name} in {lock[0].source}"), "bold")
            for entry in lock:
                yield from _entry(entry)
        actors = _related(self.everything, {entry.actor for entry in self.snapshot.entries})
        if any(entry.role == "waiter" for entry in self.snapshot.entries):
            yield Text("")
            yield tree([entry for entry in self.everything if entry.actor in actors], options.max_width)
        yield Text(_summary(self.snapshot))
        yield from _problems(self.snapshot)


def _entry(entry: Entry) -> Iterator[Text]:
    role = f"waiter {entry.position}" if entry.position else entry.role
    yield Text(f"  {role}: {plain(entry.described)}", "dim" if entry.role == "waiter" else "")
    duration = f"{'held' if entry.role == 'holder' else 'waits'} for"
    facts = {"mode": entry.mode, duration: seconds(entry.seconds), "token": entry.token}
    if entry.expires_in is not None:
        facts["ttl left"] = f"{seconds(entry.expires_in)} (renewed while its process lives)"
    for key, value in {**facts, **entry.owner}.items():
        if value not in (None, ""):
            # A query may have several lines.
            yield Text(f"    {plain(str(key))}: {plain(' '.join(str(value).split()))}")


def _related(entries: Sequence[Entry], actors: set[str]) -> set[str]:
    """Return these actors, all actors that hold or await one of their locks, and so on."""
    while True:
        locks = {(entry.source, entry.kind, entry.name) for entry in entries if entry.actor in actors}
        more = {entry.actor for entry in entries if (entry.source, entry.kind, entry.name) in locks}
        if more <= actors:
            return actors
        actors = actors | more


_STYLES: Final[dict[Level, str]] = {"ok": "green", "warning": "yellow", "unsafe": "bold red"}


def report_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as JSON data, in schema 1."""
    return {"schema": 1, "findings": [asdict(one) for one in findings]}


class Report(NamedTuple):
    """The doctor's findings, source by source, and how many are unsafe."""

    findings: Sequence[Finding]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        groups: dict[str, list[Finding]] = defaultdict(list)
        for one in self.findings:
            groups[plain(f"{one.subject} {one.source} {one.part}".strip())].append(one)
        for title, found in groups.items():
            yield Text(title, "bold")
            for one in found:
                yield _finding(one)
        numbers = Counter(one.level for one in self.findings)
        words = ["ok", "warning" if numbers["warning"] == 1 else "warnings", "unsafe"]
        yield Text(", ".join(f"{numbers[level]} {word}" for level, word in zip(_STYLES, words, strict=True)))


def _finding(one: Finding) -> Table:
    lines = Table.grid()
    lines.add_column(width=11)
    lines.add_column()
    lines.add_row(Text(f"  {one.level}", _STYLES[one.level]), Text(f"{plain(one.check)}: {plain(one.measured)}"))
    for word, text in (("why", one.reason), ("do", one.remedy)):
        if text:
            lines.add_row("", Text(f"{word}: {plain(text)}", "dim" if one.level == "ok" else ""))
    return lines
