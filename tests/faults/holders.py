"""The work of other processes in these tests; the first argument of each is a Link to the test."""

import os
import sys
import traceback
from typing import Any

from dlock_core import Lease, Lock, MultiLock, NotHeld, connect
from dlock_core.backend import Backend
from tests.processes import Link


def store(url: str, prefix: str) -> Backend:
    return connect(url, prefix=prefix)


def hold(link: Link, url: str, prefix: str, options: dict[str, Any]) -> None:
    """Take the lock, send its token, and report the state of the lease on demand, without a request to the store."""
    lease = Lock(store(url, prefix), "a", **options).acquire()
    link.say(lease.token)
    while link.hear() != "release":
        link.say((lease.lost, lease.remaining()))
    link.say(lease.release().value)


def wait(link: Link, url: str, prefix: str, ttl: float = 30.0) -> None:
    """Wait for the lock without a limit."""
    lease = Lock(store(url, prefix), "a", wait=None, ttl=ttl).acquire()
    link.say(lease.token)
    link.hear()
    lease.release()


def fork(link: Link, url: str, prefix: str) -> Any:
    """Fork while holding; send what the child found, and return whether the parent still holds after a few renewals."""
    backend = store(url, prefix)
    with Lock(backend, "a", ttl=1.0) as lease:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.write(write, repr(_in_child(backend, lease)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        found = os.read(read, 100_000).decode()
        link.say(found)
        link.hear()
        return lease.lost, lease.remaining() > 0


def _in_child(backend: Backend, lease: Lease) -> Any:
    try:
        return _seen_by_child(backend, lease)
    except BaseException:
        return traceback.format_exc()


def _seen_by_child(backend: Backend, lease: Lease) -> Any:
    try:
        lease.release()
        released = "the child has released it"
    except NotHeld as error:
        released = type(error).__name__
    taken = Lock(backend, "a").try_acquire()
    with Lock(backend, "of the child", ttl=0.5) as own:
        import time

        time.sleep(1.0)  # longer than its ttl: the child has its own watchdog
        kept = not own.lost
    return {"released": released, "remaining": lease.remaining(), "lost": lease.lost, "taken": taken, "kept": kept}


def fork_out_of_block(link: Link, url: str, prefix: str, several: bool = False) -> Any:
    """Leave the parent's `with` block in a forked child, first at its end and then by an error."""
    backend = store(url, prefix)
    lock: Any = MultiLock(backend, ["a", "b"]) if several else Lock(backend, "a")
    lock.acquire().release()  # so that the server knows the scripts
    for fails in (False, True):
        child = 0
        try:
            with lock as lease:
                if (child := os.fork()) == 0 and fails:
                    sys.exit(3)
                if child:
                    os.waitpid(child, 0)
                    assert lease.remaining() > 0
                    link.say(lease.leases[0].holder if several else lease.holder)
                    link.hear()
        except SystemExit:
            os._exit(0)
        if not child:
            os._exit(0)
    return "done"
