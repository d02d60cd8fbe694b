"""The parts of the figures of docs/benchmarks.md: results, tables in Markdown, bars, goals."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.panels import Bar, Bars, Panel, Role, number

Row = dict[str, Any]
OURS: Final = (
    "dlock", "@locked", "lock(", "lock_row(", "save_with_version", "retry_on_conflict", "Versioned", "django_dlock",
    "sqla_dlock", "the same, lock_row()",
)  # fmt: skip
REFERENCES: Final = ("floor", "bare", "no lock", "no version", "Model.save()", "select_for_update by hand", "the bare")


class Results:
    """The files that `benchmarks.run` has written."""

    def __init__(self, directory: Path) -> None:
        self.parts = {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}

    def table(self, part: str, title: str) -> list[Row]:
        """Return the rows of the first table whose title contains this; none if it was not measured."""
        tables = self.parts.get(part, {}).get("tables", [])
        return next((table["rows"] for table in tables if title in table["title"]), [])

    def rows(self, part: str, title: str) -> dict[str, Row]:
        """Return the rows of such a table by contestant."""
        return {row.get("contestant") or row["import"]: row for row in self.table(part, title)}


@dataclass(frozen=True)
class Figure:
    """A table in Markdown, and the panels of a chart, which are laid out in `columns`."""

    name: str
    alt: str
    table: str
    panels: Sequence[Panel] = ()
    columns: int = 1


def role(contestant: str) -> Role:
    if contestant.startswith(OURS):
        return "ours"
    return "floor" if contestant.startswith(REFERENCES) else "peer"


EXPLANATIONS: Final = (
    " on a bare socket", ", no promise", ", no lease", ", released before COMMIT", ", 1 master",
    ", advisory lock of the transaction", " by the watchdog", ", outside of the transaction",
)  # fmt: skip


def short(contestant: str) -> str:
    """Return a contestant's name without its explanation, for which a chart has no room."""
    for explanation in EXPLANATIONS:
        contestant = contestant.replace(explanation, "")
    return contestant


def table(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Write a table in Markdown; lines of ours are bold."""

    def text(value: object) -> str:
        return number(value) if isinstance(value, int | float) or value is None else str(value)

    def line(cells: Sequence[object]) -> str:
        is_ours = role(str(cells[0])) == "ours"
        shown = [f"**{text(cell)}**" if is_ours and text(cell) else text(cell) for cell in cells]
        return f"| {' | '.join(shown)} |"

    return "\n".join([line(header), f"|{'---|' * len(header)}", *map(line, lines)])


def against(value: float | None, goal: float | None, *, at_least: bool = False) -> str:
    """Write a goal, and whether the value meets it."""
    if goal is None or value is None:
        return ""
    met = value >= goal if at_least else value <= goal
    return f"{'≥' if at_least else '≤'} {number(goal)}{' ✓' if met else ' ✗'}"


def bars(
    title: str,
    rows: Mapping[str, Row],
    column: str,
    goals: Mapping[str, float] | None = None,
    floor: float | None = 1.0,
) -> Bars:
    found = {name: row.get(column) for name, row in rows.items()}
    shown = [
        Bar(short(name), value if isinstance(value, int | float) else None, role(name), (goals or {}).get(name))
        for name, value in found.items()
    ]
    return Bars(title, shown, floor)


def compared(
    name: str,
    alt: str,
    columns: Sequence[tuple[str, Mapping[str, Row], str]],
    goals: Mapping[str, float],
    charts: int = 1,
) -> Figure:
    """Return a figure of contestants by columns (heading, rows, key); the first `charts` columns are drawn.

    Goals are for the first column.
    """
    first = columns[0][1]
    lines = [
        [
            contestant,
            *(rows.get(contestant, {}).get(key, "") for _, rows, key in columns),
            against(row.get(columns[0][2]), goals.get(contestant)),
        ]
        for contestant, row in first.items()
    ]
    header = ["", *(heading for heading, _, _ in columns), "goal"]
    panels = [
        bars(heading, rows, key, goals if index == 0 else None)
        for index, (heading, rows, key) in enumerate(columns[:charts])
        if rows
    ]
    return Figure(name, alt, table(header, lines), panels, charts)
