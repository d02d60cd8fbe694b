"""A process that is interrupted at random moments: `python -m tests.faults.interrupts threads|asyncio URL COUNT SEED`.

In each round a signal handler raises once, at a random time after the round's operation began. That operation must
leave nothing in the store and block no lock, and a lease that the process holds meanwhile must stay renewed. The
process prints its findings as JSON, which the caller has to check; its exit code is 1 if that lease was lost.
"""

from __future__ import annotations

import asyncio
import collections
import dis
import faulthandler
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import redis

from dlock_core import AsyncLock, AsyncMultiLock, Lock, MultiLock
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.backends.redis.transport import Packer
from dlock_core.leases.watchdog import renew_in_background
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

HANGS_S: Final = 60
"""Seconds after which a round counts as hanging."""
BYSTANDER_TTL_S: Final = 2.0


class SoftLimit(Exception):
    """Stands for the exception of Celery's soft time limit."""


class Killed(BaseException):
    """Stands for the exception that ends a greenlet."""


ERRORS: Final = (SoftLimit, Killed, KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit, TimeoutError)


class Interrupts:
    """Raises once in each round, and records where."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.count = 0
        self.where: tuple[str, str, str] = ("", "", "")
        self.is_armed, self.again = False, 1e-5
        self.only_in_tasks = False
        """Spare the event loop's own code: an exception there loses a wake-up, for which no library can make up."""
        signal.signal(signal.SIGALRM, self._raise)

    def arm(self, longest: float) -> None:
        self.is_armed, self.again = True, 1e-5
        signal.setitimer(signal.ITIMER_REAL, self.chance.uniform(1e-6, longest))

    def disarm(self) -> None:
        self.is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self.is_armed or frame is None:
            return
        if self.only_in_tasks and not in_a_task(frame):
            self.again *= 1.5  # On a busy machine, handlers in quick succession would leave no time for work.
            signal.setitimer(signal.ITIMER_REAL, self.again)
            return
        self.is_armed = False
        self.count += 1
        code = frame.f_code
        at = next((each for each in dis.get_instructions(code) if each.offset == frame.f_lasti), None)
        self.where = (Path(code.co_filename).name, code.co_name, at.opname if at else "")
        raise self.chance.choice(ERRORS)


def in_a_task(frame: FrameType | None) -> bool:
    """Return whether the loop is running a step of a task that is in our code, or in code called by ours."""
    while frame is not None and Path(frame.f_code.co_filename).name not in {
        "events.py",
        "base_events.py",
        "runners.py",
    }:
        if "dlock_core" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class Round:
    """Runs one operation per round and interrupts it."""

    def __init__(self, url: str, seed: int) -> None:
        self.prefix = f"interrupts-{seed}-{os.getpid()}:"
        self.store = RedisBackend.from_url(url, prefix=self.prefix, timeout=10)
        self.client = redis.Redis.from_url(url, decode_responses=True, command_packer=Packer())
        self.interrupts = Interrupts(seed)
        self.shared = Lock(self.store, "shared", ttl=20, wait=5)
        self.orphans: collections.Counter[str] = collections.Counter()
        self.longest = dict.fromkeys(self.operations(), 0.001)
        self.rounds = 0

    def operations(self) -> dict[str, Callable[[str], Any]]:
        return {
            "block": self.block, "acquire": self.acquire, "try": self.try_acquire, "renew": self.renew, "many": self.many,
            "abandon": self.abandon, "busy": self.busy, "joined": self.joined, "lost": self.lost, "shared": self.one_object,
        }  # fmt: skip

    def block(self, name: str) -> None:
        with Lock(self.store, name, ttl=20):
            pass

    def acquire(self, name: str) -> None:
        lease = Lock(self.store, name, ttl=20).acquire()
        lease.release()

    def try_acquire(self, name: str) -> None:
        lease = Lock(self.store, name, ttl=20).try_acquire()
        assert lease is not None
        lease.release()

    def renew(self, name: str) -> None:
        with Lock(self.store, name, ttl=20) as lease:
            lease.renew()
            lease.renew(30)

    def many(self, name: str) -> None:
        with MultiLock(self.store, [name, f"{name}:2"], ttl=20):
            pass

    def abandon(self, name: str) -> None:
        with Lock(self.store, name, ttl=20) as lease:
            for _ in range(20):
                lease._held.abandon()
                renew_in_background(lease._held)

    def busy(self, name: str) -> None:
        with Lock(self.store, "bystander", wait=0.002):
            raise AssertionError("it is held")

    def joined(self, name: str) -> None:
        with Lock(self.store, name, ttl=20), Lock(self.store, name, ttl=20, reentrant=True):
            pass

    def lost(self, name: str) -> None:
        with Lock(self.store, name, ttl=20, on_lost=lambda: sys.exit(1)) as lease:
            self.client.connection_pool.reset()  # An interrupted client of redis-py stays out of step.
            self.client.delete(f"{self.prefix}{{{name}}}")
            lease.renew()

    def one_object(self, name: str) -> None:
        with self.shared:
            pass

    def run(self, number: int) -> None:
        kind = self.interrupts.chance.choice([*self.operations()])
        name = f"n{number}"
        before = self.interrupts.count
        began = time.perf_counter()
        try:
            try:
                self.interrupts.arm(self.longest[kind])
                self.perform(kind, name)
                self.interrupts.disarm()
            except BaseException:
                self.interrupts.disarm()
        except BaseException:
            self.interrupts.disarm()
        took = time.perf_counter() - began
        self.rounds += 1
        if self.interrupts.count == before:  # The operation ended before the interrupt: aim better.
            self.longest[kind] = 0.9 * self.longest[kind] + 0.1 * max(took, 1e-4)
        else:
            self.longest[kind] = min(0.05, self.longest[kind] * 1.02)
            self.look(kind, name)

    def perform(self, kind: str, name: str) -> None:
        self.operations()[kind](name)

    def look(self, kind: str, name: str) -> None:
        """Count and remove what the interrupted operation has left behind."""
        name = "shared" if kind == "shared" else name
        self.client.connection_pool.reset()
        left = [key for key in (name, f"{name}:2") if self.client.exists(f"{self.prefix}{{{key}}}")]
        queued = self.client.zrange(f"{self.prefix}{{bystander}}:q", 0, -1) if kind == "busy" else []
        if left or queued:
            self.orphans[" ".join((kind, *self.interrupts.where))] += 1
            for key in left:
                self.client.delete(f"{self.prefix}{{{key}}}")
            self.client.delete(f"{self.prefix}{{bystander}}:q")
            if kind == "shared":
                self.shared = Lock(self.store, "shared", ttl=20, wait=5)


class AsyncRound(Round):
    """Does the same with asyncio, where a signal handler may also run inside the event loop."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(url, seed)
        self.interrupts.only_in_tasks = True

    def operations(self) -> dict[str, Callable[[str], Any]]:
        return {
            "block": self.ablock, "acquire": self.aacquire, "renew": self.arenew, "many": self.amany,
            "busy": self.abusy, "joined": self.ajoined,
        }  # fmt: skip

    async def ablock(self, name: str) -> None:
        async with AsyncLock(self.store, name, ttl=20):
            pass

    async def aacquire(self, name: str) -> None:
        lease = await AsyncLock(self.store, name, ttl=20).acquire()
        await lease.release()

    async def arenew(self, name: str) -> None:
        async with AsyncLock(self.store, name, ttl=20) as lease:
            await lease.renew()

    async def amany(self, name: str) -> None:
        async with AsyncMultiLock(self.store, [name, f"{name}:2"], ttl=20):
            pass

    async def abusy(self, name: str) -> None:
        async with AsyncLock(self.store, "bystander", wait=0.002):
            raise AssertionError("it is held")

    async def ajoined(self, name: str) -> None:
        async with AsyncLock(self.store, name, ttl=20), AsyncLock(self.store, name, ttl=20, reentrant=True):
            pass

    def perform(self, kind: str, name: str) -> None:
        asyncio.run(self.operations()[kind](name))


def hold_in_a_thread(store: RedisBackend, done: threading.Event, seen: dict[str, Any]) -> None:
    """Hold the bystander's lease, and record whether it stays renewed."""
    held = threading.Event()

    def hold() -> None:
        with Lock(store, "bystander", ttl=BYSTANDER_TTL_S) as lease:
            held.set()
            while not done.wait(0.05):
                seen["least"] = min(seen.get("least", BYSTANDER_TTL_S), lease.remaining())
            seen["lost"] = lease.lost

    threading.Thread(target=hold, daemon=True).start()
    held.wait(10)


def main() -> int:
    mode, url, count, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    logging.disable()
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda unraisable: None
    threading.excepthook = lambda arguments: None
    faulthandler.enable()
    interrupted = (AsyncRound if mode == "asyncio" else Round)(url, seed)
    done, seen = threading.Event(), dict[str, Any]()
    hold_in_a_thread(interrupted.store, done, seen)
    began = time.perf_counter()
    while interrupted.interrupts.count < count:
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        interrupted.run(interrupted.rounds)
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    with Lock(interrupted.store, "afterwards", wait=5):
        pass
    done.set()
    until(lambda: "lost" in seen)
    faulthandler.cancel_dump_traceback_later()
    found = {
        "interrupts": interrupted.interrupts.count, "rounds": interrupted.rounds,
        "seconds": round(time.perf_counter() - began, 1), "orphans": dict(interrupted.orphans),
        "bystander": seen, "threads": threading.active_count(),
    }  # fmt: skip
    sys.stdout.write(json.dumps(found))
    return 1 if seen["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
