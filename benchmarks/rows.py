"""The comparison figures of docs/benchmarks.md: what is picked from the results, under which name, with which goal.

Each figure is a function with the name that the page's marks use. Goals are defined only here.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.figures import Figure, Results, Row, against, bars, compared, role, short, table
from benchmarks.panels import Bar, Bars, number

MAX_QUIET_LOAD: Final = 4.0
"""The benchmarks alone cause a load of up to this."""


def machine(results: Results) -> Figure:
    """Return a sentence instead of a table: when and where, at which load, with which versions."""
    about = dict(results.parts.get("machine", {}))
    loads = [part["load before"] for part in results.parts.values() if "load before" in part]
    if not about or not loads:
        return Figure("machine", "", "Nothing has been measured yet.")
    date, cores = about.pop("date"), about.pop("cores")
    versions = ", ".join(f"{name} {version}" for name, version in about.items())
    busy = " The machine was not idle: take the figures as a first impression." if max(loads) > MAX_QUIET_LOAD else ""
    sentence = f"The last run was made on {date}, on {cores} cores, at loads of {min(loads)} to {max(loads)}.{busy}"
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
    return compared("free_lock", "Acquire and release of a free lock, as ratios to the floor", columns, goals, charts=2)


def wanted_lock(results: Results) -> Figure:
    cells = [(processes, think) for think in ("0", "5") for processes in (2, 8, 32)]
    lines, panels = [], []
    names: list[str] = []
    for processes, think in cells:
        rows = results.rows("contended", f" {processes} processes, sections of 1 ms, think {think} ms")
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
    alt = "Sections per second of a contended lock, as ratios to passing a token"
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
    return Figure("held_leases", f"The cost of each of {most:,} held leases", table(["", *columns], lines), panels, 2)


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
    alt = "An SQLAlchemy transaction, as ratios to the same without a lock"
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


CROWD: Final = {"connections": 2.0, "requests per s": 5.0, "p99 ms": 2.0}


def crowd(results: Results) -> Figure:
    lines, panels = [], []
    for title in ("as many locks", "one lock"):
        rows = results.rows("crowd", f"1000 tasks wait for {title}")
        where = f"for {'1,000 locks' if title == 'as many locks' else title}"
        for name, row in rows.items():
            told = (
                [against(row[column], goal) for column, goal in CROWD.items()] if role(name) == "ours" else ["", "", ""]
            )
            cells = [row["connections"], row["requests per s"], row["hand-over p50 ms"], row["p99 ms"], row["served"]]
            lines.append([f"{short(name)}, {where}", *cells, *told])
        panels += [
            bars(f"{column}, {where}", rows, column, {"dlock": goal}, floor=None)
            for column, goal in CROWD.items()
            if rows
        ]
    header = [
        "",
        "connections",
        "requests/s",
        "hand-over p50 ms",
        "p99 ms",
        "served in 10 s",
        "goal: connections",
        "requests/s",
        "p99",
    ]
    return Figure("crowd", "1,000 waiting tasks of one process", table(header, lines), panels, 3)


IMPORT: Final = {"modules": 45.0, "CPU ms": 40.0, "MB": 2.0}


def imports(results: Results) -> Figure:
    rows = results.rows("imports", "The cost of an import")
    lines: list[list[Any]] = [[name, *(row[column] for column in IMPORT)] for name, row in rows.items()]
    lines.append(["goal", *(f"≤ {number(goal)}" for goal in IMPORT.values())])
    panels = [
        bars(column, rows, column, dict.fromkeys(rows, goal), floor=None) for column, goal in IMPORT.items() if rows
    ]
    return Figure("imports", "The cost of an import, without the framework", table(["", *IMPORT], lines), panels, 3)


def stores(results: Results) -> Figure:
    rows = results.rows("stores", "A free lock in every store")
    lines = [[name, row["ratio"], row["µs"], row["Python CPU µs"]] for name, row in rows.items()]
    header = ["store", "`redis://` is 1", "µs", "Python CPU µs"]
    shown = [Bar(name, row["ratio"], "ours") for name, row in rows.items()]
    panels = [Bars("acquire and release; redis:// is 1", shown)] if rows else []
    return Figure("stores", "A free lock in every store", table(header, lines), panels)


FIGURES: Final[Sequence[Callable[[Results], Figure]]] = (
    machine, free_lock, wanted_lock, held_leases, ten_names, django_saves, request, sqlalchemy_transaction, counter,
    crowd, imports, advisory, sqlalchemy_flush, stores,
)  # fmt: skip
