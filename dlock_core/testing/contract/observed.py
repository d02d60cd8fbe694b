"""A store that records its calls, so that tests wait for an event instead of a time."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlock_core.backend import AcquireRequest, Backend, Busy, Granted, LockState, Renewal, RenewalResult
    from dlock_core.runtime import Runtime

__all__ = ["WITHIN", "Call", "Observed"]

WITHIN: Final = 30.0
"""Seconds after which a test fails instead of hanging: far more than any step takes."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a method of the store, for these holders."""

    method: str
    name: str
    holders: tuple[str, ...] = ()


class Observed:
    """Passes each call on to a store, and records it."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.calls: list[Call] = []
        self._changed = threading.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def record(self, method: str, name: str, *holders: str) -> None:
        """Record a call."""
        with self._changed:
            self.calls.append(Call(method, name, holders))
            self._changed.notify_all()

    def until(self, condition: Callable[[list[Call]], bool]) -> None:
        """Wait until a condition of the calls so far holds; raises TimeoutError after WITHIN seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self.calls), WITHIN):
                raise TimeoutError(f"did not happen within {WITHIN} s; calls so far: {self.calls}")

    async def try_acquire(
        self, runtime: Runtime, request: AcquireRequest, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        self.record("try_acquire", request.name, request.holder)
        return await self.backend.try_acquire(runtime, request, ticket, unsure=unsure)

    async def wait(
        self, runtime: Runtime, request: AcquireRequest, busy: Busy, timeout: float
    ) -> Granted | Busy | None:
        self.record("wait", request.name, request.holder)
        return await self.backend.wait(runtime, request, busy, timeout)

    async def abandon(self, runtime: Runtime, request: AcquireRequest, ticket: Any = None) -> None:
        self.record("abandon", request.name, request.holder)
        await self.backend.abandon(runtime, request, ticket)

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        self.record("renew", renewals[0].request.name, *[renewal.request.holder for renewal in renewals])
        return await self.backend.renew(runtime, renewals)

    async def release(self, runtime: Runtime, request: AcquireRequest, granted: Granted) -> Any:
        self.record("release", request.name, request.holder)
        return await self.backend.release(runtime, request, granted)

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        self.record("inspect", name or "")
        return await self.backend.inspect(runtime, name)

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        self.record("force_release", name)
        return await self.backend.force_release(runtime, name, token)
