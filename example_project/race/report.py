"""The results of a race, counted from the database and from the answers."""

from collections import Counter
from dataclasses import asdict, dataclass, fields
from statistics import quantiles

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from . import Tally
from .clients import Answer

DONE, TOO_LATE, LOCKED = (200, 302, 303), 409, 423

ANOMALIES = ("both_shipped_and_cancelled", "refunds_of_shipped", "lost_updates")
HEADINGS = {
    "both_shipped_and_cancelled": "shipped\nand\ncancelled",
    "refunds_of_shipped": "refunds\nof\nshipped",
    "throughput": "req/s",
}


@dataclass(frozen=True)
class Result:
    """One line of the report; times are milliseconds, throughput is requests a second."""

    strategy: str
    orders: int
    both_shipped_and_cancelled: int
    refunds_of_shipped: int
    lost_updates: int
    conflicts: int
    retries: int
    p50_ms: float
    p99_ms: float
    throughput: float

    @property
    def anomalies(self) -> int:
        return sum(getattr(self, name) for name in ANOMALIES)


def result(strategy: str, tally: Tally, answers: list[Answer]) -> Result:
    """Return the result of a race from what the database and the customers say."""
    latencies = quantiles([1000 * (answer.ended - answer.started) for answer in answers], n=100, method="inclusive")
    duration = max(answer.ended for answer in answers) - min(answer.started for answer in answers)
    return Result(
        strategy=strategy,
        orders=tally.orders,
        **{name: getattr(tally, name) for name in ANOMALIES},
        conflicts=sum(answer.status in {TOO_LATE, LOCKED} for answer in answers),
        retries=sum(answer.retries for answer in answers),
        p50_ms=round(latencies[49], 1),
        p99_ms=round(latencies[98], 1),
        throughput=round(len(answers) / duration, 1),
    )


def faults(result: Result, tally: Tally, answers: list[Answer], log: str) -> list[str]:
    """Return what must not have happened: errors, answers that the database disproves, anomalies under protection."""
    found = [
        f"{times} times {f'HTTP {status}' if status else 'no answer'}\n{log}"
        for status, times in Counter(answer.status for answer in answers).items()
        if status not in {*DONE, TOO_LATE, LOCKED}
    ]
    claimed = sum(answer.status in DONE for answer in answers)
    if claimed != tally.changed:
        found.append(f"{claimed} answers say that an order was changed, the database says {tally.changed}")
    if result.anomalies and result.strategy != "none":
        found.append("it has let anomalies through")
    return [f"{result.strategy}: {fault}" for fault in found]


def table(results: list[Result], title: str) -> Table:
    """Draw the results for a terminal, anomalies in red."""
    drawing = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for field in fields(Result):
        heading = HEADINGS.get(field.name, field.name.replace("_", "\n"))
        drawing.add_column(heading, justify="left" if field.name == "strategy" else "right", vertical="bottom")
    for result in results:
        drawing.add_row(*(cell(name, value) for name, value in asdict(result).items()))
    return drawing


def cell(name: str, value: object) -> Text:
    style = ("bold red" if value else "green") if name in ANOMALIES else ""
    return Text(str(value), style)
