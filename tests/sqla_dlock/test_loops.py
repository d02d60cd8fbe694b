"""The event loop in which the connections of asyncio drivers live."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dlock_core.runtime import BLOCKING, run
from dlock_core.testing import ManualRuntime
from sqla_dlock.backends import loops
from tests.waiting import WITHIN, until


def answer() -> str:
    return run(loops.call_in_loop(BLOCKING, lambda: "alive"))


def of_loops() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "dlock-database-loop"}


@pytest.fixture
def not_started(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, asyncio.AbstractEventLoop]]:
    """The loops, by process: none. What a test starts is ended after it."""
    before, started = of_loops(), dict[int, asyncio.AbstractEventLoop]()
    monkeypatch.setattr(loops, "_loops", started)
    yield started
    for loop in started.values():
        loop.call_soon_threadsafe(loop.stop)
    until(lambda: of_loops() <= before)


def test_finalizer_in_the_loops_own_thread_does_not_wait_for_the_loop() -> None:
    """The garbage collector runs in any thread: a store that it finds there is closed soon, and nothing hangs."""
    closed = threading.Event()
    loops.call_soon(lambda: run(loops.call_in_loop(BLOCKING, closed.set)))
    assert closed.wait(WITHIN)
    assert answer() == "alive"


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_loop_survives_what_a_listener_of_one_engine_raises(error: type[BaseException]) -> None:
    """asyncio lets these two end a loop; the calls of all other stores would never be answered."""

    def fail() -> None:
        raise error

    loops.call_soon(fail)
    assert answer() == "alive"
    with pytest.raises(error):
        run(loops.call_in_loop(BLOCKING, lambda: loops.within(WITHIN, fail)))
    assert answer() == "alive"


def test_call_on_a_clock_that_a_test_advances_waits_for_the_loop_in_real_time() -> None:
    loops.call_soon(lambda: threading.Event().wait(0.05))  # So that the answer is not there when the caller waits.
    assert run(loops.call_in_loop(ManualRuntime(), lambda: "alive")) == "alive"


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: object, method: str, handler: Callable[[], object]) -> None:
    """Call a stand-in for a signal handler, once, in the middle of a function."""
    known = getattr(owner, method)

    def interrupted(*args: object) -> object:
        result = known(*args)
        monkeypatch.setattr(owner, method, known)
        handler()
        return result

    monkeypatch.setattr(owner, method, interrupted)


@pytest.mark.usefixtures("not_started")
def test_signal_handler_may_use_the_loop_while_it_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, seen, before = ThreadPoolExecutor(1), list[str](), of_loops()

    def handler() -> None:
        seen.extend([answer(), answer()])

    interrupt(monkeypatch, loops, "start_thread", handler)
    assert threads.submit(answer).result(WITHIN) == "alive"
    assert seen == ["alive", "alive"]
    until(lambda: len(of_loops() - before) == 1)  # The other one, which nobody uses, has ended.
    threads.shutdown()


def test_threads_that_call_at_once_start_one_loop(not_started: dict[int, asyncio.AbstractEventLoop]) -> None:
    before, together = of_loops(), threading.Barrier(20)

    def call() -> str:
        together.wait(WITHIN)
        return answer()

    with ThreadPoolExecutor(20) as threads:
        assert [each.result(WITHIN) for each in [threads.submit(call) for _ in range(20)]] == ["alive"] * 20
    assert len(not_started) == 1
    until(lambda: len(of_loops() - before) == 1)


def test_interrupted_start_leaves_no_loop(monkeypatch: pytest.MonkeyPatch, not_started: dict[int, object]) -> None:
    before = of_loops()

    def handler() -> None:
        raise KeyboardInterrupt

    interrupt(monkeypatch, loops, "start_thread", handler)
    with pytest.raises(KeyboardInterrupt):
        answer()
    assert not not_started
    until(lambda: of_loops() <= before)
    assert answer() == "alive"
