"""Many processes contend for one lock: throughput, waiting times, fairness and work, against one contestant.

Every process records when it requested, got and released the lock, by a shared clock: the merged records give all
figures, and show whether two sections overlapped. `gap` is the time from the end of one section to the beginning of the
next, `server CPU` what the servers and their child processes have used meanwhile.
"""

import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import measure

SECTION: Final = 0.001
FORK: Final = multiprocessing.get_context("fork")

Pair = tuple[Callable[[], Any], Callable[[Any], Any]]
"""A function that acquires the lock, and one that releases what the first returned."""
Make = Callable[[], Pair]
"""A function that each process calls, to make its own connections."""


@dataclass(frozen=True)
class Section:
    worker: int
    asked: int
    got: int
    left: int


@dataclass(frozen=True)
class Work:
    sections: list[Section]
    requests: int
    cpu: float


def worker(number: int, make: Make, think: float, parent: Any) -> None:
    """Report readiness, acquire the lock repeatedly between the two times of the reply, and send what happened."""
    acquire, release = make()
    release(acquire())  # connects and loads scripts before the start
    parent.send(None)
    start, end = parent.recv()
    sections = []
    with measure.counted_sends() as sent:
        time.sleep(max(0.0, start - time.monotonic()))
        cpu = time.process_time()
        while time.monotonic() < end:
            asked = time.monotonic_ns()
            grant = acquire()
            got = time.monotonic_ns()
            time.sleep(SECTION)
            left = time.monotonic_ns()
            release(grant)
            sections.append(Section(number, asked, got, left))
            if think:
                time.sleep(think)
        parent.send(Work(sections, sent[0], time.process_time() - cpu))


@dataclass(frozen=True)
class Run:
    """What all processes did, when the time was over, and the CPU seconds of the servers until then."""

    done: list[Work]
    processes: int
    seconds: float
    end: float
    server: float


def run(make: Make, processes: int, think: float, seconds: float, servers: Collection[int]) -> Run:
    """Run all processes; the run begins when all of them are ready."""
    pipes, workers = [], []
    for number in range(processes):
        ours, theirs = FORK.Pipe()
        workers.append(FORK.Process(target=worker, args=(number, make, think, theirs), daemon=True))
        pipes.append(ours)
        workers[-1].start()
        theirs.close()
    pipes = [pipe for pipe in pipes if pipe.poll(60) and pipe.recv() is None]
    start = time.monotonic() + 0.1
    end = start + seconds
    for pipe in pipes:
        pipe.send((start, end))
    before, after = cpu_at(start, servers), cpu_at(end, servers)
    done = [pipe.recv() for pipe in pipes if pipe.poll(60)]
    for one in workers:
        one.join(10)
        one.kill()
    if len(done) < processes:
        print(f"{processes - len(done)} of {processes} processes did not end", file=sys.stderr)
    return Run(done, processes, seconds, end, after - before)


def cpu_at(moment: float, servers: Collection[int]) -> float:
    """Return the CPU seconds that the servers and their children, also those that have ended, have used until then."""
    time.sleep(max(0.0, moment - time.monotonic()))
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat") if servers else ():
        with suppress(OSError):  # it has ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            if not {int(stat.parent.name), int(fields[1])}.isdisjoint(servers):
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Figures:
    rate: float
    waits: list[float]
    jain: float
    starved: int
    requests: float
    gap: float
    cpu: float
    server: float
    overlaps: int

    @property
    def work(self) -> float:
        return self.cpu + self.server


def figures(run: Run) -> Figures:
    every = sorted((one for work in run.done for one in work.sections), key=lambda one: one.got)
    inside = [one for one in every if one.got / 1e9 < run.end]
    shares = Counter(one.worker for one in inside)
    counts = [shares[number] for number in range(run.processes)]
    gaps = [(after.got - before.left) / 1e6 for before, after in itertools.pairwise(inside)]
    return Figures(
        rate=len(inside) / run.seconds,
        waits=sorted((one.got - one.asked) / 1e6 for one in every),
        jain=sum(counts) ** 2 / (run.processes * sum(count**2 for count in counts) or 1),
        starved=counts.count(0),
        requests=sum(work.requests for work in run.done) / max(1, len(every)),
        gap=statistics.median(gaps) if gaps else 0.0,
        cpu=sum(work.cpu for work in run.done) / max(1, len(every)) * 1e6,
        server=run.server / max(1, len(inside)) * 1e6,
        overlaps=sum(after.got < before.left for before, after in itertools.pairwise(every)),
    )


def row(name: str, runs: Sequence[Figures], ratios: Sequence[float]) -> measure.Row:
    waits = sorted(itertools.chain.from_iterable(one.waits for one in runs)) or [0.0]  # no process got the lock
    return {
        "contestant": name,
        "sections/s": round(statistics.median(one.rate for one in runs)),
        "ratio": round(statistics.median(ratios), 2),
        "range": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "p50 ms": round(waits[len(waits) // 2], 1),
        "p99 ms": round(waits[len(waits) * 99 // 100], 1),
        "max ms": round(waits[-1]),
        "Jain": round(statistics.median(one.jain for one in runs), 3),
        "starved": max(one.starved for one in runs),
        "gap ms": round(statistics.median(one.gap for one in runs), 2),
        "requests": round(statistics.median(one.requests for one in runs), 1),
        "CPU µs": round(statistics.median(one.cpu for one in runs)),
        "server CPU µs": round(statistics.median(one.server for one in runs)),
        "overlaps": sum(one.overlaps for one in runs),
    }


def beside(
    base: str, contestants: Mapping[str, Make], processes: int, think: float, options: Any, servers: Collection[int]
) -> list[measure.Row]:
    """Run all contestants, in a new order in every round; the throughput of `base` in the same round counts as 1."""
    runs: dict[str, list[Figures]] = {name: [] for name in contestants}
    for _ in range(options.repeat):
        for name in measure.shuffled(contestants):
            runs[name].append(figures(run(contestants[name], processes, think, options.seconds, servers)))
    return [
        {**row(name, runs[name], ratios(runs, name, base, "rate")), "work ratio": work_ratio(runs, name, base)}
        for name in contestants
    ]


def ratios(runs: Mapping[str, Sequence[Figures]], name: str, base: str, what: str) -> list[float]:
    """Return a ratio for each round; a base of 0 is replaced by a tiny number."""
    pairs = zip(runs[name], runs[base], strict=True)
    return [getattr(one, what) / max(getattr(other, what), 1e-9) for one, other in pairs]


def work_ratio(runs: Mapping[str, Sequence[Figures]], name: str, base: str) -> float:
    return round(statistics.median(ratios(runs, name, base, "work")), 2)


def tables(
    report: measure.Report,
    title: str,
    base: str,
    contestants: Mapping[str, Make],
    options: Any,
    servers: Collection[int] = (),
) -> None:
    """Report one table for each pause and number of processes that were asked for."""
    chosen = measure.chosen(contestants, options.only, base)
    for think, processes in itertools.product(options.think.split(","), options.processes.split(",")):
        rows = beside(base, chosen, int(processes), float(think) / 1000, options, servers)
        report.add(f"{title}, contended: {processes} processes, sections of 1 ms, think {think} ms", rows)
