"""A store by name: a backend, and what a lock gets that says neither how long nor for how long to wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dlock_core.backend import Backend

__all__ = ["TTL", "WAIT", "Store"]

TTL: Final = 30.0
WAIT: Final = 10.0


@dataclass(frozen=True, slots=True)
class Store:
    """A backend and what a lock gets that names neither; `ttl` and `wait` in seconds, `wait` None is for ever."""

    alias: str
    backend: Backend
    ttl: float = TTL
    wait: float | None = WAIT
