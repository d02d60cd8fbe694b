"""The work of other processes with a lease table; the first arguments of each are a Link to the test and a URL."""

import gc
import os
from pathlib import Path
from typing import Any

import dlock_core
from dlock_core import Lock
from sqla_dlock.backends.table import from_url
from tests.faults import history, holders
from tests.processes import Link


def hold(link: Link, url: str, name: str, options: dict[str, Any]) -> None:
    """Take the lock, send its token, and report the state of the lease on demand, without a request to the store."""
    lease = Lock(from_url(url), name, **options).acquire()
    link.say(lease.token)
    while link.hear() != "release":
        link.say((lease.lost, lease.remaining()))
    link.say(lease.release().value)


def work(link: Link, url: str, path: str, rounds: int, options: dict[str, Any], inside: float = 0.0005) -> None:
    """Take the lock many times, and append a line to the history after each section."""
    history.connect = lambda url, prefix: from_url(url)  # type: ignore[attr-defined]
    history.work(link, url, "", path, rounds, options, inside)


def fork(link: Link, url: str, name: str) -> Any:
    """Fork while holding, with open connections; send the child's findings, and return whether the parent holds."""
    backend = from_url(url)
    with Lock(backend, name, ttl=2.0) as lease:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.write(write, repr(_in_child(backend, lease, name)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        found = os.read(read, 100_000).decode()
        link.say(found)
        link.hear()
        return lease.lost, lease.remaining() > 0


def _in_child(backend: dlock_core.backend.Backend, lease: Any, name: str) -> Any:
    holders.Lock = lambda backend, given, **options: Lock(backend, name if given == "a" else f"{name}:child", **options)
    return holders._in_child(backend, lease)


def fork_and_forget(_: Link, url: str, name: str) -> list[Any]:
    """Have a forked child forget the store; return what the parent's connection replies afterwards."""
    backend = from_url(url)
    Lock(backend, name).acquire().release()
    session = backend.pool.idle.take()
    backend.pool.idle.put(session)
    if (child := os.fork()) == 0:
        del backend, session
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    return session.execute("SELECT 1")


def read(path: Path) -> list[history.Section]:
    """Return the history, sorted by token."""
    return history.read(path)
