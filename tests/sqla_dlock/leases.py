"""The journal of a test: COMMIT and ROLLBACK between what happens to leases (`tests.leases.events`)."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine


def note_ends(engine: Engine, journal: list[str]) -> None:
    """Write into the journal that the driver has carried out a COMMIT or ROLLBACK."""
    engine.connect().close()  # the first connection of an engine is rolled back once more than others
    dialect: Any = engine.dialect
    for method, word in (("do_commit", "COMMIT"), ("do_rollback", "ROLLBACK")):
        setattr(dialect, method, _noting(getattr(dialect, method), journal, word))


def in_order(journal: list[str], *entries: str) -> bool:
    """Whether the first of each of these entries are in this order; a pool adds its own ROLLBACK to every COMMIT."""
    places = [journal.index(entry) for entry in entries]
    return places == sorted(places)


def _noting(work: Callable[..., None], journal: list[str], word: str) -> Callable[..., None]:
    def noting(*args: Any) -> None:
        work(*args)
        journal.append(word)

    return noting
