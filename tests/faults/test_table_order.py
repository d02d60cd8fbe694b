"""Where a lease table notifies no waiter of releases, newcomers still do not overtake a waiter."""

import secrets
from collections.abc import Iterator

import pytest

from dlock_core import Lock
from dlock_core.backend import AcquireRequest, Busy, Granted
from dlock_core.backends.table import backend as module
from dlock_core.backends.table.backend import TableBackend
from dlock_core.runtime import BLOCKING, run
from tests.table_stores import server_of, table
from tests.waiting import until

FOR_EVER = 600.0


@pytest.fixture(params=["pymysql", "sqlite"])
def backend(
    request: pytest.FixtureRequest, django_db_blocker, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TableBackend]:
    """Yield a store that remembers a waiter for longer than any test takes."""
    monkeypatch.setattr(module, "MAX_POLL_INTERVAL_S", FOR_EVER)
    request.getfixturevalue(server_of(request.param))
    with django_db_blocker.unblock():
        backend = table(request, request.param)
        yield backend
        backend.close()


@pytest.fixture
def waiter(backend: TableBackend) -> AcquireRequest:
    """Return a waiter that has waited for a lock while it was held; the lock is free now."""
    waiter = somebody(f"order:{secrets.token_hex(4)}")
    with Lock(backend, waiter.name, ttl=60):
        busy = ask(backend, waiter)
        assert isinstance(busy, Busy)
        run(backend.wait(BLOCKING, waiter, busy, 0.05))
    return waiter


def somebody(name: str) -> AcquireRequest:
    return AcquireRequest(name, secrets.token_hex(16), ttl=60)


def ask(backend: TableBackend, request: AcquireRequest, ticket: object = None) -> Granted | Busy:
    return run(backend.try_acquire(BLOCKING, request, ticket))


def test_newcomer_does_not_take_what_another_waits_for(backend: TableBackend, waiter: AcquireRequest) -> None:
    assert isinstance(ask(backend, somebody(waiter.name)), Busy)
    assert isinstance(ask(backend, waiter, ticket=True), Granted)


def test_newcomer_who_need_not_be_fair_takes_it(backend: TableBackend, waiter: AcquireRequest) -> None:
    assert isinstance(ask(backend, somebody(waiter.name)._replace(fair=False)), Granted)


def test_single_try_takes_what_is_free_whoever_waits(backend: TableBackend, waiter: AcquireRequest) -> None:
    lease = Lock(backend, waiter.name, ttl=60).try_acquire()
    assert lease is not None
    lease.release()


def test_waiter_that_was_killed_does_not_keep_the_lock_from_others(
    backend: TableBackend, waiter: AcquireRequest
) -> None:
    with Lock(backend, waiter.name, ttl=60, wait=30) as lease:
        assert lease.token


def test_waiter_is_forgotten_when_he_did_not_look_for_long(
    backend: TableBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_POLL_INTERVAL_S", 0.05)
    other = somebody(f"order:{secrets.token_hex(4)}")
    with Lock(backend, other.name, ttl=60):
        run(backend.wait(BLOCKING, other, Busy(60), 0.05))
    newcomer = somebody(other.name)
    until(lambda: not isinstance(ask(backend, newcomer), Busy))  # otherwise the test times out
