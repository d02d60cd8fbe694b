"""Session locks when their holder dies, stands still or is cut off, and when the server ends its session."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from dlock_core.errors import LeaseLost
from dlock_core.lease import Released
from dlock_core.lock import AsyncLock, Lock
from dlock_core.runtime import BLOCKING, run
from dlock_core.testing.contract.observed import WITHIN
from tests.advisory_stores import made, sessions
from tests.processes import Link, worker

NAME = "order:42"
both = pytest.mark.parametrize("store", ["postgresql", "mariadb"], indirect=True)


@pytest.fixture
def store(request: pytest.FixtureRequest, django_db_blocker: Any) -> Iterator[Any]:
    backend = sessions(request, request.param)
    with django_db_blocker.unblock():
        yield backend
    backend.close()


@pytest.fixture
def alias(request: pytest.FixtureRequest, store: Any) -> str:
    return str(request.node.callspec.params["store"])


def hold(link: Link, alias: str, ttl: float) -> None:
    lease = Lock(made(alias, session=True), NAME, ttl=ttl).acquire()
    link.say(lease.token)
    while link.hear() == "renew":
        lease.renew()
        link.say("renewed")
    link.say(lease.lost)


@both
def test_lock_of_a_killed_process_is_free_at_once(store, alias):
    with worker(hold, alias, 3600.0) as holder:
        token = holder.hear()
        assert Lock(store, NAME).try_acquire() is None
        holder.kill()
        with Lock(store, NAME, wait=WITHIN) as lease:
            assert lease.token > token


@both
def test_lock_of_a_process_that_stands_still_ends_with_its_ttl_and_it_learns_of_it(store, alias):
    with worker(hold, alias, 2.0) as holder:
        holder.hear()
        holder.pause()
        with Lock(store, NAME, wait=WITHIN):
            holder.resume()
            holder.say("are you still there?")
            assert holder.hear() is True


@both
def test_renewal_tells_of_a_session_that_the_server_has_ended(store, alias):
    lost: list[bool] = []
    lease = Lock(store, NAME, on_lost=lambda: lost.append(True)).acquire()
    assert run(store.force_release(BLOCKING, NAME, lease.token))
    with pytest.raises(LeaseLost):
        lease.renew()
    assert lease.lost
    assert lost == [True]
    lease.release()


@both
def test_session_that_holds_is_shown_to_another_process(store, alias):
    with worker(hold, alias, 3600.0) as holder:
        token = holder.hear()
        (seen,) = run(store.inspect(BLOCKING, NAME))[0].holders
        assert "session" in seen.owner
        assert seen.token == (token if alias == "postgresql" else 0)
        if alias == "postgresql":
            holder.say("renew")
            holder.hear()
            (seen,) = run(store.inspect(BLOCKING, NAME))[0].holders
            assert f'"pid":{holder.process.pid}' in seen.owner


@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
async def test_cancelled_renewal_leaves_the_lock(store):
    lease = await AsyncLock(store, NAME).acquire()
    renewal = asyncio.create_task(lease.renew())
    await asyncio.sleep(0)
    renewal.cancel()
    with pytest.raises(asyncio.CancelledError):
        await renewal
    await lease.renew()
    assert await lease.release() is Released.RELEASED


@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
async def test_tasks_that_wait_leave_room_for_the_release(store):
    async def pass_on() -> Released:
        lease = await AsyncLock(store, NAME, wait=None).acquire()
        return await lease.release()

    holder = await AsyncLock(store, NAME).acquire()
    waiting = [asyncio.create_task(pass_on()) for _ in range(40)]
    while len(run(store.inspect(BLOCKING, NAME))[0].waiters) < len(waiting):
        await asyncio.sleep(0.01)
    await holder.release()
    assert set(await asyncio.gather(*waiting)) == {Released.RELEASED}
