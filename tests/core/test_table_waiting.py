"""Waiters of this process survive a signal handler that interrupts them and uses the same store."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, cast

import pytest

from dlock_core.backends.table import waiting
from dlock_core.backends.table.waiting import LocalWaiters, NotifyListener
from dlock_core.runtime import BLOCKING, clock, run

WITHIN = 10.0


def interrupted_at(line: int, function: Callable[[], None], handler: Callable[[], None]) -> bool:
    """Call `function`, and `handler` at the `line`-th line of the module that it executes; False if it has fewer."""
    left, known = line, sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != waiting.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                handler()  # Nothing is traced during this call.
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(known)
    return left <= 0


def at_each_line(function: Callable[[], None], handler: Callable[[], None]) -> None:
    # In another thread, so that a hang is noticed.
    line, threads = 1, ThreadPoolExecutor(1)
    while threads.submit(interrupted_at, line, function, handler).result(WITHIN):
        line += 1
    assert line > 3
    threads.shutdown()


def test_signal_handler_waits_for_and_releases_the_lock_that_the_interrupted_code_waits_for() -> None:
    waiters = LocalWaiters()

    def wait() -> None:
        mine, later = BLOCKING.signal(), BLOCKING.signal()
        with waiters.on("order:42", mine), waiters.on("order:42", later):
            waiters.notify("order:42")
            assert mine.wait(0.0)
            assert later.wait(0.0)
            waiters.notify_all()

    at_each_line(wait, wait)
    assert not waiters._waiting


def test_signal_handler_opens_the_listener_that_is_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, threads, pool = [], ThreadPoolExecutor(1), cast("Any", None)
    listener = NotifyListener(pool, LocalWaiters())

    async def listen(*_: object) -> None:
        opened.append(1)

    def interrupted_clock() -> float:
        monkeypatch.setattr(waiting, "clock", clock)
        run(listener.open(BLOCKING))
        return clock()

    monkeypatch.setattr(listener, "_listen", listen)
    monkeypatch.setattr(waiting, "clock", interrupted_clock)
    threads.submit(run, listener.open(BLOCKING)).result(WITHIN)
    assert opened == [1]
    threads.shutdown()
