"""What the doctor found, on a terminal: one short line for what is well, and the reason and remedy for what is not."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.table import Table
from rich.text import Text

from dlock_core.cli.text import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType

    from dlock_core.doctor import Finding, Level

__all__ = ["Report", "report_dict"]

_STYLES: Final[dict[Level, str]] = {"ok": "green", "warning": "yellow", "unsafe": "bold red"}


def report_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """Give the findings as JSON takes them, in schema 1."""
    return {"schema": 1, "findings": [asdict(one) for one in findings]}


class Report(NamedTuple):
    """Findings, source by source."""

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
        yield Text(", ".join(f"{numbers[level]} {level}" for level in _STYLES))


def _finding(one: Finding) -> Table:
    lines = Table.grid()
    lines.add_column(width=11)
    lines.add_column()
    lines.add_row(Text(f"  {one.level}", _STYLES[one.level]), Text(f"{plain(one.check)}: {plain(one.measured)}"))
    for word, text in (("why", one.reason), ("do", one.remedy)):
        if text:
            lines.add_row("", Text(f"{word}: {plain(text)}", "dim" if one.level == "ok" else ""))
    return lines
