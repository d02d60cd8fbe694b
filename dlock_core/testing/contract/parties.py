"""Those who compete for locks, as threads or as tasks: one copy of the tests serves both.

A step is a function without arguments; if what it returns can be awaited, it is. Steps are given to a party, which is
one thread or one task, or to nobody in particular, who is then a new one.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from dlock_core.errors import DLockError
from dlock_core.leases.lock import Lock
from dlock_core.leases.multilock import MultiLock
from dlock_core.runtime import BLOCKING, run
from dlock_core.testing.contract.observed import WITHIN, Observed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlock_core.backend import Backend, LockState

    Step = Callable[[], Any]

__all__ = ["Locks", "Party", "Threads"]


class Party:
    """One thread or task, which takes its steps one after the other."""

    def __init__(self, begin: Callable[[Step], Future[Any]]) -> None:
        self.start = begin

    def do(self, step: Step) -> Any:
        """Take a step to its end."""
        return self.start(step).result(WITHIN)


class Locks:
    """The locks of one store; `Threads` and `Tasks` say how to wait for them."""

    def __init__(self, backend: Backend) -> None:
        self.observed = Observed(backend)
        self.store = cast("Backend", self.observed)
        self.short = max(0.2, backend.capabilities.ttl_min)
        """A ttl that a test can wait out."""
        self.kept = max(0.8, backend.capabilities.ttl_min)
        """A ttl that outlives a slow machine's pauses while it is renewed."""
        self._leases: list[Any] = []
        self._pending: list[Future[Any]] = []

    def party(self) -> Party:
        """Make a thread or task."""
        raise NotImplementedError

    def lock(self, name: str, **options: Any) -> Any:
        """Make a Lock or AsyncLock."""
        raise NotImplementedError

    def ask(self, what: str, *args: Any, **options: Any) -> Any:
        """Ask the store itself: a method of Backend, without its runtime."""
        raise NotImplementedError

    def block(self, lock: Any, body: Callable[[Any], Any]) -> Any:
        """Run a body in a `with` or `async with` block."""
        raise NotImplementedError

    def many(self, names: Iterable[str], **options: Any) -> Any:
        """Make a MultiLock or AsyncMultiLock."""
        raise NotImplementedError

    def nap(self) -> Any:
        """Let others run."""
        raise NotImplementedError

    def after(self, first: Any, then: Callable[[Any], Any]) -> Any:
        """Give what was returned by a step, once it is done, to a function."""
        raise NotImplementedError

    def each(self, step: Callable[[Any], Any], items: Iterable[Any]) -> Any:
        """Take a step with each item, one after the other."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the test still holds."""
        for lease in self._leases:
            with suppress(DLockError):
                self.do(lease.release)
        for pending in self._pending:  # each gets it now from the one before
            with suppress(DLockError, CancelledError):
                self.do(pending.result(WITHIN).release)

    def start(self, step: Step) -> Future[Any]:
        """Begin a step as a new party."""
        return self.party().start(step)

    def do(self, step: Step) -> Any:
        """Take a step as a new party."""
        return self.party().do(step)

    def acquire(self, name: str, **options: Any) -> Any:
        """Hold a lock as a new party."""
        return self.keep(self.do(self.lock(name, **options).acquire))

    def try_acquire(self, name: str, **options: Any) -> Any:
        """Try a lock as a new party."""
        return self.keep(self.do(self.lock(name, **options).try_acquire))

    def begin_to_wait(self, name: str, **options: Any) -> Future[Any]:
        """Ask for a lock as a new party; returns when it begins to wait, wherever that is."""
        before = len(self.waiting(name))
        pending = self.start(self.lock(name, wait=options.pop("wait", None), **options).acquire)
        self._pending.append(pending)
        self.observed.until(lambda _: len(self.waiting(name)) > before or pending.done())
        return pending

    def queue_up(self, name: str, **options: Any) -> Future[Any]:
        """Begin to wait for a lock as a new party; returns when it has its place, where the store lists those."""
        pending = self.begin_to_wait(name, **options)
        if self.store.capabilities.lists_waiters and not pending.done():
            holder = self.waiting(name)[-1]
            self.until(lambda: holder in [waiter.holder for waiter in self.state(name).waiters] or pending.done())
        return pending

    def keep(self, lease: Any) -> Any:
        """Have a lease released at the end of the test."""
        if lease is not None:
            self._leases.append(lease)
        return lease

    def waiting(self, name: str) -> list[str]:
        """Give the holders who have begun to wait for a lock, in order."""
        return list(dict.fromkeys(call.holders[0] for call in self.asked("wait", name)))

    def asked(self, what: str, name: str) -> list[Any]:
        """Give the questions of one kind about one lock, so far."""
        return [call for call in list(self.observed.calls) if call.what == what and call.name == name]

    def renewals(self, lease: Any) -> int:
        """Tell how many times the store was asked to renew a lease."""
        return sum(call.what == "renew" and lease.holder in call.holders for call in list(self.observed.calls))

    def state(self, name: str) -> LockState:
        """Inspect one lock, without any party."""
        (state,) = run(self.store.inspect(BLOCKING, name))
        return state

    def holders(self, name: str) -> list[str]:
        """Give who holds a lock."""
        return [holder.holder for holder in self.state(name).holders]

    def until(self, condition: Step) -> None:
        """Wait until a condition holds that no event announces."""
        for _ in range(int(WITHIN * 100)):
            if condition():
                return
            threading.Event().wait(0.01)
        raise TimeoutError(f"did not happen within {WITHIN} s")


class Threads(Locks):
    """Competitors are threads."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._parties: list[queue.SimpleQueue[Any]] = []

    def party(self) -> Party:
        steps: queue.SimpleQueue[tuple[Step, Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(steps,), daemon=True).start()
        self._parties.append(steps)

        def begin(step: Step) -> Future[Any]:
            done: Future[Any] = Future()
            steps.put((step, done))
            return done

        return Party(begin)

    def lock(self, name: str, **options: Any) -> Lock:
        return Lock(self.store, name, **options)

    def ask(self, what: str, *args: Any, **options: Any) -> Any:
        return run(getattr(self.store, what)(BLOCKING, *args, **options))

    def block(self, lock: Any, body: Callable[[Any], Any]) -> Any:
        with lock as lease:
            return body(lease)

    def many(self, names: Iterable[str], **options: Any) -> MultiLock:
        return MultiLock(self.store, names, **options)

    def nap(self) -> None:
        threading.Event().wait(0.001)

    def after(self, first: Any, then: Callable[[Any], Any]) -> Any:
        return then(first)

    def each(self, step: Callable[[Any], Any], items: Iterable[Any]) -> None:
        for item in items:
            step(item)

    def close(self) -> None:
        super().close()
        for steps in self._parties:
            steps.put(None)


def _work(steps: queue.SimpleQueue[tuple[Step, Future[Any]] | None]) -> None:
    while (work := steps.get()) is not None:
        step, done = work
        try:
            done.set_result(step())
        except BaseException as error:  # noqa: BLE001 - it is the step's outcome
            done.set_exception(error)
        del work, step, done  # a lease that the test throws away must not live on here
