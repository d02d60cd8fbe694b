"""The blocking runtime never suspends; the asyncio runtime finishes its clean-ups."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dlock_core import AcquireTimeout, LeaseLost, Lock, Released
from dlock_core.runtime import ASYNCIO, BLOCKING, clock, run, start_thread, within
from dlock_core.testing import ManualRuntime, MemoryBackend
from tests.garbage import collect_garbage


async def answer() -> int:
    return 42


def test_blocking_call_refuses_an_awaitable() -> None:
    with pytest.raises(TypeError, match="use AsyncLock"):
        run(BLOCKING.call(Awaitable))


class Awaitable:
    """Stands for a coroutine, which would warn that it was never awaited."""

    def __await__(self) -> object:
        raise AssertionError


async def test_asyncio_call_refuses_a_plain_answer() -> None:
    with pytest.raises(TypeError, match="use Lock"):
        await ASYNCIO.call(lambda: 42)
    assert await ASYNCIO.call(answer) == 42


def test_wait_ends_if_a_signal_handler_returns_after_its_end() -> None:
    wakeup, end = BLOCKING.signal(), clock() + 0.1

    def handler(*_: object) -> None:
        while clock() < end:
            pass

    before = signal.signal(signal.SIGUSR1, handler)
    interrupt = threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGUSR1))
    rescue = threading.Timer(10, wakeup.set)
    for timer in (interrupt, rescue):
        timer.start()
    was_set = wakeup.wait(end - clock())
    for timer in (interrupt, rescue):
        timer.cancel()
        timer.join()
    signal.signal(signal.SIGUSR1, before)
    assert not was_set


def test_wakeup_stays_set_until_it_is_cleared() -> None:
    wakeup = BLOCKING.signal()
    wakeup.set()
    wakeup.set()
    assert wakeup.wait(0.0)
    assert wakeup.wait(0.0)
    wakeup.clear()
    wakeup.clear()
    assert not wakeup.wait(0.0)


def test_run_returns_the_result_without_a_loop() -> None:
    assert run(answer()) == 42


def test_run_refuses_a_coroutine_that_suspends() -> None:
    ended: list[bool] = []

    async def suspends() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            ended.append(True)

    with pytest.raises(RuntimeError, match="tried to suspend"):
        run(suspends())
    assert ended == [True]


def test_run_passes_errors_on() -> None:
    async def fails() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(fails())


def test_clock_goes_on_while_the_machine_sleeps() -> None:
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    if boot is None:
        pytest.skip("this system has no such clock")
    assert abs(clock() - time.clock_gettime(boot)) < 60.0
    assert clock() <= clock()


def test_blocking_wait_ends_with_the_signal_or_the_time() -> None:
    signal = BLOCKING.signal()
    assert run(BLOCKING.wait(signal, 0.001)) is False
    threading.Thread(target=signal.set).start()
    assert run(BLOCKING.wait(signal, 1e12)) is True


async def test_asyncio_wait_is_ended_from_another_thread() -> None:
    signal = ASYNCIO.signal()
    assert await ASYNCIO.wait(signal, 0.001) is False
    threading.Thread(target=signal.set).start()
    assert await ASYNCIO.wait(signal, 30.0) is True


def test_signal_to_a_loop_that_is_closed_is_nothing() -> None:
    async def make() -> object:
        return ASYNCIO.signal()

    asyncio.run(make()).set()  # type: ignore[attr-defined]


async def test_shielded_clean_up_is_finished_however_often_it_is_cancelled() -> None:
    begun, go_on, done = asyncio.Event(), asyncio.Event(), []

    async def clean_up() -> None:
        begun.set()
        await go_on.wait()
        done.append(True)

    task = asyncio.ensure_future(ASYNCIO.shield(clean_up()))
    await begun.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [True]


async def test_error_of_a_shielded_clean_up_is_raised() -> None:
    async def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await ASYNCIO.shield(fails())


async def test_cancelled_clean_up_that_fails_leaves_no_unread_error() -> None:
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def fails() -> None:
        begun.set()
        await go_on.wait()
        raise ZeroDivisionError

    task = asyncio.ensure_future(ASYNCIO.shield(fails()))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait([task])
    assert task.cancelled()
    del task
    collect_garbage()
    assert problems == []


def test_manual_clock_turns_by_waiting_and_does_what_was_planned_on_the_way() -> None:
    runtime, seen = ManualRuntime(start=0.0), []
    runtime.at(2.0, lambda: seen.append(runtime.now()))
    runtime.at(1.0, lambda: seen.append(runtime.now()))
    signal = runtime.signal()
    runtime.at(3.0, signal.set)
    assert runtime.run(runtime.wait(signal, 10.0)) is True
    assert (seen, runtime.now()) == ([1.0, 2.0], 3.0)
    assert runtime.run(runtime.wait(runtime.signal(), 10.0)) is False
    assert runtime.now() == 13.0


def test_manual_clock_refuses_a_wait_that_nothing_can_end() -> None:
    runtime = ManualRuntime()
    with pytest.raises(RuntimeError, match="never end"):
        runtime.run(runtime.sleep(float("inf")))


def test_lease_on_the_clock_of_a_test_runs_out_when_the_test_advances_it() -> None:
    runtime = ManualRuntime()
    store = MemoryBackend(now=runtime.now)
    lock = Lock(store, "report", ttl=30, renew=False)
    lease = runtime.acquire(lock)
    runtime.advance(20)
    lease.renew()
    runtime.advance(20)
    assert 9 < lease.remaining() < 10
    lease.ensure_held()
    runtime.advance(11)
    assert lease.lost
    with pytest.raises(LeaseLost):
        lease.ensure_held()
    later = runtime.acquire(lock)
    assert later.token > lease.token
    assert lease.release() is Released.STOLEN
    assert later.release() is Released.RELEASED


def test_wait_on_the_clock_of_a_test_takes_no_time() -> None:
    runtime = ManualRuntime()
    store = MemoryBackend(now=runtime.now)
    with ThreadPoolExecutor(1) as elsewhere:
        held = elsewhere.submit(runtime.acquire, Lock(store, "report", renew=False)).result(10)
    with pytest.raises(AcquireTimeout):
        runtime.acquire(Lock(store, "report", wait=20, renew=False))
    runtime.at(runtime.now() + 5, held.release)
    assert runtime.acquire(Lock(store, "report", wait=20, renew=False)).release() is Released.RELEASED


def test_lock_on_the_clock_of_a_test_that_would_be_renewed_is_refused() -> None:
    with pytest.raises(ValueError, match="renew=False"):
        ManualRuntime().acquire(Lock(MemoryBackend(), "report"))


class Interrupted(Exception):
    """What a signal handler raises."""


@pytest.mark.parametrize("follows", [KeyError("thread"), RuntimeError("release unlocked lock")])
def test_exception_of_a_signal_handler_in_the_start_of_a_thread_is_raised_as_it_is(follows: Exception) -> None:
    class Thread(threading.Thread):
        def start(self) -> None:
            try:
                raise Interrupted
            except Interrupted:
                raise follows  # noqa: B904 - as the bookkeeping of threading does, when it was cut short

    with pytest.raises(Interrupted):
        start_thread(Thread())


def test_failure_to_start_a_thread_is_told_also_while_another_error_is_handled() -> None:
    class Thread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    try:
        raise Interrupted
    except Interrupted:
        with pytest.raises(RuntimeError, match="new thread"):
            start_thread(Thread())


def test_task_that_is_interrupted_when_its_time_limit_has_passed_is_not_cancelled_later(monkeypatch):
    """The limit has asked for its cancellation by then. A TaskGroup repeats such a request, if it is still counted."""

    class Interrupt(Exception):
        pass

    async def leave(*_: object) -> None:
        raise Interrupt

    async def main() -> int:
        with pytest.raises(Interrupt):
            await within(0.001, asyncio.Event().wait())
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    monkeypatch.setattr(asyncio.Timeout, "__aexit__", leave)
    assert asyncio.run(main()) == 0
