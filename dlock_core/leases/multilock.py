"""Several locks together, all or none: sorted and without repetition, so that overlapping sets cannot deadlock.

In one request each way where the store can and all are free; else one after the other in the order of their names,
each waiting in its own queue while those before it are held. The algorithm is `engine.acquire_all`.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Never, TypeVar

from dlock_core.backend import Released, new_request, supported_ttl
from dlock_core.errors import AlreadyHeld
from dlock_core.leases import engine, watchdog
from dlock_core.leases.engine import Acquisition
from dlock_core.leases.handles import (
    LETTING_EXPIRE,
    AsyncBlockExit,
    AsyncReleasing,
    BlockExit,
    Blocks,
    LeaseHandle,
    Leases,
    LeaseView,
    Releasing,
    ensure_was_held,
    held_by_caller,
    key_of,
)
from dlock_core.names import canonical
from dlock_core.options import Seconds, check_switches, deadline, ttl_seconds, unknown_option, wait_seconds
from dlock_core.runtime import ASYNCIO, BLOCKING, refuse_in_loop, run

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from dlock_core.backend import Backend, Request
    from dlock_core.runtime import Runtime

__all__ = ["AsyncMultiLease", "AsyncMultiLock", "MultiLease", "MultiLock"]

L = TypeVar("L", "MultiLease", "AsyncMultiLease")


class _MultiLease(Leases[LeaseHandle]):
    """Several leases that are held together, in the order of their names."""

    @property
    def leases(self) -> tuple[LeaseView, ...]:
        """Each of them, in the order of their names."""
        return tuple(self)

    async def _end(self, runtime: Runtime) -> list[Released]:
        """Leave all, and release those that no other handle has joined; may be repeated after an interrupt."""
        held = [lease._held for lease in self]  # noqa: SLF001 - the handles of one package
        for one in held:
            one.ensure_own_process()
        unneeded = [one for one, lease in zip(held, self, strict=True) if one.leave(lease)]
        for one in unneeded:
            watchdog.unwatch(one)
        await engine.release_all(runtime, unneeded)
        return [one.ended or Released.RELEASED for one in held]

    async def _leave_block(self, runtime: Runtime, error: BaseException | None) -> None:
        with LETTING_EXPIRE:
            await self._end(runtime)
        for lease in self:
            ensure_was_held(lease._held, error)  # noqa: SLF001 - the handles of one package


class MultiLease(_MultiLease, Releasing["list[Released]"]):
    """See `MultiLock`."""


class AsyncMultiLease(_MultiLease, AsyncReleasing["list[Released]"]):
    """See `AsyncMultiLock`."""


class _MultiLock:
    """Several names in a store, held all or none; arguments as for `Lock`."""

    def __init__(
        self, backend: Backend, names: Iterable[str], *, ttl: Seconds = 30.0, wait: Seconds | None = 10.0,
        shared: bool = False, **unknown: Never,
    ) -> None:  # fmt: skip
        if unknown:
            raise unknown_option(unknown, ("ttl", "wait", "shared"))
        check_switches(shared=shared)
        if isinstance(names, str):
            raise TypeError(f"a MultiLock takes several names, not the letters of one: give [{names!r:.80}]")
        self.names = tuple(sorted({canonical(name) for name in names}))
        if not self.names:
            raise ValueError("a MultiLock needs at least one name")
        self.backend, self.shared = backend, shared
        self.ttl, self.wait = supported_ttl(backend, ttl_seconds(ttl)), wait_seconds(wait)
        self._blocks = Blocks()

    def _requests(self, caller: Hashable) -> list[Request]:
        for name in self.names:
            held = held_by_caller.get(key_of(caller, self.backend, name))
            if held is not None and held.is_joinable():
                raise AlreadyHeld(name)
        return [new_request(name, self.ttl, self.wait, shared=self.shared, fair=True) for name in self.names]

    async def _hold(self, runtime: Runtime, caller: Hashable, kind: type[L], *, enters: bool = False) -> L:
        """Acquire all; `enters` a `with` block. See `Lock._hold` for what happens when it is interrupted.

        Raises LeaseLost when one is lost while the others are waited for.
        """
        since, lease = runtime.now(), None
        acquisitions = [
            Acquisition(runtime, self.backend, request, self.wait, since=since, renew=True)
            for request in self._requests(caller)
        ]

        async def hand_out() -> L:
            nonlocal lease
            keys = [key_of(caller, self.backend, name) for name in self.names]
            held = [await acquisition.acquire() for acquisition in acquisitions]
            for one in held:
                one.ensure()
            lease = kind(map(LeaseHandle, held, keys))
            for key, one, handle in zip(keys, held, lease, strict=True):
                held_by_caller[key] = one
                one.join(handle)
            return self._blocks.enter(caller, lease) if enters else lease

        try:
            return await engine.acquire_all(runtime, acquisitions, deadline(since, self.wait), hand_out)
        except BaseException:
            if lease is not None:
                for handle in lease:
                    handle._held.leave(handle)  # noqa: SLF001 - the handles of one package
                self._blocks.forget(caller, lease)
            raise


class MultiLock(_MultiLock, BlockExit):
    """Several locks for threads and processes: `with MultiLock(backend, ["account:1", "account:2"]) as lease:`."""

    def acquire(self) -> MultiLease:
        """Hold all of them, waiting at most `wait` seconds altogether; raises AcquireTimeout, AlreadyHeld."""
        refuse_in_loop("use AsyncMultiLock")
        return run(self._hold(BLOCKING, threading.current_thread(), MultiLease))

    def __enter__(self) -> MultiLease:
        refuse_in_loop("use AsyncMultiLock")
        return run(self._hold(BLOCKING, threading.current_thread(), MultiLease, enters=True))


class AsyncMultiLock(_MultiLock, AsyncBlockExit):
    """Several locks for tasks."""

    async def acquire(self) -> AsyncMultiLease:
        """See `MultiLock.acquire`."""
        return await self._hold(ASYNCIO, asyncio.current_task(), AsyncMultiLease)

    async def __aenter__(self) -> AsyncMultiLease:
        return await self._hold(ASYNCIO, asyncio.current_task(), AsyncMultiLease, enters=True)
