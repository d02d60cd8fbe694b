"""The harness whose actors are tasks of one event loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

from dlock_core.leases.lock import AsyncLock
from dlock_core.leases.multilock import AsyncMultiLock
from dlock_core.runtime import ASYNCIO
from dlock_core.testing.contract.harness import Actor, Harness
from dlock_core.testing.contract.observed import WITHIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlock_core.backend import Backend

    Step = Callable[[], Any]

__all__ = ["Tasks"]


class Tasks(Harness):
    """The harness whose actors are tasks; their event loop runs in a dedicated thread."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._loop: Any = None
        self._stop: Any = None
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
        asyncio.run_coroutine_threadsafe(_awork(steps), self._loop)

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
