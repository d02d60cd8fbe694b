"""A process keeps nothing for a failed attempt, whatever the store and however long it is away."""

import asyncio
import gc
from collections.abc import Callable, Iterator

import pytest

from dlock_core import AsyncLock, Lock, connect
from dlock_core.backend import Backend
from dlock_core.errors import BackendUnavailable, DLockError
from tests.garbage import collect_garbage
from tests.servers import free_port

ATTEMPTS = 40
KEPT = ATTEMPTS // 2
"""So many new objects after ATTEMPTS attempts are growth; one per attempt would be twice as many."""

STORES: dict[str, Callable[[int], str]] = {
    "redis": lambda port: f"redis://127.0.0.1:{port}/0",
    "sentinel": lambda port: f"redis+sentinel://127.0.0.1:{port}/service/0",
    "cluster": lambda port: f"redis+cluster://127.0.0.1:{port}",
    "redlock": lambda port: f"redlock://127.0.0.1:{port},127.0.0.1:{port + 1},127.0.0.1:{port + 2}",
    "etcd": lambda port: f"etcd://127.0.0.1:{port}",
    "zookeeper": lambda port: f"zookeeper://127.0.0.1:{port}",
    "table": lambda port: f"database+postgresql+psycopg://postgres@127.0.0.1:{port}/postgres",
    "advisory": lambda port: f"advisory+postgresql+psycopg://postgres@127.0.0.1:{port}/postgres",
}
OPTIONS = {"zookeeper": {"timeout": 0.005}}


@pytest.fixture(params=STORES)
def nowhere(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Backend]:
    """Yield a store without running servers."""
    caplog.set_level("CRITICAL", "dlock")  # pytest keeps log records
    backend = connect(STORES[request.param](free_port()), **OPTIONS.get(request.param, {}))
    yield backend
    backend.close()


def attempt(backend: Backend, number: int) -> None:
    """Fail to acquire a lock with a wait and with a single try."""
    with pytest.raises(BackendUnavailable):
        Lock(backend, f"order:{number}", wait=0.0001).acquire()
    with pytest.raises(DLockError):
        Lock(backend, f"order:{number}", wait=0).acquire()


async def attempts(backend: Backend, numbers: range) -> None:
    for number in numbers:
        with pytest.raises(BackendUnavailable):
            await AsyncLock(backend, f"order:{number}", wait=0.0001).acquire()


def is_growing(work: Callable[[], object]) -> bool:
    """Return whether each of several runs leaves more objects: a pool that fills up, such as threads, is no growth.

    Up to twenty requests are being abandoned in the background, so single counts may be off.
    """
    return all(_more_after(work) >= KEPT for _ in range(8))


def _more_after(work: Callable[[], object]) -> int:
    before = _objects()
    work()
    return _objects() - before


def _objects() -> int:
    collect_garbage()
    return len(gc.get_objects())


def test_failed_attempts_leave_nothing_in_the_process(nowhere: Backend) -> None:
    def work() -> None:
        for number in range(ATTEMPTS):
            attempt(nowhere, number)

    assert not is_growing(work)


def test_failed_attempts_of_tasks_leave_nothing_in_the_process(nowhere: Backend) -> None:
    assert not is_growing(lambda: asyncio.run(attempts(nowhere, range(ATTEMPTS))))
