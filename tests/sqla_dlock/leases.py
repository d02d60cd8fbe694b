"""Leases in tests: who holds what, as the store sees it, and what happened in which order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine

from dlock_core.observability import hooks
from dlock_core.runtime import BLOCKING, run
from tests.waiting import until


def is_held(store: Any, name: str = "order:42") -> bool:
    return bool(run(store.inspect(BLOCKING, name))[0].holders)


def expire(lease: Any, store: Any) -> None:
    """Wait until a lease with a short ttl, that nobody renews, has run out for its holder and in its store."""
    until(lambda: not (lease.remaining() or is_held(store)))


@contextmanager
def events() -> Iterator[list[str]]:
    """What happens to leases: "acquired order:42", "released order:42", "lost order:42"."""
    entries: list[str] = []

    def hear(event: hooks.Event) -> None:
        entries.append(f"{event.kind} {event.name}")

    hooks.subscribe(hear)
    try:
        yield entries
    finally:
        hooks.unsubscribe(hear)


def note_ends(engine: Engine, journal: list[str]) -> None:
    """Write into the journal that the driver has carried out a COMMIT or ROLLBACK."""
    engine.connect().close()  # the first connection of an engine is rolled back once more than others
    dialect: Any = engine.dialect
    for method, word in (("do_commit", "COMMIT"), ("do_rollback", "ROLLBACK")):
        setattr(dialect, method, _noting(getattr(dialect, method), journal, word))


def in_order(journal: list[str], *entries: str) -> bool:
    """Whether these came in this order, each for the first time; a pool adds a ROLLBACK of its own to every COMMIT."""
    places = [journal.index(entry) for entry in entries]
    return places == sorted(places)


def _noting(work: Callable[..., None], journal: list[str], word: str) -> Callable[..., None]:
    def noting(*args: Any) -> None:
        work(*args)
        journal.append(word)

    return noting
