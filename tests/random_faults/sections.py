"""The work of a section in its database: generators that yield statements and receive rows, for all kinds of drivers.

A yielded text instead of a statement names the stage that the section has reached, at which it may be stopped. Each
client carries out a `Save` or a `Turn` in its own way.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from tests.random_faults.items import Item

Statement = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Save:
    """Write a row that carries its own fence through the ORM, from an instance without the fence's present state."""

    key: str
    value: int
    current: int


class Turn(Enum):
    """What a program does with its transaction or its lock in the middle of the work."""

    SAVEPOINT = "begin a savepoint"
    UNDO = "roll back to the savepoint, which takes along what was admitted in it"
    ENTER = "enter and leave a block of the same lock"
    ACQUIRE = "acquire the same lock without a block: it ends with the transaction"
    COMMIT = "send COMMIT by hand, which is refused under a lock; SQLAlchemy documents that it cannot see it, and leaves it out"


Steps = Generator[Statement | Save | Turn | str, Any, None]

READ: Final = "SELECT value, current FROM item WHERE name = :item"
WRITE: Final = "UPDATE item SET value = :value, current = :current WHERE name = :item"
INCREMENT: Final = "UPDATE item SET value = value + 1 WHERE name = :item"
STATE: Final = "SELECT state FROM orders WHERE item = :item AND number = :number"
DECIDE: Final = "UPDATE orders SET state = :what WHERE item = :item AND number = :number"
OPEN: Final = "INSERT INTO orders (item, number, state) VALUES (:item, :number, 'paid')"
TELL: Final = "INSERT INTO event (item, number, what, section) VALUES (:item, :number, :what, :section)"
NOTE: Final = "INSERT INTO note (section) VALUES (:section)"
JOURNAL: Final = (
    "INSERT INTO journal (item, value, seen, section, token, shared, fence)"
    " VALUES (:item, :value, :seen, :section, :token, :shared,"
    " (SELECT dlock_token FROM item WHERE name = :row))"
)


@dataclass
class Work:
    """One section's work: its items, and a function that returns the token for each."""

    section: str
    items: list[Item]
    token: Callable[[Item], int]
    seen: dict[str, tuple[int, int]] = field(default_factory=dict)


def add(work: Work) -> list[Steps]:
    """Read, pause and write."""

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


def add_anew(work: Work) -> list[Steps]:
    """Read in a savepoint that is rolled back, then read again and write."""

    def steps() -> Steps:
        yield Turn.SAVEPOINT
        yield from _read(work)
        yield Turn.UNDO
        yield from _read(work)
        yield "read"
        yield from _write(work)
        yield "written"

    return [steps()]


def add_within(work: Work) -> list[Steps]:
    """Call code that acquires the same lock itself, between reading and writing."""

    def steps() -> Steps:
        yield from _read(work)
        yield Turn.ENTER
        yield "inner block left"
        yield Turn.ACQUIRE
        yield from _write(work)
        yield "written"

    return [steps()]


def commit_by_hand(work: Work) -> list[Steps]:
    """Send COMMIT between reading and writing."""

    def steps() -> Steps:
        yield from _read(work)
        yield Turn.COMMIT
        yield "read"
        yield from _write(work)
        yield "written"

    return [steps()]


def post(work: Work) -> list[Steps]:
    """Increment without reading first, which shared holders may do side by side."""

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
    """Change a row that has a version; the client reads and saves it through its ORM."""
    return [_of_client()]


def remake(work: Work) -> list[Steps]:
    """Delete a row that has a version, and recreate it under the same key: an older reader must not overwrite it."""
    return [_of_client()]


def _of_client() -> Steps:
    yield from ()


SHARED: Final = (post,)
BY_VERSION: Final = (save, save, remake)
ALONE: Final = (add, add, add_later, ship, ship, cancel, cancel, add_anew, add_within, commit_by_hand)


def _decide(work: Work, what: str) -> Steps:
    """Ship or cancel the item's present order if it is paid; open the next one if another section was first."""
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
    row = {"item": item.key, "row": item.key, "value": value, "seen": seen, "section": work.section, "shared": shared}
    return JOURNAL, row | {"token": work.token(item)}
