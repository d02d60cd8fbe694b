"""Wait in a test for what no event announces: `until` in a thread, `auntil` in a task.

Where there is an event, wait for that. A test with its own loop takes the processor from what it waits for, and loops
for ever when that does not happen.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")

WITHIN: Final = 60.0
"""Seconds; far more than anything takes on a loaded machine, and less than pytest allows a test."""
LOOK_EVERY_S: Final = 0.01
INNODB_REFRESH_S: Final = 0.15
"""MariaDB and MySQL keep showing an old `innodb_trx` to a session that asks again within a tenth of a second."""


def until(condition: Callable[[], T], *, every: float = LOOK_EVERY_S) -> T:
    """Return what `condition` returns, as soon as that is true; raise TimeoutError when it never is."""
    give_up_at = time.monotonic() + WITHIN
    while not (found := condition()):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"did not happen within {WITHIN} s; at last it was {found!r}")
        time.sleep(every)
    return found


async def auntil(condition: Callable[[], T], *, every: float = LOOK_EVERY_S) -> T:
    """Do the same in a task: others run between two checks."""
    give_up_at = time.monotonic() + WITHIN
    while not (found := condition()):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"did not happen within {WITHIN} s; at last it was {found!r}")
        await asyncio.sleep(every)
    return found


@contextlib.contextmanager
def meanwhile(function: Callable[[], object]) -> Iterator[None]:
    """Call a function in another thread during the block, wait for its end, and fail if it has failed."""
    failures: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        thread.join(WITHIN)
    assert not failures
    assert not thread.is_alive()
