"""Leases in this process's memory: for tests, and as the shortest complete example of a backend.

All processes of a deployment must share a store; this one is shared only by the threads and tasks of one process.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dlock_core.backend import (
    Busy,
    Capabilities,
    Granted,
    Holder,
    LockState,
    Released,
    RenewalFailure,
    Waiter,
    refuse_to_pickle,
)
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlock_core.backend import AcquireRequest, Renewal, RenewalResult
    from dlock_core.doctor.finding import Finding
    from dlock_core.runtime import Runtime, Signal

__all__ = ["MemoryBackend"]

CLAIM_S = 1.0
"""How long a waiter has to confirm a lock that was handed over to it."""
WAITER_TTL_S = 5.0
"""How long after its last request a waiter keeps its position in the queue."""


@dataclass(slots=True)
class _Grant:
    request: AcquireRequest
    token: int
    since: float
    until: float


@dataclass(slots=True)
class _QueueEntry:
    request: AcquireRequest
    since: float
    alive_until: float
    signal: Signal | None = None


@dataclass(slots=True)
class _State:
    holders: dict[str, _Grant] = field(default_factory=dict)
    queue: dict[str, _QueueEntry] = field(default_factory=dict)


class MemoryBackend:
    """A store in memory; `now` is its clock, seconds that never step back."""

    capabilities = Capabilities(fair=True, shared=True, lists_waiters=True, ttl_min=0.001)

    __reduce__ = refuse_to_pickle

    def __init__(self, now: Callable[[], float] = clock) -> None:
        self._now = now
        self._guard: Any = threading.RLock()
        self._states: dict[str, _State] = {}
        self._tokens = itertools.count(1)

    @classmethod
    def from_url(cls, url: str) -> MemoryBackend:
        """Return a new, empty store for `memory://`."""
        if url.rstrip("/") not in ("memory:", "memory"):
            raise ValueError("the URL of the store in memory is memory://, with nothing after it")
        return cls()

    async def try_acquire(
        self, runtime: Runtime, request: AcquireRequest, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        with self._alone:
            state = self._states[request.name] = self._current(request.name)
            if request.holder not in state.holders:
                self._enqueue(state, request)
                self._serve(state, barging=None if request.fair else request.holder)
            grant = state.holders.get(request.holder)
            if grant is None:
                return self._busy(state, request)
            state.queue.pop(request.holder, None)
            if grant.token <= request.floor:
                grant.token = self._token(request.floor)
            grant.until = max(grant.until, self._now() + request.ttl)
            return Granted(grant.token, request.ttl)

    async def wait(self, runtime: Runtime, request: AcquireRequest, busy: Busy, timeout: float) -> None:
        signal = runtime.signal()
        with self._alone:
            entry = self._current(request.name).queue.get(request.holder)
            if entry is None:
                return
            entry.signal, entry.alive_until = signal, self._now() + timeout + WAITER_TTL_S
        # The waiter that got the lock may be dead, and would wake no other.
        await runtime.wait(signal, min(timeout, CLAIM_S))

    async def abandon(self, runtime: Runtime, request: AcquireRequest, ticket: Any = None) -> None:
        with self._alone:
            self._remove(request)

    async def release(self, runtime: Runtime, request: AcquireRequest, granted: Granted) -> Released:
        with self._alone:
            if self._remove(request):
                return Released.RELEASED
            return Released.STOLEN if self._current(request.name).holders else Released.EXPIRED

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        with self._alone:
            return [self._renew(renewal.request) for renewal in renewals]

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        with self._alone:
            names = sorted(self._states) if name is None else [name]
            states = [self._state(each) for each in names]
            return states if name is not None else [state for state in states if state.holders or state.waiters]

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        with self._alone:
            found = [grant for grant in self._current(name).holders.values() if grant.token == token]
            return any(self._remove(grant.request) for grant in found)

    async def diagnose(self, runtime: Runtime) -> list[Finding]:
        """Warn that no other process sees these leases."""
        from dlock_core.doctor.finding import unsafe

        reason = "other processes are not excluded, and a restart loses every lease"
        return [unsafe("scope", "the memory of one process", reason, "use a store that all processes share: redis://")]

    def close(self) -> None:
        """Nothing to close: the leases stay."""

    @property
    def _alone(self) -> Any:
        """Return the mutex; a signal handler that has interrupted its owner would wait forever, and gets an error."""
        if self._guard._is_owned():  # noqa: SLF001 - threading.Condition asks its lock so, too
            raise BackendUnavailable("", reason="a signal handler has called it during another call of its thread")
        return self._guard

    def _current(self, name: str) -> _State:
        """Return the state of a lock without expired entries, and forget a lock without holders and waiters."""
        state, now = self._states.get(name) or _State(), self._now()
        for holder in [key for key, grant in state.holders.items() if grant.until <= now]:
            del state.holders[holder]
        for holder in [key for key, entry in state.queue.items() if entry.alive_until <= now]:
            del state.queue[holder]
        if not state.holders and not state.queue:
            self._states.pop(name, None)
        return state

    def _enqueue(self, state: _State, request: AcquireRequest) -> None:
        now = self._now()
        entry = state.queue.setdefault(request.holder, _QueueEntry(request, now, now + WAITER_TTL_S))
        entry.alive_until = now + WAITER_TTL_S

    def _serve(self, state: _State, barging: str | None) -> None:
        """Grant to the waiters that may hold the lock now, in order, but to the holder `barging` first."""
        order = sorted(state.queue.values(), key=lambda entry: entry.request.holder != barging)
        for entry in order:
            request = entry.request
            taken = any(not grant.request.shared for grant in state.holders.values())
            if taken or (state.holders and not request.shared):
                return
            now = self._now()
            state.holders[request.holder] = _Grant(
                request, self._token(request.floor), now, now + min(CLAIM_S, request.ttl)
            )
            del state.queue[request.holder]
            if entry.signal is not None:
                entry.signal.set()

    def _busy(self, state: _State, request: AcquireRequest) -> Busy:
        if not request.queue:
            state.queue.pop(request.holder, None)
        first = min(state.holders.values(), key=lambda grant: grant.until, default=None)
        if first is None:
            return Busy(CLAIM_S)
        return Busy(max(0.0, first.until - self._now()) + 0.001, first.request.owner)

    def _token(self, floor: int) -> int:
        token = next(self._tokens)
        if token <= floor:
            self._tokens = itertools.count(floor + 2)
            token = floor + 1
        return token

    def _renew(self, request: AcquireRequest) -> RenewalResult:
        grant = self._current(request.name).holders.get(request.holder)
        if grant is None:
            return RenewalFailure.LOST
        grant.until = max(grant.until, self._now() + request.ttl)
        return request.ttl

    def _remove(self, request: AcquireRequest) -> bool:
        state = self._current(request.name)
        state.queue.pop(request.holder, None)
        ours = state.holders.pop(request.holder, None) is not None
        self._serve(state, barging=None)
        self._current(request.name)
        return ours

    def _state(self, name: str) -> LockState:
        state, now = self._current(name), self._now()
        holders = [
            Holder(key, grant.token, grant.request.shared, grant.request.owner, grant.until - now, now - grant.since)
            for key, grant in state.holders.items()
        ]
        waiters = [
            Waiter(key, entry.request.shared, entry.request.owner, now - entry.since)
            for key, entry in state.queue.items()
        ]
        return LockState(name, tuple(holders), tuple(waiters))
