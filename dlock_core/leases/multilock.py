"""Several locks together, all or none: sorted and without repetition, so that overlapping sets cannot deadlock.

In one request each way where the store can and all are free; else one after the other in the order of their names,
each waiting in its own queue while those before it are held.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Never, TypeVar

from dlock_core.backend import new_request, supported_ttl, supports_many
from dlock_core.errors import AlreadyHeld, BackendUnavailable, DLockError
from dlock_core.leases import engine, watchdog
from dlock_core.leases import engine as attempt
from dlock_core.leases.handles import Blocks, LeaseView, abandon, end_block, held_by, key_of, mine
from dlock_core.leases.lease import Held
from dlock_core.names import canonical
from dlock_core.observability import hooks
from dlock_core.options import Seconds, check_switches, deadline, ttl_seconds, unknown_option, wait_seconds
from dlock_core.runtime import ASYNCIO, BLOCKING, refuse_in_loop, run

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence
    from types import TracebackType

    from dlock_core.backend import Backend, Released, Request, SupportsMany
    from dlock_core.runtime import Runtime

__all__ = ["AsyncMultiLease", "AsyncMultiLock", "MultiLease", "MultiLock"]

L = TypeVar("L", "MultiLease", "AsyncMultiLease")


async def acquire(runtime: Runtime, backend: Backend, requests: Sequence[Request], wait: float | None) -> list[Held]:
    """Take all of the locks within `wait` seconds, or none; each is renewed from the moment it is held.

    Raises LeaseLost when one is lost while the others are waited for.
    """
    sent, held = runtime.now(), list[Held]()
    until = deadline(sent, wait)
    try:
        held += await at_once(runtime, backend, requests, until)
        for request in requests[len(held) :]:
            left = None if wait is None else max(0.0, until - runtime.now())
            held.append(await engine.acquire(runtime, backend, request, left))
            watchdog.watch(held[-1])
        for one in held:
            one.ensure()
    except BaseException as error:
        _unwatch(held)
        await attempt.undo(runtime, _give_back(runtime, backend, held, requests[len(held) :]), error, until)
        raise
    return held


async def release(runtime: Runtime, held: Sequence[Held]) -> list[Released]:
    """End all of the grants: in one request where the store can, and one by one what that left open.

    Raises BackendUnavailable for the first of which nobody knows whether it ended, when all were tried; NotHeld in a
    forked child.
    """
    return await runtime.shield(_release(runtime, held))


async def at_once(runtime: Runtime, backend: Backend, requests: Sequence[Request], until: float) -> list[Held]:
    """Take all of the locks in one request; none where the store cannot, or where one of them is taken.

    A request without an answer may have worked: ask for each with the same request, or abandon it. Raises
    BackendUnavailable when there is no time left for that, because the wait is over at `until`.
    """
    if not supports_many(backend) or any(request.shared for request in requests):
        return []
    sent = runtime.now()
    try:
        granted = await backend.try_acquire_many(runtime, requests) or []
    except BackendUnavailable:
        if runtime.now() > until + attempt.SILENT:
            raise
        return []
    held = [Held(backend, *pair, sent, runtime.now) for pair in zip(requests, granted, strict=False)]
    for one in held:
        hooks.emit("acquired", one.name, one.token, runtime.now() - sent, lease=one)
    return held


async def _release(runtime: Runtime, held: Sequence[Held]) -> list[Released]:
    for one in held:
        one.ensure_own_process()
    mine = [one for one in held if one.ended is None]
    if mine and supports_many(backend := mine[0].backend):
        await _release_at_once(runtime, backend, mine)
    failure: BackendUnavailable | None = None
    for one in held:
        try:
            await engine.release(runtime, one)
        except BackendUnavailable as error:  # the others may be on another node of the store
            failure = failure or error
    if failure is not None:
        raise failure
    return [one.ended for one in held if one.ended is not None]


async def _release_at_once(runtime: Runtime, backend: SupportsMany, held: Sequence[Held]) -> None:
    for one in held:
        one.prepare_release()
    with suppress(BackendUnavailable):
        found = await backend.release_many(runtime, [one.request for one in held])
        for one, what in zip(held, found, strict=True):
            one.emit("released", engine.end(one, what).value)


async def _give_back(runtime: Runtime, backend: Backend, held: Sequence[Held], requests: Sequence[Request]) -> None:
    """End what was granted, and abandon what may have been."""
    with suppress(BackendUnavailable):
        await _release(runtime, held)
    for request in requests:
        with suppress(BackendUnavailable):
            await backend.abandon(runtime, request)


class _MultiLease:
    """Several leases that are held together: `leases` in the order of their names."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = tuple(held)
        self.leases = tuple(LeaseView(one) for one in held)

    @property
    def lost(self) -> bool:
        """One of them is lost, and so are all."""
        return any(lease.lost for lease in self.leases)

    def remaining(self) -> float:
        """Give the seconds for which all of them surely hold."""
        return min(lease.remaining() for lease in self.leases)

    def ensure_held(self) -> None:
        """Raise LeaseLost unless all of them surely hold."""
        for lease in self.leases:
            lease.ensure_held()

    def _grants(self) -> tuple[Held, ...]:
        return self._held

    async def _end(self, runtime: Runtime) -> list[Released]:
        """Release all; may be repeated after an interrupt."""
        _unwatch(self._held)
        return await release(runtime, self._held)


class MultiLease(_MultiLease):
    """See `MultiLock`."""

    def release(self) -> list[Released]:
        """Release all, in one request where the store can; the answers are in the order of the names."""
        try:
            return run(self._end(BLOCKING))
        except DLockError:
            raise
        except BaseException:  # It was interrupted, at whatever step; each may be repeated.
            run(self._end(BLOCKING))
            raise


class AsyncMultiLease(_MultiLease):
    """See `AsyncMultiLock`."""

    async def release(self) -> list[Released]:
        """See `MultiLease.release`."""
        try:
            return await self._end(ASYNCIO)
        except DLockError:
            raise
        except BaseException:  # See `MultiLease.release`.
            await self._end(ASYNCIO)
            raise


def _unwatch(held: Sequence[Held]) -> None:
    for one in held:
        watchdog.unwatch(one)


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
            if held_by(key_of(caller, self.backend, name)) is not None:
                raise AlreadyHeld(name)
        return [new_request(name, self.ttl, self.wait, shared=self.shared, fair=True) for name in self.names]

    async def _hold(self, runtime: Runtime, caller: Hashable, kind: type[L], *, enters: bool = False) -> L:
        """Acquire all; `enters` a `with` block. See `Lock._hold` for what happens when it is interrupted."""
        requests, held, lease = self._requests(caller), list[Held](), None
        try:
            held += await acquire(runtime, self.backend, requests, self.wait)
            for one in held:
                mine[key_of(caller, one.backend, one.name)] = one
                if not one.due:
                    watchdog.watch(one)
            lease = kind(held)
            if enters:
                self._blocks.enter(caller, lease)
        except BaseException:
            if lease is not None:
                self._blocks.forget(caller, lease)
            for one in held:
                await abandon(runtime, one)
            raise
        return lease


class MultiLock(_MultiLock):
    """Several locks for threads and processes: `with MultiLock(backend, ["account:1", "account:2"]) as lease:`."""

    def acquire(self) -> MultiLease:
        """Hold all of them, waiting at most `wait` seconds altogether; raises AcquireTimeout, AlreadyHeld."""
        refuse_in_loop("use AsyncMultiLock")
        return run(self._hold(BLOCKING, threading.current_thread(), MultiLease))

    def __enter__(self) -> MultiLease:
        refuse_in_loop("use AsyncMultiLock")
        return run(self._hold(BLOCKING, threading.current_thread(), MultiLease, enters=True))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ending: list[MultiLease] = []
        try:
            run(end_block(BLOCKING, self._blocks, threading.current_thread(), error, ending))
        except DLockError:
            raise
        except BaseException:  # See `Lock.__exit__`.
            run(end_block(BLOCKING, self._blocks, threading.current_thread(), error, ending))
            raise


class AsyncMultiLock(_MultiLock):
    """Several locks for tasks."""

    async def acquire(self) -> AsyncMultiLease:
        """See `MultiLock.acquire`."""
        return await self._hold(ASYNCIO, asyncio.current_task(), AsyncMultiLease)

    async def __aenter__(self) -> AsyncMultiLease:
        return await self._hold(ASYNCIO, asyncio.current_task(), AsyncMultiLease, enters=True)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ending: list[AsyncMultiLease] = []
        try:
            await end_block(ASYNCIO, self._blocks, asyncio.current_task(), error, ending)
        except DLockError:
            raise
        except BaseException:  # See `Lock.__exit__`.
            await end_block(ASYNCIO, self._blocks, asyncio.current_task(), error, ending)
            raise
