"""`async with lock(...)`: the lease lives in the task, its transactions in the threads that do the work."""

import asyncio

import pytest
from asgiref.sync import sync_to_async
from django.db.transaction import atomic
from django.test import RequestFactory, override_settings

from django_dlock import locked, pk
from django_dlock.errors import AcquireTimeout, AlreadyHeld, BackendUnavailable, LeaseLost, StaleToken
from django_dlock.middleware import LockMiddleware
from django_dlock.models import Fence
from django_dlock.tie import current
from dlock_core.backend import Released, RenewalFailure
from tests.chaos import EverybodyIn
from tests.django_dlock.sessions import committed
from tests.django_dlock.thread_work import Slow, add, in_database, in_thread, order
from tests.leases import is_awaited, is_held
from tests.testapp.models import Counter
from tests.waiting import auntil, until


class Sorry(Exception):
    """Raised by user code."""


pytestmark = pytest.mark.usefixtures("_connections_of_the_worker")


# The block


async def test_block_holds_the_lease_to_its_end(database, store):
    async with order(database) as lease:
        assert is_held(store)
        assert lease.token > 0
    assert not is_held(store)


async def test_block_that_raises_releases_and_lets_the_error_through(database, store):
    with pytest.raises(Sorry):
        async with order(database):
            raise Sorry
    assert not is_held(store)


async def test_lock_without_a_with(database, store):
    lease = await order(database).aacquire()
    assert is_held(store)
    await lease.arenew()
    assert await lease.arelease() is Released.RELEASED
    assert not is_held(store)


async def test_redis(database, redis_store):
    async with order(database) as lease:
        assert await sync_to_async(add)(database) == lease.token
    assert await in_database(committed, database) == {"a"}
    async with order(database, wait=0):
        pass


@pytest.mark.parametrize("sensitive", [True, False])
@pytest.mark.parametrize("form", ["transaction", "lease"])
async def test_transaction_in_a_thread_is_fenced(database, store, sensitive, form):
    async with order(database, fence=form) as lease:
        assert await sync_to_async(in_thread, thread_sensitive=sensitive)(add, (database,)) == lease.token
    assert await in_database(committed, database) == {"a"}


@pytest.mark.parametrize("form", ["transaction", "lease"])
async def test_transaction_in_a_thread_of_asyncio_is_fenced(database, store, form):
    async with order(database, fence=form) as lease:
        assert await in_database(add, database) == lease.token
    assert await in_database(committed, database) == {"a"}


async def test_stale_token_is_refused_in_the_thread(database):
    broken = EverybodyIn([10])
    broken.forgetful = True
    with override_settings(DLOCK={"default": {"BACKEND": broken}}):
        await in_database(lambda: Fence.objects.using(database).create(name="order:42", token=99, holder="x"))
        with pytest.raises(StaleToken):
            async with order(database):
                await sync_to_async(add)(database)
    assert await in_database(committed, database) == set()


async def test_lost_lease_rolls_back_in_the_thread(database, store):
    def work(lease):
        with atomic(database):
            Counter.objects.using(database).create(name="a")
            until(lambda: not lease.remaining())

    with pytest.raises(LeaseLost):
        async with order(database, ttl=0.05, renew=False) as lease:
            await sync_to_async(work)(lease)
    assert await in_database(committed, database) == set()


async def test_lost_lease_without_a_transaction_is_not_called_a_success(database, store):
    with pytest.raises(LeaseLost):
        async with order(database, ttl=0.05, renew=False) as lease:
            await auntil(lambda: not (lease.remaining() or is_held(store)))


async def test_write_without_a_transaction_is_refused(database, store):
    async with order(database):
        with pytest.raises(Exception, match=r"transaction\.atomic"):
            await Counter.objects.using(database).acreate(name="a")


async def test_sync_lock_in_the_thread_joins_inside_the_transaction(database, store):
    def work():
        with atomic(database), order(database) as inner:
            Counter.objects.using(database).create(name="a")
            return inner.token

    async with order(database) as outer:
        assert await sync_to_async(work)() == outer.token
        assert is_held(store)
    assert not is_held(store)


async def test_lock_taken_in_a_function_of_a_thread_ends_with_its_transaction(database, store):
    def work():
        with atomic(database):
            order(database).acquire()
            Counter.objects.using(database).create(name="a")

    await sync_to_async(work)()
    assert not is_held(store)


async def test_store_that_is_down_is_said_so(database):
    from tests.servers import free_port

    nobody = override_settings(DLOCK={"default": {"BACKEND": f"redis://127.0.0.1:{free_port()}/0", "WAIT": 0}})
    with nobody, pytest.raises(BackendUnavailable):
        await order(database).aacquire()


async def test_fence_that_refuses_leaves_no_lease(database, store):
    await in_database(lambda: Fence.objects.using(database).create(name="order:42", token=10**17, holder="x"))
    renew, store.renew = store.renew, forgotten
    with pytest.raises(StaleToken):
        await order(database, fence="lease").aacquire()
    store.renew = renew
    assert not is_held(store)
    assert current() == []


async def forgotten(runtime, renewals):
    return [RenewalFailure.LOST for _ in renewals]


# Two tasks


async def test_second_task_waits_until_the_first_has_left(database, store):
    entries = []

    async def work(number):
        async with order(database):
            entries.append(f"in {number}")
            await sync_to_async(add)(database, str(number))
            entries.append(f"out {number}")

    await asyncio.gather(*(work(number) for number in range(5)))
    assert [entry.split()[0] for entry in entries] == ["in", "out"] * 5
    assert await in_database(committed, database) == set("01234")


async def test_no_increment_of_many_tasks_is_lost(database, store):
    def increment():
        with atomic(database):
            counter = Counter.objects.using(database).get(name="a")
            Counter.objects.using(database).filter(name="a").update(value=counter.value + 1)

    async def work():
        async with order(database):
            await sync_to_async(in_thread, thread_sensitive=False)(increment, ())

    await in_database(lambda: Counter.objects.using(database).create(name="a"))
    await asyncio.gather(*(work() for _ in range(20)))
    counter = await in_database(lambda: Counter.objects.using(database).get(name="a"))
    assert counter.value == 20


async def test_tasks_share_one_lock_object(database, store):
    both = order(database, shared=True)

    async def work(barrier):
        async with both as lease:
            await barrier.wait()
            return lease.holder

    barrier = asyncio.Barrier(2)
    first, second = await asyncio.gather(work(barrier), work(barrier))
    assert first != second
    assert not is_held(store)


async def test_same_task_that_asks_again_is_told_at_once(database, store):
    async with order(database):
        with pytest.raises(AlreadyHeld):
            await order(database, wait=None).aacquire()
        async with order(database, reentrant=True):
            pass
        assert is_held(store)
    assert not is_held(store)


async def test_task_started_before_the_lease_is_another_holder(database, store):
    start = asyncio.Event()

    async def ask():
        await start.wait()
        await order(database, wait=0).aacquire()

    task = asyncio.create_task(ask())
    async with order(database):
        start.set()
        with pytest.raises(AcquireTimeout):
            await task


# Cancellation


async def test_waiting_task_that_is_cancelled_leaves_no_trace(database, store, party):
    other = party()
    lease = other.now(order(database).acquire)
    task = asyncio.create_task(order(database).aacquire())
    await auntil(lambda: is_awaited(store))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_awaited(store)
    other.now(lease.release)
    assert not is_held(store)


async def cancel(slow, database, how="cancel", **options):
    """Cancel a block while its work is in a thread."""

    async def work():
        async with order(database, **options):
            await sync_to_async(slow, thread_sensitive=False)()

    task = asyncio.create_task(work())
    await slow.wait_until_reached()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("form", ["transaction", "lease", False])
async def test_cancelled_task_releases_only_after_the_commit_of_its_thread(database, store, journal, form):
    slow = Slow(database)
    await cancel(slow, database, fence=form)
    assert is_held(store)
    assert "released order:42" not in journal
    await slow.finish()
    assert slow.error is None
    assert not is_held(store)
    assert await in_database(committed, database) == {"a"}


@pytest.mark.parametrize("form", ["transaction", "lease", False])
async def test_transaction_that_had_not_begun_when_its_task_was_cancelled_is_refused(database, store, form):
    slow = Slow(database, "before")
    await cancel(slow, database, fence=form)
    assert not is_held(store)
    async with order(database, wait=0):  # the next holder is at work
        pass
    await slow.finish()
    assert isinstance(slow.error, LeaseLost)
    assert await in_database(committed, database) == set()


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
async def test_transaction_that_had_not_begun_is_refused_while_another_of_the_block_is_still_at_work(database, store):
    late, working = Slow(database, "before"), Slow(database)

    async def both():
        async with order(database):
            await asyncio.gather(*(sync_to_async(slow, thread_sensitive=False)() for slow in (late, working)))

    task = asyncio.create_task(both())
    await late.wait_until_reached()
    await working.wait_until_reached()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_held(store)
    await late.finish()
    assert isinstance(late.error, LeaseLost)
    assert is_held(store)
    await working.finish()
    assert working.error is None
    assert not is_held(store)


@pytest.mark.parametrize("form", ["transaction", "lease", False])
async def test_work_that_a_timeout_has_cut_off_is_refused_as_well(database, store, form):
    slow = Slow(database, "before")

    async def work():
        async with order(database, fence=form):
            async with asyncio.timeout(0) as limit:
                limit.reschedule(None)
                started = asyncio.ensure_future(sync_to_async(slow, thread_sensitive=False)())
                await slow.wait_until_reached()
                limit.reschedule(asyncio.get_running_loop().time())
                await started

    with pytest.raises(TimeoutError):
        await work()
    assert not is_held(store)
    await slow.finish()
    assert isinstance(slow.error, LeaseLost)
    assert await in_database(committed, database) == set()


async def test_write_without_a_transaction_after_the_cancellation_is_refused(database, store):
    class SlowWrite(Slow):
        def work(self):
            self.at("before")
            Counter.objects.using(self.database).create(name="a")

    slow = SlowWrite(database, "before")
    await cancel(slow, database, fence=False)
    await slow.finish()
    assert isinstance(slow.error, LeaseLost)
    assert await in_database(committed, database) == set()


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
async def test_task_that_catches_its_cancellation_may_go_on_without_the_lease(database, store):
    slow = Slow(database)

    async def work():
        try:
            async with order(database):
                await sync_to_async(slow, thread_sensitive=False)()
        except asyncio.CancelledError:
            await in_database(lambda: Counter.objects.using(database).filter(name="none").update(value=1))
            return "gone on"

    task = asyncio.create_task(work())
    await slow.wait_until_reached()
    task.cancel()
    assert await task == "gone on"
    await slow.finish()
    assert slow.error is None


async def test_inner_block_that_fails_does_not_end_the_outer_one(database, store):
    async with order(database) as outer:
        with pytest.raises(Sorry):
            async with order(database, reentrant=True):
                raise Sorry
        assert await sync_to_async(add)(database) == outer.token
    assert await in_database(committed, database) == {"a"}


async def test_cancelled_request_keeps_the_next_one_waiting_until_its_commit(database, store):
    slow = Slow(database)

    @locked("order", pk, using=database)
    async def view(request, pk):
        await sync_to_async(slow, thread_sensitive=False)()

    async def get_response(request):
        return await view(request, pk=42)

    request = asyncio.create_task(LockMiddleware(get_response)(RequestFactory().get("/")))
    await slow.wait_until_reached()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    next_one = asyncio.create_task(order(database).aacquire())
    await auntil(lambda: is_awaited(store))
    assert not next_one.done()
    await slow.finish()
    await (await next_one).arelease()
    assert await in_database(committed, database) == {"a"}


@pytest.mark.parametrize("again", [1, 2, 3])
async def test_release_is_finished_however_often_the_task_is_cancelled(database, redis_store, again):
    inside = asyncio.Event()

    async def work():
        async with order(database):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await inside.wait()
    for _ in range(again):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await asyncio.to_thread(is_held, redis_store)
