"""The harness of the contract suite: it runs one copy of each test with threads and with tasks.

A test reads like a story about actors that compete for one store:

    def test_released_lock_is_free(harness, name):
        lease = harness.acquire(name)                 # a new actor holds the lock
        assert harness.try_acquire(name) is None      # another actor does not get it
        harness.do(lease.release)                     # an actor takes a step to its end
        pending = harness.queue_up(name)              # an actor waits in the queue: a Future of its lease
        assert harness.holders(name) == [...]         # what the store itself says

The words:

- A *step* is a function without arguments. The harness awaits what it returns if that is awaitable, so that
  `lease.release` is a step of a `Lease` and of an `AsyncLease` alike.
- An *actor* is one thread or one task, which takes its steps one after the other. `harness.actor()` makes one, for
  tests about what one context holds; `harness.do(step)` and all the verbs below use a new actor each time.
- `do(step)` waits for the result of a step, `start(step)` returns its Future. No step lasts longer than `WITHIN`.
- `acquire`, `try_acquire`, `begin_to_wait` and `queue_up` take a lock; `lock`, `multilock` and `block` make a Lock, a
  MultiLock and a `with` block of the right kind. What a test leaves held is released at its end (`keep`).
- `call_store(method, …)` calls a method of the store itself, past the engine. `state` and `holders` inspect it.
- `observed` records what the store was asked: `calls_of(method, name)`, `renewals(lease)` and `waiting(name)` count it,
  and `observed.until(condition)` waits for it. So no test sleeps.
- `short_ttl` is a ttl that a test can wait out; `renewed_ttl` one that survives a slow machine while it is renewed.
- `pause`, `then` and `for_each` write a step of several calls once for both worlds.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, cast

from dlock_core.errors import DLockError
from dlock_core.leases.lock import AsyncLock, Lock
from dlock_core.leases.multilock import AsyncMultiLock, MultiLock
from dlock_core.runtime import ASYNCIO, BLOCKING, run
from dlock_core.testing.contract.observed import WITHIN, Observed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlock_core.backend import Backend, LockState

    Step = Callable[[], Any]

__all__ = ["Actor", "Harness", "Tasks", "Threads"]


def crowd() -> float:
    """Return how much longer a thread may wait for the processor than on a machine with two threads for each one."""
    if not hasattr(os, "getloadavg"):
        return 1.0
    return max(1.0, os.getloadavg()[0] / (2 * (os.cpu_count() or 1)))


class Actor:
    """One thread or task, which executes its steps one after the other."""

    def __init__(self, begin: Callable[[Step], Future[Any]]) -> None:
        self.start = begin

    def do(self, step: Step) -> Any:
        """Execute a step and return its result; raises the step's error."""
        return self.start(step).result(WITHIN)


class Harness:
    """The object that a contract test works with, for one store; `Threads` and `Tasks` are its two kinds."""

    def __init__(self, backend: Backend) -> None:
        self.observed = Observed(backend)
        self.store = cast("Backend", self.observed)
        self.short_ttl = max(0.2, backend.capabilities.ttl_min)
        """A ttl that a test can wait for to expire."""
        self.renewed_ttl = max(0.8 * crowd(), backend.capabilities.ttl_min)
        """A ttl that survives the pauses of a slow machine while it is renewed: the busier the machine, the longer."""
        self._leases: list[Any] = []
        self._pending: list[Future[Any]] = []

    def actor(self) -> Actor:
        """Start a thread or task that waits for its steps."""
        raise NotImplementedError

    def lock(self, name: str, **options: Any) -> Any:
        """Return a Lock or AsyncLock of the store."""
        raise NotImplementedError

    def call_store(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the store itself; the harness adds the runtime."""
        raise NotImplementedError

    def block(self, lock: Any, body: Callable[[Any], Any]) -> Any:
        """Run a body in a `with` or `async with` block."""
        raise NotImplementedError

    def multilock(self, names: Iterable[str], **options: Any) -> Any:
        """Return a MultiLock or AsyncMultiLock of the store."""
        raise NotImplementedError

    def pause(self) -> Any:
        """Let other actors run."""
        raise NotImplementedError

    def then(self, first: Any, then: Callable[[Any], Any]) -> Any:
        """Call a function with the result of a call, after awaiting it if necessary."""
        raise NotImplementedError

    def for_each(self, step: Callable[[Any], Any], items: Iterable[Any]) -> Any:
        """Call a function with each item, one after the other, awaiting each call if necessary."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the test left held, and end the actors."""
        for lease in self._leases:
            with suppress(DLockError):
                self.do(lease.release)
        for pending in self._pending:  # each gets it now from the one before
            with suppress(DLockError, CancelledError):
                self.do(pending.result(WITHIN).release)

    def start(self, step: Step) -> Future[Any]:
        """Start a step with a new actor, and return its Future."""
        return self.actor().start(step)

    def do(self, step: Step) -> Any:
        """Execute a step with a new actor, and return its result."""
        return self.actor().do(step)

    def acquire(self, name: str, **options: Any) -> Any:
        """Acquire a lock with a new actor, and return the lease."""
        return self.keep(self.do(self.lock(name, **options).acquire))

    def try_acquire(self, name: str, **options: Any) -> Any:
        """Try a lock with a new actor: a lease, or None."""
        return self.keep(self.do(self.lock(name, **options).try_acquire))

    def begin_to_wait(self, name: str, **options: Any) -> Future[Any]:
        """Start to acquire a lock with a new actor, and return the Future once the engine waits at the store."""
        before = len(self.waiting(name))
        pending = self.start(self.lock(name, wait=options.pop("wait", None), **options).acquire)
        self._pending.append(pending)
        self.observed.until(lambda _: len(self.waiting(name)) > before or pending.done())
        return pending

    def queue_up(self, name: str, **options: Any) -> Future[Any]:
        """Start to acquire a lock, and return the Future once the store lists the waiter, if it lists waiters at all."""
        pending = self.begin_to_wait(name, **options)
        if self.store.capabilities.lists_waiters and not pending.done():
            holder = self.waiting(name)[-1]
            self.until(lambda: holder in [waiter.holder for waiter in self.state(name).waiters] or pending.done())
        return pending

    def keep(self, lease: Any) -> Any:
        """Release a lease at the end of the test; returns the lease."""
        if lease is not None:
            self._leases.append(lease)
        return lease

    def waiting(self, name: str) -> list[str]:
        """Return the holder ids that have begun to wait for a lock, in order."""
        return list(dict.fromkeys(call.holders[0] for call in self.calls_of("wait", name)))

    def calls_of(self, method: str, name: str) -> list[Any]:
        """Return the calls of one method about one lock, so far."""
        return [call for call in list(self.observed.calls) if call.method == method and call.name == name]

    def renewals(self, lease: Any) -> int:
        """Return the number of requests to the store to renew a lease."""
        return sum(call.method == "renew" and lease.holder in call.holders for call in list(self.observed.calls))

    def state(self, name: str) -> LockState:
        """Inspect one lock, without any actor."""
        (state,) = run(self.store.inspect(BLOCKING, name))
        return state

    def holders(self, name: str) -> list[str]:
        """Return the ids of the holders of a lock."""
        return [holder.holder for holder in self.state(name).holders]

    def until(self, condition: Step) -> None:
        """Poll until a condition holds; only for conditions without an event."""
        deadline = time.monotonic() + WITHIN
        while time.monotonic() < deadline:
            if condition():
                return
            threading.Event().wait(0.01)
        raise TimeoutError(f"did not happen within {WITHIN} s")


class Threads(Harness):
    """The harness whose actors are threads."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._actors: list[queue.SimpleQueue[Any]] = []

    def actor(self) -> Actor:
        steps: queue.SimpleQueue[tuple[Step, Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(steps,), daemon=True).start()
        self._actors.append(steps)

        def begin(step: Step) -> Future[Any]:
            done: Future[Any] = Future()
            steps.put((step, done))
            return done

        return Actor(begin)

    def lock(self, name: str, **options: Any) -> Lock:
        return Lock(self.store, name, **options)

    def call_store(self, method: str, *args: Any, **options: Any) -> Any:
        return run(getattr(self.store, method)(BLOCKING, *args, **options))

    def block(self, lock: Any, body: Callable[[Any], Any]) -> Any:
        with lock as lease:
            return body(lease)

    def multilock(self, names: Iterable[str], **options: Any) -> MultiLock:
        return MultiLock(self.store, names, **options)

    def pause(self) -> None:
        threading.Event().wait(0.001)

    def then(self, first: Any, then: Callable[[Any], Any]) -> Any:
        return then(first)

    def for_each(self, step: Callable[[Any], Any], items: Iterable[Any]) -> None:
        for item in items:
            step(item)

    def close(self) -> None:
        super().close()
        for steps in self._actors:
            steps.put(None)


def _work(steps: queue.SimpleQueue[tuple[Step, Future[Any]] | None]) -> None:
    while (work := steps.get()) is not None:
        step, done = work
        try:
            done.set_result(step())
        except BaseException as error:  # noqa: BLE001 - it is the step's outcome
            done.set_exception(error)
        del work, step, done  # a lease that the test throws away must not live on here


class Tasks(Harness):
    """The harness whose actors are tasks; their event loop runs in a dedicated thread."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._loop: Any = None
        self._stop: Any = None
        self._actors: list[Future[None]] = []
        """They also keep their tasks alive: the event loop has only weak references to those."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self._ready.wait(WITHIN)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._stop.wait()

    def start(self, step: Step) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(_take(step), self._loop)

    def do(self, step: Step) -> Any:
        return self.start(step).result(WITHIN)

    def actor(self) -> Actor:
        steps: asyncio.Queue[tuple[Step, Future[Any]]] = asyncio.Queue()
        self._actors.append(asyncio.run_coroutine_threadsafe(_awork(steps), self._loop))

        def begin(step: Step) -> Future[Any]:
            done: Future[Any] = Future()
            self._loop.call_soon_threadsafe(steps.put_nowait, (step, done))
            return done

        return Actor(begin)

    def lock(self, name: str, **options: Any) -> AsyncLock:
        return AsyncLock(self.store, name, **options)

    def call_store(self, method: str, *args: Any, **options: Any) -> Any:
        return self.do(lambda: getattr(self.store, method)(ASYNCIO, *args, **options))

    async def block(self, lock: Any, body: Callable[[Any], Any]) -> Any:
        async with lock as lease:
            return await _take(lambda: body(lease))

    def multilock(self, names: Iterable[str], **options: Any) -> AsyncMultiLock:
        return AsyncMultiLock(self.store, names, **options)

    async def pause(self) -> None:
        await asyncio.sleep(0.001)

    async def then(self, first: Any, then: Callable[[Any], Any]) -> Any:
        return then(await first)

    async def for_each(self, step: Callable[[Any], Any], items: Iterable[Any]) -> None:
        for item in items:
            await step(item)

    def close(self) -> None:
        super().close()
        for actor in self._actors:
            actor.cancel()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WITHIN)


async def _take(step: Step) -> Any:
    answer = step()
    return await answer if isawaitable(answer) else answer


async def _awork(steps: asyncio.Queue[tuple[Step, Future[Any]]]) -> None:
    while True:
        step, done = await steps.get()
        try:
            done.set_result(await _take(step))
        except Exception as error:  # noqa: BLE001 - it is the step's outcome
            done.set_exception(error)
        del step, done
