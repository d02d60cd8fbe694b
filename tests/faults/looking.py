"""Look at a store over a good network."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis

from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.runtime import BLOCKING, run
from tests.waiting import until


def holders(store: RedisBackend, name: str) -> list[str]:
    (state,) = run(store.inspect(BLOCKING, name))
    return [holder.holder for holder in state.holders]


def waiters(store: RedisBackend, name: str) -> list[str]:
    (state,) = run(store.inspect(BLOCKING, name))
    return [waiter.holder for waiter in state.waiters]


def is_untouched(store: RedisBackend, name: str) -> bool:
    """Nobody holds the lock or waits for it."""
    return not holders(store, name) and not waiters(store, name)


def keys(url: str, prefix: str) -> set[str]:
    """Every key of a store, without the counter and without what only lives for a moment."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        found = {key.removeprefix(prefix) for key in client.scan_iter(f"{prefix}*")}
        return {key for key in found if "wake:" not in key} - {"token"}


@contextmanager
def interrupted(condition: Callable[[], object]) -> Iterator[None]:
    """A real Ctrl-C ends the block, once the condition holds."""

    def interrupt() -> None:
        until(condition)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which background jobs do not have
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()
    signal.signal(signal.SIGINT, before)
