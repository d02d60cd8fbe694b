"""How every benchmark measures: pinned, interleaved with a floor, as ratios and medians, in tables or JSON.

A contestant is a function without arguments that does one operation. Each run of a contestant stands between two runs
of the floor, so that a busy machine slows all three: only ratios to these neighbours are compared.
"""

import argparse
import gc
import json
import os
import random
import re
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from tests import servers

Operation = Callable[[], object]
Row = dict[str, Any]

LAYOUTS: Final = ("same", "split")
WARM_UP: Final = 50
CPUS: Final = sorted(os.sched_getaffinity(0))


@dataclass
class Runs:
    """What was measured of one contestant, one entry per round."""

    costs: list["Cost"] = field(default_factory=list)
    elapsed: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)

    def note(self, cost: "Cost", *neighbours: "Cost") -> None:
        self.costs.append(cost)
        self.elapsed.append(cost.elapsed / statistics.mean(one.elapsed for one in neighbours))
        self.work.append(cost.work / statistics.mean(one.work for one in neighbours))

    def row(self) -> Row:
        return {
            "µs": round(statistics.median(cost.elapsed for cost in self.costs), 1),
            "ratio": round(statistics.median(self.elapsed), 2),
            "IQR": spread(self.elapsed),
            "work µs": round(statistics.median(cost.work for cost in self.costs), 1),
            "work ratio": round(statistics.median(self.work), 2),
            "work IQR": spread(self.work),
            "Python CPU µs": round(statistics.median(cost.client for cost in self.costs), 1),
        }


@dataclass(frozen=True)
class Cost:
    """Microseconds of one operation: by the clock, and of CPU in this process and in the servers.

    On a shared machine, only CPU time can be trusted; on an idle one with a single CPU, both are the same.
    """

    elapsed: float
    client: float
    server: float

    @property
    def work(self) -> float:
        return self.client + self.server


def spread(values: Sequence[float]) -> str:
    """Return the lower and the upper quartile."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{low:.2f}-{high:.2f}"


def interleave(
    contestants: Mapping[str, Operation], floor: str, rounds: int, count: int, servers: Sequence[int] = ()
) -> dict[str, Runs]:
    """Measure all, the floor before and after each of the others, in an order that every round shuffles."""
    for operation in contestants.values():
        timed(operation, WARM_UP)
    runs = {name: Runs() for name in contestants}
    others = [name for name in contestants if name != floor]
    for _ in range(rounds):
        before = timed(contestants[floor], count, servers)
        for name in shuffled(others) or [floor]:
            cost = timed(contestants[name], count, servers)
            after = timed(contestants[floor], count, servers)
            runs[name].note(cost, before, after)
            if name != floor:
                runs[floor].note(after, before, after)
            before = after
    return runs


def shuffled(names: Iterable[str]) -> list[str]:
    order = list(names)
    random.shuffle(order)
    return order


def timed(operation: Operation, count: int, servers: Sequence[int] = ()) -> Cost:
    gc.collect()
    repeat = range(count)
    server, client, start = cpu_of(servers), time.process_time(), time.perf_counter()
    for _ in repeat:
        operation()
    elapsed, client, server = time.perf_counter() - start, time.process_time() - client, cpu_of(servers) - server
    return Cost(elapsed / count * 1e6, client / count * 1e6, server / count * 1e6)


def cpu_of(pids: Sequence[int]) -> float:
    """Return the CPU seconds that these processes have used in all their threads."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def pin(layout: str, *servers: int) -> None:
    """Pin this process and the servers to one CPU ("same"), so that only work counts, or to one each ("split")."""
    ours, theirs = CPUS[0], CPUS[0] if layout == "same" else CPUS[-1]
    set_cpus(os.getpid(), {ours})
    for pid in servers:
        set_cpus(pid, {theirs})


def unpin(*servers: int) -> None:
    for pid in (os.getpid(), *servers):
        set_cpus(pid, set(CPUS))


def set_cpus(pid: int, cpus: set[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # a thread may end meanwhile
            os.sched_setaffinity(int(task.name), cpus)


@contextmanager
def counted_sends() -> Iterator[list[int]]:
    """Count what this process writes to sockets: one write is one request."""
    sent = [0]
    kept = {name: getattr(socket.socket, name) for name in ("send", "sendall")}

    def counting(write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            sent[0] += 1
            return write(*args)

        return wrapper

    for name, write in kept.items():
        setattr(socket.socket, name, counting(write))
    try:
        yield sent
    finally:
        for name in kept:
            delattr(socket.socket, name)


@contextmanager
def redis_server() -> Iterator[servers.Server]:
    """Run a Redis that keeps its data in memory only."""
    with scratch() as directory:
        server = servers.redis(directory / "redis", "--appendonly", "no")
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def scratch() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="dlock-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Report:
    """Tables of one benchmark, printed when they are ready, or all together as JSON."""

    def __init__(self, format: str) -> None:
        self.format = format
        self.tables: list[dict[str, Any]] = []

    def add(self, title: str, rows: Sequence[Row]) -> None:
        rows = [{**row} for row in rows]
        self.tables.append({"title": title, "load": round(os.getloadavg()[0], 1), "rows": rows})
        if self.format == "table":
            Console(width=None if os.isatty(1) else 200).print(_table(f"{title} (load {os.getloadavg()[0]:.1f})", rows))

    def end(self) -> None:
        if self.format == "json":
            print(json.dumps(self.tables, ensure_ascii=False, indent=1))


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*[str(row.get(column, "")) for column in columns])
    return table


def arguments(description: str | None, **defaults: float | str) -> argparse.Namespace:
    """Parse --format, --only (see `chosen`) and one option per default."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--format", choices=("table", "json"), default="table")
    for name, value in {"only": "", **defaults}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default {value}")
    return parser.parse_args()


def chosen(contestants: Mapping[str, Any], only: str, floor: str) -> dict[str, Any]:
    """Return the floor, and all in whose name a word begins with one of the comma-separated texts in `only`."""
    begins = re.compile("|".join(rf"\b{re.escape(part)}" for part in only.split(",")) if only else "")
    return {name: one for name, one in contestants.items() if name == floor or begins.search(name)}
