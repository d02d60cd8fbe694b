"""Each table and chart of docs/benchmarks.md, made of the results: what is picked, under which name, with which goal.

A function per figure; its name is the one in the page's marks. Goals stand here and nowhere else.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.panels import Bar, Bars, Growth, Line, Panel, Role, number

Row = dict[str, Any]
OURS: Final = (
    "dlock", "@locked", "lock(", "lock_row(", "save_with_version", "retry_on_conflict", "Versioned", "django_dlock",
    "sqla_dlock",
)  # fmt: skip
REFERENCES: Final = ("floor", "bare", "no lock", "no version", "Model.save()", "select_for_update by hand", "the bare")


MAX_QUIET_LOAD: Final = 4.0
"""The benchmarks themselves make a load of up to this."""


class Results:
    """The files that `benchmarks.run` has written."""

    def __init__(self, directory: Path) -> None:
        self.parts = {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}

    def rows(self, part: str, title: str) -> dict[str, Row]:
        """Return the rows, by contestant, of the table whose title contains this; none if it was not measured."""
        tables = self.parts.get(part, {}).get("tables", [])
        found = next((table["rows"] for table in tables if title in table["title"]), [])
        return {row.get("contestant") or row["import"]: row for row in found}


@dataclass(frozen=True)
class Figure:
    """A table in Markdown and the panels of a chart, which stand in so many columns."""

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
    """Return a contestant's name without its explanation, as a chart has room for it."""
    for explanation in EXPLANATIONS:
        contestant = contestant.replace(explanation, "")
    return contestant


def table(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Write Markdown; lines of ours are bold."""

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


def machine(results: Results) -> Figure:
    """Return a sentence instead of a table: when and where, at which load, with which versions."""
    about = dict(results.parts.get("machine", {}))
    loads = [part["load before"] for part in results.parts.values() if "load before" in part]
    if not about or not loads:
        return Figure("machine", "", "Nothing was measured yet.")
    date, cores = about.pop("date"), about.pop("cores")
    versions = ", ".join(f"{name} {version}" for name, version in about.items())
    busy = " The machine was not idle: take the figures as a first impression." if max(loads) > MAX_QUIET_LOAD else ""
    sentence = f"The last run was on {date}, on {cores} cores, at loads of {min(loads)} to {max(loads)}.{busy}"
    return Figure("machine", "", f"{sentence} Versions: {versions}.")


# Rows 1 to 4: one store, Redis


def free_lock(results: Results) -> Figure:
    same = results.rows("uncontended", "same CPU")
    split = results.rows("uncontended", "split CPU")
    far = {name: row for name, row in results.rows("uncontended-network", "away").items() if name != "PING"}
    columns = [
        ("one CPU", same, "work ratio"), ("0.5 ms away", far, "ratio"), ("a CPU each", split, "ratio"),
        ("Python CPU µs", same, "Python CPU µs"), ("requests", same, "requests"), ("Redis commands", same, "commands"),
    ]  # fmt: skip
    goals = {"dlock": 2.2, "dlock, renewed by the watchdog": 2.4}
    return compared("free_lock", "Acquire and release of a free lock, as ratios to the wire", columns, goals, charts=2)


def wanted_lock(results: Results) -> Figure:
    cells = [(processes, think) for think in ("0", "5") for processes in (2, 8, 32)]
    lines, panels = [], []
    names: list[str] = []
    for processes, think in cells:
        rows = results.rows("contended", f"{processes} processes, sections of 1 ms, think {think} ms")
        if not rows:
            continue
        floor = next(iter(rows.values()))
        names = [name for name in rows if role(name) != "floor"]
        where = f"{processes} processes, {'no pause' if think == '0' else f'{think} ms'}"
        told = [cell(rows[name], floor) for name in names]
        told[0] = f"**{told[0]}**"
        goal = against(rows["dlock"]["ratio"], 0.9, at_least=True)
        lines.append([where, *told, floor["p99 ms"], goal])
        panels.append(bars(where, {name: rows[name] for name in names}, "ratio", {"dlock": 0.9}))
    header = ["", *(f"{short(name)} (p99, Jain)" for name in names), "floor's p99 ms", "goal"]
    alt = "Sections per second of a lock that many processes want, as ratios to passing a token"
    return Figure("wanted_lock", alt, table(header, lines), panels, 3)


def cell(row: Row, floor: Row) -> str:
    """Write throughput, the 99th percentile as a multiple of the floor's, and fairness."""
    return f"{row['ratio']:.2f} ({row['p99 ms'] / floor['p99 ms']:.1f}, {row['Jain']:.2f})"


HELD: Final = {"renew µs": 4.0, "list µs": 3.0, "client B": 800.0, "server B": 300.0}


def held_leases(results: Results) -> Figure:
    tables = results.parts.get("held", {}).get("tables", [{"rows": []}])
    most = max((row["leases"] for row in tables[0]["rows"]), default=0)
    rows = {row["contestant"]: row for row in tables[0]["rows"] if row["leases"] == most}
    columns = [*HELD, "renew requests", "acquire µs", "release µs"]
    lines = [[name, *(row.get(column) or "-" for column in columns)] for name, row in rows.items()]
    if ours := rows.get("dlock"):
        lines.append(["goal", *(against(ours[column], goal) for column, goal in HELD.items()), "", "", ""])
    panels = [bars(column, rows, column, {"dlock": goal}, floor=None) for column, goal in HELD.items() if rows]
    return Figure("held_leases", f"What each of {most:,} held leases costs", table(["", *columns], lines), panels, 2)


def ten_names(results: Results) -> Figure:
    same, split = (results.rows("many", f"10 locks together, {layout}") for layout in ("same", "split"))
    columns = [("one CPU", same, "work ratio"), ("a CPU each", split, "ratio"), ("requests", same, "requests")]
    return compared(
        "ten_names", "Ten locks together, as ratios to one script each way", columns, {"dlock MultiLock": 2.5}
    )


# Rows 5 to 10, and 13: databases


def django_saves(results: Results) -> Figure:
    columns = [
        (f"{name}, {where}", results.rows("django_orm", f"Saves in {key}, {vendor}"), "work ratio")
        for name, vendor in (("PostgreSQL", "postgresql"), ("SQLite", "sqlite"))
        for where, key in (("autocommit", "autocommit"), ("in a transaction", "a transaction"))
    ]
    columns.append(("statements", columns[0][1], "statements"))
    goals = {"save_with_version()": 1.05}
    return compared("django_saves", "Saves in Django, as ratios to Model.save()", columns, goals, charts=2)


def request(results: Results) -> Figure:
    same = results.rows("request", "A request")
    columns = [
        ("one CPU", same, "work ratio"), ("0.5 ms away", results.rows("request-network", "A request"), "ratio"),
        ("work µs", same, "work µs"), ("statements", same, "statements"),
    ]  # fmt: skip
    goals = {"@locked, fence=False": 1.20, "@locked": 1.40, '@locked, fence="lease"': 1.65}
    return compared("request", "A Django request, as ratios to the bare request", columns, goals, charts=2)


def sqlalchemy_transaction(results: Results) -> Figure:
    same = results.rows("sqlalchemy_lock", "Read, write")
    far = results.rows("sqlalchemy_lock-network", "Read, write")
    columns = [
        ("one CPU", same, "work ratio"), ("0.5 ms away", far, "ratio"),
        ("work µs", same, "work µs"), ("statements", same, "statements"),
    ]  # fmt: skip
    goals = {"lock(), fence=False": 1.30, "lock()": 1.50}
    alt = "A transaction of SQLAlchemy, as ratios to the same without a lock"
    return compared("sqlalchemy_transaction", alt, columns, goals, charts=2)


def counter(results: Results) -> Figure:
    rows = results.rows("counter", "count up one row")
    goals = {"retry_on_conflict, save_with_version": 1.0, "lock(fence=False)": 0.75, "lock()": 0.60}
    lines = [
        [
            name,
            row["ratio"],
            row["p99 ms"],
            row["Jain"],
            row["lost"],
            against(row["ratio"], goals.get(name), at_least=True),
        ]
        for name, row in rows.items()
    ]
    unlike = ("F() in one UPDATE", "NO PROTECTION")
    drawn = {name: row for name, row in rows.items() if name not in unlike}
    alt = "Increments per second of one row by eight processes, as ratios to select_for_update"
    panels = [bars("increments per second", drawn, "ratio", goals)]
    panels.append(bars("p99 ms", drawn, "p99 ms", {"retry_on_conflict, save_with_version": 100.0}, floor=None))
    header = ["", "ratio", "p99 ms", "Jain", "lost updates", "goal"]
    return Figure("counter", alt, table(header, lines), panels if rows else (), 2)


def advisory(results: Results) -> Figure:
    django, sqlalchemy = (results.rows("advisory", f"transaction, {name}") for name in ("Django", "SQLAlchemy"))
    lines = [
        [name, (django.get(name) or {}).get("work ratio", ""), (sqlalchemy.get(name) or {}).get("work ratio", "")]
        for name in {**django, **sqlalchemy}
    ]
    if lines:
        ours = django["dlock"]["work ratio"], sqlalchemy["dlock"]["work ratio"]
        lines.append(["goal for dlock", against(ours[0], 2.2), against(ours[1], 1.7)])
    panels = [
        bars(name, rows, "work ratio", {"dlock": goal})
        for name, rows, goal in (("Django", django, 2.2), ("SQLAlchemy", sqlalchemy, 1.7))
        if rows
    ]
    alt = "An advisory lock inside a transaction, as ratios to the transaction without one"
    return Figure("advisory", alt, table(["", "Django", "SQLAlchemy"], lines), panels, 2)


def sqlalchemy_flush(results: Results) -> Figure:
    tables = results.parts.get("sqlalchemy_flush", {}).get("tables", [])
    columns = [(found["title"], results.rows("sqlalchemy_flush", found["title"]), "work ratio") for found in tables]
    if not columns:
        return Figure("sqlalchemy_flush", "", "")
    return compared("sqlalchemy_flush", "A flush of versioned rows", columns, {}, charts=0)


# Rows 11 and 12: a process with many tasks; imports


CROWD: Final = {"connections": 2.0, "commands per s": 5.0, "p99 ms": 2.0}


def crowd(results: Results) -> Figure:
    lines, panels = [], []
    for title in ("as many locks", "one lock"):
        rows = results.rows("crowd", f"1000 tasks wait for {title}")
        where = f"for {'1,000 locks' if title == 'as many locks' else title}"
        for name, row in rows.items():
            told = (
                [against(row[column], goal) for column, goal in CROWD.items()] if role(name) == "ours" else ["", "", ""]
            )
            cells = [row["connections"], row["commands per s"], row["hand-over p50 ms"], row["p99 ms"]]
            lines.append([f"{short(name)}, {where}", *cells, *told])
        panels += [
            bars(f"{column}, {where}", rows, column, {"dlock": goal}, floor=None)
            for column, goal in CROWD.items()
            if rows
        ]
    header = ["", "connections", "commands/s", "hand-over p50 ms", "p99 ms", "goal: connections", "commands/s", "p99"]
    return Figure("crowd", "1,000 tasks of one process wait", table(header, lines), panels, 3)


IMPORT: Final = {"modules": 45.0, "CPU ms": 40.0, "MB": 2.0}


def imports(results: Results) -> Figure:
    rows = results.rows("imports", "The cost of an import")
    lines: list[list[Any]] = [[name, *(row[column] for column in IMPORT)] for name, row in rows.items()]
    lines.append(["goal", *(f"≤ {number(goal)}" for goal in IMPORT.values())])
    panels = [
        bars(column, rows, column, dict.fromkeys(rows, goal), floor=None) for column, goal in IMPORT.items() if rows
    ]
    return Figure("imports", "What an import costs over the bare framework", table(["", *IMPORT], lines), panels, 3)


# Growth, and the other stores


def curve(results: Iterable[tuple[float, Mapping[str, Row]]], name: str, column: str) -> Line | None:
    """Return the line of one contestant: a point for each number of things that it was measured with."""
    points = [(size, float(rows[name][column])) for size, rows in results if name in rows and rows[name].get(column)]
    return Line(short(name).partition(":")[0], points, role(name)) if points else None


def curves(
    title: str, of: str, sizes: Sequence[tuple[float, Mapping[str, Row]]], column: str, names: Sequence[str]
) -> Growth:
    return Growth(title, of, [line for name in names if (line := curve(sizes, name, column))])


def growth_table(of: str, panels: Sequence[Growth]) -> str:
    """Write the lines of ours: one column for each number, one row for each panel."""
    sizes = sorted({x for panel in panels for line in panel.lines for x, _ in line.points})
    lines = [
        [f"{panel.title}, {line.label}", *(dict(line.points).get(size, "") for size in sizes)]
        for panel in panels
        for line in panel.lines
    ]
    return table([of, *map(number, sizes)], lines)


def growth_figure(name: str, alt: str, panels: Sequence[Growth], columns: int) -> Figure:
    drawn = [panel for panel in panels if panel.lines]
    return Figure(name, alt, growth_table(drawn[0].of, drawn) if drawn else "", drawn, columns)


def more_leases(results: Results) -> Figure:
    tables = results.parts.get("held", {}).get("tables", [{"rows": []}])
    sizes = sorted({row["leases"] for row in tables[0]["rows"]})
    found = [(size, {row["contestant"]: row for row in tables[0]["rows"] if row["leases"] == size}) for size in sizes]
    names = list(found[-1][1])[:3] if found else []
    panels = [curves(f"{column} each", "leases held", found, column, names) for column in HELD]
    return growth_figure("more_leases", "What each lease costs when more are held", panels, 2)


def more_waiters(results: Results) -> Figure:
    found = []
    for processes in (2, 4, 8, 16, 32, 64):
        title = f" {processes} processes, sections of 1 ms, think 0 ms"
        if rows := results.rows("contended", title) or results.rows("contended-growth", title):
            found.append((processes, rows))
    names = [name for name in (found[0][1] if found else {}) if role(name) != "peer"]
    columns = ("sections/s", "p99 ms", "server CPU µs")
    return growth_figure(
        "more_waiters", "A lock that more processes want",
        [curves(column, "processes", found, column, names) for column in columns], 3,
    )  # fmt: skip


def more_names(results: Results) -> Figure:
    found = []
    for size in (1, 10, 100, 1000):
        title = f"{size} locks together, same"
        if rows := results.rows("many", title) or results.rows("many-growth", title):
            found.append((size, rows))
    names = [name for name in (found[0][1] if found else {}) if role(name) != "peer"]
    panels = [
        curves("work µs", "names", found, "work µs", names),
        curves("ratio", "names", found, "work ratio", names[1:]),
    ]
    return growth_figure("more_names", "More locks together", panels, 2)


def more_tasks(results: Results) -> Figure:
    found = [(tasks, results.rows("crowd", f"{tasks} tasks wait for one lock")) for tasks in (1, 10, 100, 1000)]
    names = list(found[-1][1])
    return growth_figure(
        "more_tasks", "More tasks of one process wait for one lock",
        [curves(column, "tasks", found, column, names) for column in CROWD], 3,
    )  # fmt: skip


def stores(results: Results) -> Figure:
    rows = results.rows("stores", "A free lock in every store")
    lines = [[name, row["ratio"], row["µs"], row["Python CPU µs"]] for name, row in rows.items()]
    header = ["store", "`redis://` is 1", "µs", "Python CPU µs"]
    shown = [Bar(name, row["ratio"], "ours") for name, row in rows.items()]
    panels = [Bars("acquire and release; redis:// is 1", shown)] if rows else []
    return Figure("stores", "A free lock in every store", table(header, lines), panels)


FIGURES: Final[Sequence[Callable[[Results], Figure]]] = (
    machine,
    free_lock, wanted_lock, held_leases, ten_names, django_saves, request, sqlalchemy_transaction, counter, crowd,
    imports, advisory, sqlalchemy_flush, more_leases, more_waiters, more_names, more_tasks, stores,
)  # fmt: skip
