"""The growth figures of docs/benchmarks.md: more leases, waiters, names, tasks; the shop under more load.

Each figure is a function with the name that the page's marks use.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from benchmarks.figures import Figure, Results, Row, role, short, table
from benchmarks.panels import Growth, Line, Role, number
from benchmarks.rows import CROWD, HELD


def curve(results: Iterable[tuple[float, Mapping[str, Row]]], name: str, column: str) -> Line | None:
    """Return the line of one contestant, with a point for each size that was measured."""
    points = [
        (size, float(rows[name][column]))
        for size, rows in results
        if name in rows and (rows[name].get(column) or 0) > 0
    ]
    return Line(short(name).partition(":")[0], points, role(name)) if points else None


def curves(
    title: str, of: str, sizes: Sequence[tuple[float, Mapping[str, Row]]], column: str, names: Sequence[str]
) -> Growth:
    return Growth(title, of, [line for name in names if (line := curve(sizes, name, column))])


def growth_table(of: str, panels: Sequence[Growth]) -> str:
    """Write a table with a column for each size and a row for each line."""
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
    return growth_figure("more_leases", "The cost of each lease, by number of held leases", panels, 2)


def more_waiters(results: Results) -> Figure:
    found = []
    for processes in (2, 4, 8, 16, 32, 64):
        title = f" {processes} processes, sections of 1 ms, think 0 ms"
        if rows := results.rows("contended", title) or results.rows("contended-growth", title):
            found.append((processes, rows))
    names = [name for name in (found[0][1] if found else {}) if role(name) != "peer"]
    columns = ("sections/s", "p99 ms", "server CPU µs")
    return growth_figure(
        "more_waiters", "A contended lock, by number of processes",
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
    return growth_figure("more_names", "A MultiLock, by number of names", panels, 2)


def more_tasks(results: Results) -> Figure:
    found = [(tasks, results.rows("crowd", f"{tasks} tasks wait for one lock")) for tasks in (1, 10, 100, 1000)]
    names = list(found[0][1])
    return growth_figure(
        "more_tasks", "A contended lock, by number of waiting tasks",
        [curves(column, "tasks", found, column, names) for column in CROWD], 3,
    )  # fmt: skip


# The shop under load


SERVERS: Final = ("gunicorn, 4 processes", "gunicorn, 2 x 16 threads", "uvicorn, 2 processes")
STRATEGIES: Final[Mapping[str, Role]] = {"none": "floor", "row": "peer", "version": "peer", "lease": "ours"}


def under_load(results: Results) -> Figure:
    lines, panels = [], []
    customers = sorted({row["customers"] for server in SERVERS for row in results.table("load", server)})
    for column in ("requests/s", "p99 ms"):
        for server in SERVERS:
            rows = results.table("load", server)
            lines_of = {
                name: [(row["customers"], row[column]) for row in rows if row["contestant"] == name]
                for name in STRATEGIES
            }
            drawn = [Line(name, lines_of[name], role) for name, role in STRATEGIES.items() if lines_of[name]]
            if drawn:
                panels.append(Growth(f"{column}, {server}", "customers", drawn))
    for server in SERVERS:
        for name in STRATEGIES:
            rows = [row for row in results.table("load", server) if row["contestant"] == name]
            told = [f"{row['requests/s']:.0f} ({row['p50 ms']:.0f}, {row['p99 ms']:.0f})" for row in rows]
            sums = [sum(row[column] for row in rows) for column in ("errors", "anomalies")]
            if rows:
                lines.append([f"{server}, {name}", *told, *sums])
    header = ["requests/s (p50, p99 ms)", *map(number, customers), "errors", "anomalies"]
    return Figure("under_load", "The shop under load, for each strategy", table(header, lines), panels, 3)


def in_trouble(results: Results) -> Figure:
    columns = ("requests/s", "p50 ms", "p99 ms", "served", "423", "503")
    lines: list[list[Any]] = []
    for trouble in ("200 ms late", "killed, data kept", "killed, data lost"):
        for row in results.table("load", trouble):
            told = [row.get(column, "") for column in columns]
            lines.append([f"{trouble}: {row['contestant']}", *("" if cell is None else cell for cell in told)])
    return Figure("in_trouble", "", table(["", *columns], lines))


FIGURES: Final[Sequence[Callable[[Results], Figure]]] = (
    more_leases, more_waiters, more_names, more_tasks, under_load, in_trouble,
)  # fmt: skip
