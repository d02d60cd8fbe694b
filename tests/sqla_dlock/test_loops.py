"""The event loop in which the connections of asyncio drivers live."""

import threading

from dlock_core.runtime import BLOCKING, run
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
