"""A signal handler that raises while work is handed to another thread leaves neither a lease nor a thread."""

import asyncio
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from dlock_core import AsyncLock, Lock
from dlock_core.backends.sql import Handover, handed_over, in_threads, within
from dlock_core.backends.table.backend import TableBackend
from dlock_core.runtime import ASYNCIO, BLOCKING, run, start_thread
from sqla_dlock.backends.loops import Loop
from sqla_dlock.backends.table import from_engine
from tests.interrupts import SoftLimit, each_line
from tests.table_stores import URLS, server_of
from tests.waiting import WITHIN, auntil, until

pytestmark = [
    pytest.mark.usefixtures("garbage_is_collected"),
    # An interrupt in the end of a connection leaves it to the garbage collector, which closes it and warns.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

HANDS_OVER = (
    "/dlock_core/backends/sql/handover.py",
    "/dlock_core/backends/sql/threads.py",
    "/sqla_dlock/backends/loops.py",
)
LOOP = Loop()
ASYNCIOS = ("/asyncio/base_events.py", "/asyncio/selector_events.py")


@pytest.fixture(params=["asyncpg", "psycopg"])
def store(request: pytest.FixtureRequest) -> Iterator[TableBackend]:
    request.getfixturevalue(server_of("postgresql"))
    make: Any = create_async_engine if request.param == "asyncpg" else create_engine
    store = from_engine(make(URLS[request.param]))
    yield store
    store.close()


@pytest.mark.timeout(300)
def test_interrupt_while_work_is_handed_over_leaves_no_lease(store: TableBackend) -> None:
    name = f"interrupts:{secrets.token_hex(4)}"

    async def in_task() -> None:
        async with AsyncLock(store, name, ttl=30, wait=0):
            pass

    def work() -> None:
        store.close()  # The next step opens a connection.
        if asynchronous:
            asyncio.run(in_task())
        else:
            with Lock(store, name, ttl=30, wait=0):
                pass

    asynchronous = not hasattr(store.pool.connector, "_loop")
    places = 0
    for line, _, _ in each_line(work, HANDS_OVER if asynchronous else (*HANDS_OVER, *ASYNCIOS)):
        places += 1
        assert not [each for each in run(store.inspect(BLOCKING, name)) if each.holders], line
    assert places > 20


@pytest.mark.parametrize("runtime", [BLOCKING, ASYNCIO])
def test_work_that_has_begun_is_over_when_the_interrupt_goes_on(runtime: Any) -> None:
    begun, interrupted, told = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        interrupted.wait(WITHIN)
        told.append("over")

    def begin(call: Handover[None]) -> None:
        start_thread(threading.Thread(target=call.perform))
        begun.wait()
        told.append("interrupted")
        interrupted.set()
        raise SoftLimit

    async def hand_over() -> None:
        await handed_over(runtime, begin, work)

    with pytest.raises(SoftLimit):
        run(hand_over()) if runtime is BLOCKING else asyncio.run(hand_over())
    assert told == ["interrupted", "over"]


def test_work_that_has_not_begun_never_begins_after_an_interrupt() -> None:
    queue, done = list[Handover[None]](), list[str]()

    def begin(call: Handover[None]) -> None:
        queue.append(call)
        raise SoftLimit

    with pytest.raises(SoftLimit):
        run(handed_over(BLOCKING, begin, lambda: done.append("done")))
    queue[0].perform()
    assert not done


@pytest.mark.parametrize("ways", ["threads", "loop"])
def test_task_does_not_go_on_before_its_work_is_over_although_all_tasks_are_cancelled_again_and_again(
    ways: str,
) -> None:
    begun, released, told = threading.Event(), threading.Event(), list[str]()
    hand_over = in_threads if ways == "threads" else LOOP.call

    def work() -> None:
        begun.set()
        released.wait(WITHIN)
        told.append("over")

    async def cancel_all() -> None:
        for _ in range(5):
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0.01)

    async def main() -> None:
        caller = asyncio.create_task(hand_over(ASYNCIO, work))
        await auntil(begun.is_set)
        await cancel_all()
        assert not caller.done()
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert told == ["over"]

    asyncio.run(main())


def test_second_interrupt_does_not_go_on_before_the_work_is_over_either() -> None:
    told, handled = list[str](), threading.Semaphore(0)

    def handle(*_: object) -> None:
        told.append("interrupted")
        handled.release()
        raise SoftLimit(len(told))

    def work() -> None:
        for _ in range(2):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            assert handled.acquire(timeout=WITHIN)
        told.append("over")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(SoftLimit, match="2"):
            run(LOOP.call(BLOCKING, work))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == ["interrupted", "interrupted", "over"]


PRELUDE = """
import os, signal, threading
from dlock_core.runtime import BLOCKING, run
from sqla_dlock.backends.loops import Loop
LOOP = Loop()
"""
FORKS = """
pids, forked = [], threading.Event()
def fork(*_):
    pids.append(os.fork())
    forked.set()
def step():
    os.kill(os.getpid(), signal.SIGUSR1)
    forked.wait()
signal.signal(signal.SIGUSR1, fork)
try:
    run(LOOP.call(BLOCKING, step))
except RuntimeError as error:
    os._exit(7 if pids == [0] and "forked this one" in str(error) else 8)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) if pids[0] else 9)
"""
ENDS = """
class Late:
    def __del__(self, call=LOOP.call, runtime=BLOCKING, run=run):
        run(call(runtime, int))
run(LOOP.call(BLOCKING, int))
late = Late()
late.itself = late
"""


CLOSES = """
import asyncio
from sqla_dlock.greenlets import await_
def close():
    LOOP.within(5, lambda: await_(asyncio.sleep(0.2)))
    print("closed", flush=True)
LOOP.spawn(close)
"""


def test_connection_that_is_being_closed_at_the_end_of_the_program_is_closed() -> None:
    """Otherwise Python ends the loop's thread inside a greenlet, which crashes the process."""
    command = [sys.executable, "-c", PRELUDE + CLOSES]
    done = subprocess.run(command, timeout=WITHIN, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_child_that_a_handler_forks_during_a_call_is_told_so() -> None:
    done = subprocess.run([sys.executable, "-c", PRELUDE + FORKS], timeout=WITHIN, check=False)
    assert done.returncode == 7


def test_finalizer_at_the_end_of_the_interpreter_does_not_wait_for_threads_that_no_longer_run() -> None:
    command = [sys.executable, "-c", PRELUDE + ENDS]
    done = subprocess.run(command, timeout=WITHIN, check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert "the interpreter is ending" in done.stderr


class AtReturn:
    """Raises when function number `number` of these files returns: a signal handler may run there, too.

    At that moment the function may have acquired a mutex that its caller will never release. `Thread.start` is left
    out: it waits for a mutex of its own, and what it leaves behind is one thread that has not begun.
    """

    FILES = ("/threading.py", "/concurrent/futures/_base.py", "/dlock_core/runtime.py", *HANDS_OVER)

    def __init__(self, number: int) -> None:
        self.number, self.count, self.reached = number, 0, threading.Event()
        self.holds_up = lambda: self.reached.wait(WITHIN)
        """What keeps the other thread from its work until the interrupt comes, or the caller is about to wait."""

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self.reached.set()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.FILES) or is_in_start(frame):
            return None
        if event == "call" and frame.f_code.co_name in {"wait", "ended"}:
            self.reached.set()
        self.count += event == "return"
        if event == "return" and self.count == self.number:
            raise SoftLimit
        return self._trace


def is_in_start(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not threading.Thread.start.__code__:
        frame = frame.f_back
    return frame is not None


class FakeConnection:
    """What a driver would open."""

    def close(self) -> None:
        """There is nothing to close."""


def call_in_busy_loop(interrupt: AtReturn) -> None:
    LOOP.call_soon(interrupt.holds_up)
    with interrupt:
        run(LOOP.call(BLOCKING, lambda: None))


def call_in_thread_of_a_task(interrupt: AtReturn) -> None:
    async def main() -> None:
        with interrupt:
            await in_threads(ASYNCIO, interrupt.holds_up)

    asyncio.run(main())


def connect_slowly(interrupt: AtReturn) -> None:
    def connect() -> Any:
        interrupt.holds_up()
        return FakeConnection()

    with interrupt:
        within(WITHIN, connect)


async def of_task() -> int:
    return await in_threads(ASYNCIO, int)


def is_connecting() -> bool:
    return any(thread.name == "dlock-database-connect" for thread in threading.enumerate())


@pytest.mark.parametrize("work", [call_in_busy_loop, call_in_thread_of_a_task, connect_slowly])
def test_interrupt_at_the_end_of_any_function_leaves_no_thread_that_hangs(work: Callable[[AtReturn], None]) -> None:
    is_reached, number = True, 0
    with ThreadPoolExecutor(1) as another:
        while is_reached:
            number += 1
            interrupt = AtReturn(number)
            with suppress(SoftLimit):
                work(interrupt)
            for answer in [
                another.submit(run, LOOP.call(BLOCKING, int)),
                another.submit(asyncio.run, of_task()),
            ]:
                assert answer.result(WITHIN) == 0, number
            until(lambda: not is_connecting())
            is_reached = interrupt.count >= number
    assert number > 5
