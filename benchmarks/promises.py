"""Check the answers to customers against our guarantees while Redis is slow or dead."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from benchmarks.customers import Answer

DONE: Final = frozenset({200, 302, 303})
TOO_LATE, LOCKED, UNAVAILABLE = 409, 423, 503
IN_GOOD_TIMES: Final = DONE | {TOO_LATE, LOCKED}
CALL_S: Final = 3.0
"""How long a request may last beyond its wait for the lock: a call to the store has 2 s, the request has the rest."""
RECOVERY_S: Final = 2.0
"""After the end of a fault, the first order has to be served within this time, and no request may fail after it."""
PAGE_S: Final = 2.0


class Tally(Protocol):
    """What the database says about all orders."""

    both_shipped_and_cancelled: int
    refunds_of_shipped: int
    lost_updates: int
    changed: int


@dataclass(frozen=True)
class Fault:
    """When Redis had become slow or dead, began to recover and had recovered; `wait` is WAIT of the settings.

    A Redis that starts serves requests before its start is known to be over. `slack` is added to each bound, in
    seconds, for tests on a busy machine.
    """

    begin: float
    healing: float
    end: float
    wait: float
    is_dead: bool
    slack: float = 0.0


def of_data(tally: Tally, answers: Sequence[Answer]) -> Iterator[str]:
    """Yield what the database must never show, such as orders both shipped and cancelled, or lost updates."""
    for name in ("both_shipped_and_cancelled", "refunds_of_shipped", "lost_updates"):
        if number := getattr(tally, name):
            yield f"{number} {name.replace('_', ' ')}"
    orders = [answer.status for answer in answers if answer.kind == "order"]
    done, unknown = sum(status in DONE for status in orders), sum(status not in IN_GOOD_TIMES for status in orders)
    if not done <= tally.changed <= done + unknown:
        yield f"{done} answers say that an order was changed, {unknown} do not say; the database says {tally.changed}"


def of_answers(answers: Sequence[Answer], fault: Fault) -> Iterator[str]:
    """Yield the answers that break a promise of the documentation."""
    orders = [answer for answer in answers if answer.kind == "order"]
    pages = [answer for answer in answers if answer.kind == "page"]
    yield from wrong(
        "pages that need no lock", (one for one in pages if one.status != 200 or one.seconds > PAGE_S + fault.slack)
    )
    late = (one for one in orders if one.seconds > fault.wait + CALL_S + fault.slack)
    yield from wrong(f"orders answered after more than {fault.wait:g} + {CALL_S:g} s", late)
    allowed = IN_GOOD_TIMES | {UNAVAILABLE} if fault.is_dead else IN_GOOD_TIMES
    yield from wrong("orders", (one for one in orders if one.status not in allowed))
    if fault.is_dead:
        inside = [one for one in orders if one.sent > fault.begin and one.ended < fault.healing]
        yield from wrong("orders while Redis was dead", (one for one in inside if one.status != UNAVAILABLE))
        if not inside:
            yield "no request was answered while Redis was dead: the fault was too short to show anything"
    calm = [one for one in orders if one.ended < fault.begin or one.sent > fault.end + RECOVERY_S + fault.slack]
    yield from wrong("orders in good times", (one for one in calm if one.status not in IN_GOOD_TIMES))
    if (seconds := recovery(answers, fault)) > RECOVERY_S + fault.slack:
        yield f"the first order after the fault was served after {seconds:.1f} s"


def recovery(answers: Sequence[Answer], fault: Fault) -> float:
    """Return how long after the end of the fault an order was served; infinity if none was."""
    served = (one.ended - fault.end for one in answers if one.kind == "order" and one.status in DONE)
    return min((seconds for seconds in served if seconds > 0), default=float("inf"))


def wrong(what: str, answers: Iterator[Answer]) -> Iterator[str]:
    """Yield one line for each status."""
    found = list(answers)
    for status, times in Counter(answer.status for answer in found).items():
        longest = max(answer.seconds for answer in found if answer.status == status)
        yield f"{what}: {times} times {f'HTTP {status}' if status else 'no answer'}, after up to {longest:.1f} s"
