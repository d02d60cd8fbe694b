"""The event loop in which the connections of an engine's asyncio driver live."""

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from weakref import ref

import pytest

from dlock_core.runtime import BLOCKING, run
from dlock_core.testing import ManualRuntime
from sqla_dlock.backends import loops
from sqla_dlock.backends.loops import Loop
from tests.garbage import collect_garbage
from tests.waiting import WITHIN, until


def answer_of(loop: Loop) -> str:
    return run(loop.call(BLOCKING, lambda: "alive"))


def of_loops() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "dlock-database-loop"}


def test_loop_ends_when_nothing_refers_to_it_but_not_before_a_call_that_needs_it() -> None:
    before, loop, begun, may_end, done = of_loops(), Loop(), threading.Event(), threading.Event(), list[str]()

    def close(loop: Loop) -> None:
        begun.set()
        may_end.wait(WITHIN)
        loop.within(WITHIN, lambda: done.append("closed"))

    loop.spawn(partial(close, loop))
    assert begun.wait(WITHIN)
    del loop
    collect_garbage()
    may_end.set()
    until(lambda: of_loops() <= before)
    assert done == ["closed"]


def test_finalizer_in_the_loops_own_thread_does_not_wait_for_the_loop() -> None:
    """The garbage collector runs in any thread: a store that it finds there is closed soon, and nothing hangs."""
    loop, closed = Loop(), threading.Event()
    loop.call_soon(lambda: run(loop.call(BLOCKING, closed.set)))
    assert closed.wait(WITHIN)
    assert answer_of(loop) == "alive"


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_loop_survives_what_a_listener_of_its_engine_raises(error: type[BaseException]) -> None:
    """asyncio lets these two end a loop; the other calls of the store would never be answered."""
    loop = Loop()

    def fail() -> None:
        raise error

    loop.call_soon(fail)
    assert answer_of(loop) == "alive"
    with pytest.raises(error):
        run(loop.call(BLOCKING, lambda: loop.within(WITHIN, fail)))
    assert answer_of(loop) == "alive"


def test_listener_that_blocks_delays_no_other_engine() -> None:
    blocked, other, may_end = Loop(), Loop(), threading.Event()
    blocked.call_soon(lambda: may_end.wait(WITHIN))
    try:
        assert answer_of(other) == "alive"
    finally:
        may_end.set()


class Refused(Exception):
    """What a driver raises."""


def test_error_of_a_call_does_not_keep_the_store_until_a_garbage_collection() -> None:
    loop, raised = Loop(), list[ref[BaseException]]()

    def fail() -> None:
        raise Refused

    gc.disable()
    try:
        try:
            run(loop.call(BLOCKING, fail))
        except Refused as error:
            raised.append(ref(error))
        until(lambda: raised[0]() is None)
    finally:
        gc.enable()


def test_call_on_a_clock_that_a_test_advances_waits_for_the_loop_in_real_time() -> None:
    loop = Loop()
    loop.call_soon(lambda: threading.Event().wait(0.05))  # So that the answer is not there when the caller waits.
    assert run(loop.call(ManualRuntime(), lambda: "alive")) == "alive"


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
    loop, threads, seen, before = Loop(), ThreadPoolExecutor(1), list[str](), of_loops()

    def handler() -> None:
        seen.extend([answer_of(loop), answer_of(loop)])

    interrupt(monkeypatch, loops, "start_thread", handler)
    assert threads.submit(answer_of, loop).result(WITHIN) == "alive"
    assert seen == ["alive", "alive"]
    until(lambda: len(of_loops() - before) == 1)  # The other one, which nobody uses, has ended.
    threads.shutdown()


def test_threads_that_call_at_once_start_one_loop() -> None:
    loop, before, together = Loop(), of_loops(), threading.Barrier(20)

    def call() -> str:
        together.wait(WITHIN)
        return answer_of(loop)

    with ThreadPoolExecutor(20) as threads:
        assert [each.result(WITHIN) for each in [threads.submit(call) for _ in range(20)]] == ["alive"] * 20
    until(lambda: len(of_loops() - before) == 1)


def test_interrupted_start_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, before = Loop(), of_loops()

    def handler() -> None:
        raise KeyboardInterrupt

    interrupt(monkeypatch, loops, "start_thread", handler)
    with pytest.raises(KeyboardInterrupt):
        answer_of(loop)
    until(lambda: of_loops() <= before)
    assert answer_of(loop) == "alive"


def test_task_that_a_driver_leaves_running_is_cancelled_when_the_loop_ends() -> None:
    loop, begun, cancelled = Loop(), threading.Event(), threading.Event()

    async def ask_a_silent_server() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()

    loop.call_soon(lambda: asyncio.ensure_future(ask_a_silent_server()))
    assert begun.wait(WITHIN)
    del loop
    assert cancelled.wait(WITHIN)


AT_EXIT = """
import atexit, threading

from dlock_core.runtime import BLOCKING, run

said, go, done = [], threading.Event(), threading.Event()

def call():
    said.append(run(loop.call(BLOCKING, lambda: "answered")))

def work():
    go.wait()
    call()
    done.set()

@atexit.register  # before the loops' own function, and so called after it
def last():
    go.set()
    done.wait(10)
    call()
    print(*said)

from sqla_dlock.backends.loops import Loop

loop = Loop()
threading.Thread(target=work, daemon=True).start()
call()
"""

BUSY = """
import threading, time

from dlock_core.runtime import BLOCKING, run
from sqla_dlock.backends import loops

loop, begun = loops.Loop(), 0

def work():
    global begun
    while True:
        begun += 1
        run(loop.call(BLOCKING, lambda: None))

loops.EXIT_DELAY_S = 60.0
threading.Thread(target=work, daemon=True).start()
while begun < 3:
    time.sleep(0.01)
loops._wait_for_tasks()
before = begun
time.sleep(0.2)
print("went on" if begun > before + 1 else "paused")
"""

FORKED = """
import os, sys

from dlock_core.runtime import BLOCKING, run
from sqla_dlock.backends.loops import Loop

loop = Loop()
run(loop.call(BLOCKING, str))
if os.fork() == 0:
    sys.exit()
os.wait()
print(run(loop.call(BLOCKING, lambda: "answered")))
"""


@pytest.mark.parametrize(
    ("program", "said"), [(AT_EXIT, "answered answered answered"), (BUSY, "paused"), (FORKED, "answered")]
)
def test_at_the_end_of_the_interpreter(program: str, said: str) -> None:
    """Locks can be released, by other threads too; what they do without end pauses; a forked child's end is only its own."""
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", program]  # it forks with threads
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (ended.stdout.strip(), ended.stderr) == (said, "")
