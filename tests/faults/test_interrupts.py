"""A process whose signal handlers raise at random moments does not hang or crash, keeps renewing, leaves no orphans.

DLOCK_TEST_INTERRUPTS sets the number of interrupts; `make interrupts` runs 50,000.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from dlock_core import AsyncLock, AsyncMultiLock
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.runtime import BLOCKING, run
from tests.interrupts import SoftLimit
from tests.moments import FOR_EVER, Interrupt
from tests.moments import UNGUARDED as AT_ONCE
from tests.servers import Server

Step = Callable[[RedisBackend], Coroutine[Any, Any, None]]

COUNT = int(os.environ.get("DLOCK_TEST_INTERRUPTS", "0"))
LIMIT_S = max(120, COUNT)
"""A loaded machine needs a good second for each interrupt under asyncio, which begins an event loop in each round."""
SEED = int(os.environ.get("DLOCK_TEST_SEED", "1"))
UNGUARDED = {
    "blocks.py __exit__ RESUME", "blocks.py __aexit__ RESUME", "handles.py release RESUME",
}  # fmt: skip
"""Places where a signal handler runs before any code of ours does. Under asyncio there are no others."""


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(("mode", "few"), [("threads", 400), ("asyncio", 50)])
def test_process_whose_signal_handlers_raise_hangs_nowhere_renews_and_leaves_no_orphans(
    redis_server: Server, mode: str, few: int
) -> None:
    command = [sys.executable, "-m", "tests.faults.interrupts", mode, redis_server.url, str(COUNT or few), str(SEED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-5000:] + done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    sys.stdout.write(done.stdout)
    assert found["interrupts"] >= (COUNT or few)
    assert found["bystander"]["lost"] is False
    assert {place.partition(" ")[2] for place in found["orphans"]} <= UNGUARDED, found["orphans"]


class Killed(BaseException):
    """Stands for the exception that ends a greenlet."""


class Sending:
    """Raises once in a write of asyncio's transport, which catches most exceptions there and reports them later."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.error: type[BaseException] = SoftLimit
        self.is_sent = True
        send = socket.socket.send

        def raising(each: socket.socket, data: bytes, *flags: int) -> int:
            is_now = self.left == 0 and b"EVALSHA" in bytes(data)
            self.left -= b"EVALSHA" in bytes(data)
            sent = 0 if is_now and not self.is_sent else send(each, data, *flags)
            if is_now:
                raise self.error
            return sent

        monkeypatch.setattr(socket.socket, "send", raising)

    def each_write(self, error: type[BaseException], *, is_sent: bool) -> Iterator[int]:
        """Raise in the first write, then in the second, and so on to the last."""
        self.error, self.is_sent = error, is_sent
        for at in range(100):
            self.left = at
            yield at
            if self.left >= 0:
                self.left = -1
                return
        raise AssertionError("the work has no end")


@pytest.fixture
def sending(monkeypatch: pytest.MonkeyPatch) -> Sending:
    return Sending(monkeypatch)


async def blocks(store: RedisBackend) -> None:
    async with AsyncLock(store, "one", ttl=20) as lease:
        await lease.renew()
    await (await AsyncLock(store, "two", ttl=20, shared=True).acquire()).release()
    async with AsyncMultiLock(store, ["one", "two"], ttl=20):
        pass


async def block(store: RedisBackend) -> None:
    async with AsyncLock(store, "one"):
        pass


async def by_hand(store: RedisBackend) -> None:
    await (await AsyncLock(store, "one").acquire()).release()


async def renewal(store: RedisBackend) -> None:
    async with AsyncLock(store, "one") as lease:
        await lease.renew(60)


async def joined(store: RedisBackend) -> None:
    async with AsyncLock(store, "one"), AsyncLock(store, "one", reentrant=True):
        pass


async def several(store: RedisBackend) -> None:
    async with AsyncMultiLock(store, ["one", "two"]):
        pass


async def left_by(step: Step, store: RedisBackend, direct: RedisBackend, interrupt: Interrupt) -> list[str]:
    """Run a step that is interrupted, and return the names of the locks that are still held."""
    with interrupt:
        await step(store)
    left = await asyncio.to_thread(run, direct.inspect(BLOCKING))
    for state in left:
        await asyncio.to_thread(run, direct.force_release(BLOCKING, state.name, state.holders[0].token))
    return [state.name for state in left]


async def end_time_limits() -> None:
    """Run every pending time limit now, as if its time had passed."""
    for timer in asyncio.get_running_loop()._scheduled:  # type: ignore[attr-defined]
        if not timer.cancelled() and isinstance(getattr(timer._callback, "__self__", None), asyncio.Timeout):
            timer._run()
    await asyncio.sleep(0)


async def close_transports() -> None:
    """Close all sockets of the loop: one left by an interrupt would cause a warning in a later test."""
    for transport in list(asyncio.get_running_loop()._transports.values()):  # type: ignore[attr-defined]
        transport.abort()
        await asyncio.sleep(0)
        if transport._sock is not None:  # It was interrupted while closing.
            transport._call_connection_lost(None)


@pytest.mark.usefixtures("garbage_is_collected")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_task_that_is_interrupted_at_the_end_of_a_time_limit_of_redis_py_is_not_cancelled_later(
    redis_server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one while it connects."""
    store, leave = RedisBackend.from_url(redis_server.url, prefix=prefix, timeout=30), asyncio.Timeout.__aexit__

    async def leave_interrupted(self: asyncio.Timeout, *error: Any) -> Any:
        if type(self) is asyncio.Timeout:
            raise Killed
        return await leave(self, *error)

    async def main() -> None:
        with contextlib.suppress(Killed):
            await block(store)
        await end_time_limits()
        await close_transports()

    monkeypatch.setattr(asyncio.Timeout, "__aexit__", leave_interrupted)
    asyncio.run(main())
    store.close()


@pytest.mark.usefixtures("garbage_is_collected")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("step", [block, by_hand, renewal, joined, several])
def test_task_that_is_interrupted_at_any_moment_ends_its_lease_and_is_not_cancelled_later(
    redis_server: Server, prefix: str, step: Step
) -> None:
    store = RedisBackend.from_url(redis_server.url, prefix=prefix, timeout=30)
    direct = RedisBackend.from_url(redis_server.url, prefix=prefix)

    async def main() -> int:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        await step(store)
        for moment in range(1, FOR_EVER):
            interrupt = Interrupt(moment)
            left = await left_by(step, store, direct, interrupt)
            if interrupt.left > 0:
                await close_transports()
                return moment
            assert not left or interrupt.where in AT_ONCE, (moment, interrupt.where)
            await end_time_limits()  # They must not cancel this task.
        raise AssertionError("the step has no end")

    assert asyncio.run(main()) > 200
    store.close()


@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "unsent"])
@pytest.mark.parametrize(
    "error", [SoftLimit, Killed, KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit]
)
def test_interrupt_that_asyncios_transport_catches_surfaces_and_leaves_nothing(
    redis_server: Server, sending: Sending, prefix: str, error: type[BaseException], is_sent: bool
) -> None:
    store = RedisBackend.from_url(redis_server.url, prefix=prefix, timeout=30)  # A busy machine must not cause errors.
    interrupted = 0
    for at in sending.each_write(error, is_sent=is_sent):
        try:
            asyncio.run(blocks(store))
        except error:
            interrupted += 1
        left = [each.name for each in run(store.inspect(BLOCKING))]
        assert left == [], f"write {at}"
        assert run(store.inspect(BLOCKING, "one"))[0].waiters == ()
    assert interrupted >= 7
    store.close()
