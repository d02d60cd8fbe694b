"""Helpers that look at a store over a good network."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import pytest
import redis

from dlock_core.backend import LockState
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import BLOCKING, run
from tests.waiting import until

T = TypeVar("T")


def holders(store: RedisBackend, name: str) -> list[str]:
    return [holder.holder for holder in look(store, name).holders]


def waiters(store: RedisBackend, name: str) -> list[str]:
    return [waiter.holder for waiter in look(store, name).waiters]


def look(store: RedisBackend, name: str) -> LockState:
    """Return the state of a lock, in several attempts if need be: on a busy machine one may exceed its time limit."""
    (state,) = insist(lambda: run(store.inspect(BLOCKING, name)))
    return state


def insist(step: Callable[[], T]) -> T:
    """Repeat a step until the store replies, and return its result."""
    found: list[T] = []

    def is_answered() -> bool:
        with suppress(BackendUnavailable):
            found.append(step())
        return bool(found)

    until(is_answered)
    return found[0]


def is_untouched(store: RedisBackend, name: str) -> bool:
    """Return whether the lock has neither holders nor waiters."""
    return not holders(store, name) and not waiters(store, name)


def keys(url: str, prefix: str) -> set[str]:
    """Return every key of a store except the token counter and the short-lived wake-ups."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        found = {key.removeprefix(prefix) for key in client.scan_iter(f"{prefix}*")}
        return {key for key in found if "wake:" not in key} - {"token"}


@contextmanager
def interrupted(condition: Callable[[], object]) -> Iterator[None]:
    """End the block by a real Ctrl-C as soon as the condition holds."""

    def interrupt() -> None:
        until(condition)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        yield
    thread.join()
    signal.signal(signal.SIGINT, before)
