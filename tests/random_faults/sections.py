"""What a section does in its database: generators that yield statements and get rows, for blocking and asynchronous drivers alike.

A text that is yielded instead of a statement names the stage that the section has reached: there it may be stopped. A `Save` is
carried out by the client with its ORM.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Final

from tests.random_faults.items import Item

Statement = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Save:
    """Write a row that carries its own fence through the ORM, from an instance that knows nothing of the fence's present state."""

    key: str
    value: int
    current: int


Steps = Generator[Statement | Save | str, Any, None]

READ: Final = "SELECT value, current FROM item WHERE name = :item"
WRITE: Final = "UPDATE item SET value = :value, current = :current WHERE name = :item"
INCREMENT: Final = "UPDATE item SET value = value + 1 WHERE name = :item"
STATE: Final = "SELECT state FROM orders WHERE item = :item AND number = :number"
DECIDE: Final = "UPDATE orders SET state = :what WHERE item = :item AND number = :number"
OPEN: Final = "INSERT INTO orders (item, number, state) VALUES (:item, :number, 'paid')"
TELL: Final = "INSERT INTO event (item, number, what, section) VALUES (:item, :number, :what, :section)"
JOURNAL: Final = (
    "INSERT INTO journal (item, value, seen, section, token, shared)"
    " VALUES (:item, :value, :seen, :section, :token, :shared)"
)


@dataclass
class Work:
    """One section's work: its items, and how it gets the token of each of them."""

    section: str
    items: list[Item]
    token: Callable[[Item], int]
    seen: dict[str, tuple[int, int]] = field(default_factory=dict)


def add(work: Work) -> list[Steps]:
    """Read, think and write: the register and the counter."""

    def steps() -> Steps:
        yield from _read(work)
        yield "read"
        yield from _write(work)
        yield "written"

    return [steps()]


def add_later(work: Work) -> list[Steps]:
    """Read in one transaction, and write in the next one under the same lease."""

    def first() -> Steps:
        yield from _read(work)
        yield "read"

    def second() -> Steps:
        yield "between"
        yield from _write(work)
        yield "written"

    return [first(), second()]


def post(work: Work) -> list[Steps]:
    """Count up without having read, which shared holders may do side by side."""

    def steps() -> Steps:
        for item in work.items:
            yield INCREMENT, {"item": item.key}
            yield "written"
            [(value, _)] = yield READ, {"item": item.key}
            yield _journal(work, item, value, value - 1, shared=1)

    return [steps()]


def ship(work: Work) -> list[Steps]:
    return [_decide(work, "shipped")]


def cancel(work: Work) -> list[Steps]:
    return [_decide(work, "cancelled")]


def save(work: Work) -> list[Steps]:
    """Change a row that has a version: its client reads and saves it through its ORM."""
    return [_of_client()]


def remake(work: Work) -> list[Steps]:
    """Delete a row that has a version, and make it anew under the same key: an older reader must not save over it."""
    return [_of_client()]


def _of_client() -> Steps:
    yield from ()


SHARED: Final = (post,)
BY_VERSION: Final = (save, save, remake)
ALONE: Final = (add, add, add_later, ship, ship, cancel, cancel)


def _decide(work: Work, what: str) -> Steps:
    """Ship or cancel the item's present order if it is paid, and open the next one if another section was first."""
    yield from _read(work)
    for item in work.items:
        value, number = work.seen[item.key]
        place = {"item": item.key, "number": number}
        [(state,)] = yield STATE, place
        yield "read"
        if state == "paid":
            yield DECIDE, {**place, "what": what}
            yield TELL, {**place, "what": what, "section": work.section}
        else:
            yield OPEN, {"item": item.key, "number": number + 1}
            work.seen[item.key] = value, number + 1
    yield from _write(work)
    yield "written"


def _read(work: Work) -> Steps:
    for item in work.items:
        [(value, current)] = yield READ, {"item": item.key}
        work.seen[item.key] = value, current


def _write(work: Work) -> Steps:
    for item in work.items:
        value, current = work.seen[item.key]
        if item.is_fenced:
            yield Save(item.key, value + 1, current)
        else:
            yield WRITE, {"item": item.key, "value": value + 1, "current": current}
        yield _journal(work, item, value + 1, value, shared=0)


def _journal(work: Work, item: Item, value: int, seen: int, shared: int) -> Statement:
    row = {"item": item.key, "value": value, "seen": seen, "section": work.section, "shared": shared}
    return JOURNAL, row | {"token": work.token(item)}
