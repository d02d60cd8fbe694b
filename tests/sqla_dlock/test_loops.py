"""The event loop in which the connections of asyncio drivers live."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from dlock_core.runtime import BLOCKING, run
from sqla_dlock.backends import loops
from sqla_dlock.backends.loops import Loop

WITHIN = 10.0


def test_finalizer_in_the_loops_own_thread_does_not_wait_for_the_loop() -> None:
    """The garbage collector runs in any thread: a store that it finds there is closed soon, and nothing hangs."""
    loop, closed = Loop(), threading.Event()
    loop.enter(closed)
    loop.call_soon(lambda: run(loop.call(BLOCKING, closed.set)))
    try:
        assert closed.wait(WITHIN)
        assert run(loop.call(BLOCKING, lambda: "alive")) == "alive"
    finally:
        loop.leave(closed)


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: object, method: str, handler: Callable[[], object]) -> None:
    """Call a stand-in for a signal handler, once, in the middle of a function."""
    known = getattr(owner, method)

    def interrupted(*args: object) -> object:
        result = known(*args)
        monkeypatch.setattr(owner, method, known)
        handler()
        return result

    monkeypatch.setattr(owner, method, interrupted)


def test_signal_handler_may_use_the_loop_while_it_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, threads, seen = Loop(), ThreadPoolExecutor(1), []

    def handler() -> None:
        seen.append(loop.enter("a connection of the handler"))
        for _ in range(2):  # the second waits for the end of the first
            run(loop.call(BLOCKING, lambda: None))

    interrupt(monkeypatch, loops, "start_thread", handler)
    assert threads.submit(loop.enter, "a connection").result(WITHIN) is seen[0]
    assert run(loop.call(BLOCKING, lambda: "alive")) == "alive"
    for guest in ("a connection", "a connection of the handler"):
        loop.leave(guest)
    threads.shutdown()


def test_signal_handler_may_use_the_loop_while_it_is_being_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, threads, seen = Loop(), ThreadPoolExecutor(1), []
    ended = loop.enter("a connection")
    interrupt(
        monkeypatch, ended, "call_soon_threadsafe", lambda: seen.append(run(loop.call(BLOCKING, lambda: "alive")))
    )
    threads.submit(loop.leave, "a connection").result(WITHIN)
    assert seen == ["alive"]
    threads.shutdown()


def test_task_that_a_driver_leaves_running_is_cancelled_when_the_loop_ends() -> None:
    loop, begun = Loop(), threading.Event()

    async def ask_a_silent_server() -> None:
        begun.set()
        await asyncio.Event().wait()

    inside = loop.enter("a connection")
    running = asyncio.run_coroutine_threadsafe(ask_a_silent_server(), inside)
    assert begun.wait(WITHIN)
    loop.leave("a connection")
    with pytest.raises(CancelledError):
        running.result(WITHIN)
