"""Wakes those who wait for a lock in this process: when it is released here, or when the database tells of it."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlock_core.runtime import Signal

__all__ = ["Bells"]


class Bells:
    """The signals of those who wait, by the lock's name."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: dict[str, set[Signal]] = {}

    @contextmanager
    def on(self, name: str, signal: Signal) -> Iterator[None]:
        """Have the signal set whenever the lock may be free, as long as the block is not left."""
        with self._guard:
            self._waiting.setdefault(name, set()).add(signal)
        try:
            yield
        finally:
            with self._guard:
                waiting = self._waiting[name]
                waiting.discard(signal)
                if not waiting:
                    del self._waiting[name]

    def ring(self, name: str) -> None:
        """Wake all who wait for this lock."""
        if name in self._waiting:
            with self._guard:
                signals = list(self._waiting.get(name, ()))
            _set(signals)

    def ring_all(self) -> None:
        """Wake everybody: what they were told of so far, they are not told any more."""
        with self._guard:
            signals = [signal for waiting in self._waiting.values() for signal in waiting]
        _set(signals)


def _set(signals: list[Signal]) -> None:
    for signal in signals:
        with suppress(RuntimeError):  # its event loop was closed meanwhile
            signal.set()
