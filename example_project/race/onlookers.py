"""What a race shows while it runs: a bar that grows, or a line of JSON for each order."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .clients import Answer
from .report import DONE

Answers = list[Answer]
Follow = Callable[[str, list[int], Iterable[Answers]], Iterable[Answers]]


@contextmanager
def onlooker(format: str) -> Iterator[Follow]:
    """Return a function that passes on the answers of a round, and shows them."""
    if format == "lines":
        yield lines
    else:
        with progress_bar() as bar:
            yield lambda strategy, numbers, pairs: bar.track(pairs, total=len(numbers), description=strategy)


def lines(strategy: str, numbers: list[int], pairs: Iterable[Answers]) -> Iterator[Answers]:
    """Print the number of orders, and then for each the actions that were done, and its two requests' milliseconds."""
    tell({"strategy": strategy, "orders": len(numbers)})
    places = {number: place for place, number in enumerate(numbers)}
    for answers in pairs:
        done = [answer.action for answer in answers if answer.status in DONE]
        milliseconds = [round(1000 * (answer.ended - answer.started), 1) for answer in answers]
        tell({"strategy": strategy, "order": places[answers[0].order], "done": done, "ms": milliseconds})
        yield answers


def tell(event: dict[str, object]) -> None:
    print(json.dumps(event), flush=True)


def progress_bar() -> Progress:
    columns = [
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("orders"),
        TimeElapsedColumn(),
    ]
    return Progress(*columns, console=Console(stderr=True))
