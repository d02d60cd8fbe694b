"""Leases in tests: who holds what, as the store sees it, and what happened in which order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dlock_core.observability import hooks
from dlock_core.runtime import BLOCKING, run
from tests.waiting import until


def is_held(store: Any, name: str = "order:42") -> bool:
    """Return whether a lock has a holder, as its store sees it."""
    return bool(run(store.inspect(BLOCKING, name))[0].holders)


def is_awaited(store: Any, name: str = "order:42") -> bool:
    """Return whether a lock has a waiter, as its store sees it."""
    return bool(run(store.inspect(BLOCKING, name))[0].waiters)


def until_waited_for(store: Any, name: str = "order:42") -> None:
    """Wait until a lock has a waiter, as its store sees it."""
    until(lambda: is_awaited(store, name))


def until_expired(lease: Any, store: Any) -> None:
    """Wait until a lease with a short ttl and no renewal has expired for its holder and in its store."""
    until(lambda: not (lease.remaining() or is_held(store)))


@contextmanager
def events() -> Iterator[list[str]]:
    """Yield what happens to leases: "acquired order:42", "released order:42", "lost order:42"."""
    entries: list[str] = []

    def hear(event: hooks.Event) -> None:
        entries.append(f"{event.kind} {event.name}")

    hooks.subscribe(hear)
    try:
        yield entries
    finally:
        hooks.unsubscribe(hear)
