"""`async with lock(...)`: the lease lives in the task, its transactions in the threads that do the work."""

import asyncio
import contextlib
import contextvars
import threading
from uuid import uuid4

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.db import connections
from django.db.transaction import atomic
from django.test import RequestFactory, override_settings
from django.urls import clear_url_caches, path
from django.utils.decorators import async_only_middleware

from django_dlock import lock, locked, pk
from django_dlock.errors import AcquireTimeout, AlreadyHeld, BackendUnavailable, LeaseLost, StaleToken
from django_dlock.middleware import LockMiddleware
from django_dlock.models import Fence
from django_dlock.tie import current
from dlock_core.backend import Released, RenewalFailure
from tests.chaos import EverybodyIn
from tests.django_dlock.sessions import committed
from tests.leases import is_held
from tests.testapp.models import Counter
from tests.waiting import auntil, until

WITHIN = 60.0


class Sorry(Exception):
    """Raised by user code."""


@pytest.fixture(autouse=True)
async def _connections_of_the_worker():
    """The thread that `sync_to_async` uses starts each test with new connections."""
    yield
    await sync_to_async(forget_connections)()
    assert current() == []


def forget_connections():
    for connection in connections.all(initialized_only=True):
        connection.close()
        del connections[connection.alias]


def order(database, **options):
    return lock("order", 42, using=database, **options)


def add(database, name="a"):
    with atomic(database):
        Counter.objects.using(database).create(name=name)
        return Fence.objects.using(database).filter(name="order:42").values_list("token", flat=True).first()


class Slow:
    """Work in a thread that stops at a point until it may go on."""

    def __init__(self, database, point="inside", name="a"):
        self.database, self.point, self.name = database, point, name
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.error = None
        self.over = threading.Event()

    def __call__(self):
        try:
            self.at("before")
            with atomic(self.database):
                Counter.objects.using(self.database).create(name=self.name)
                self.at("inside")
        except BaseException as error:
            self.error = error
            raise
        finally:
            connections[self.database].close()
            self.over.set()

    def at(self, point):
        if point == self.point:
            self.reached.set()
            self.go_on.wait(WITHIN)

    async def wait_until_reached(self):
        await asyncio.to_thread(self.reached.wait, WITHIN)

    async def finish(self):
        self.go_on.set()
        await asyncio.to_thread(self.over.wait, WITHIN)


async def in_database(function, *args):
    return await asyncio.to_thread(in_thread, function, args)


def in_thread(function, args):
    try:
        return function(*args)
    finally:
        connections.close_all()


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
    await auntil(lambda: waiters(store))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not waiters(store)
    other.now(lease.release)
    assert not is_held(store)


def waiters(store):
    return store._current("order:42").queue


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


@pytest.mark.parametrize("form", ["transaction", "lease", False])
async def test_work_that_goes_on_after_its_block_has_caught_a_timeout_is_refused(database, store, form):
    slow = Slow(database, "before")

    async def work():
        async with order(database, fence=form):
            started = asyncio.ensure_future(sync_to_async(slow, thread_sensitive=False)())
            await slow.wait_until_reached()
            try:
                await asyncio.wait_for(started, 0)
            except TimeoutError:
                return "try again later"

    assert await work() == "try again later"
    assert not is_held(store)
    await slow.finish()
    assert isinstance(slow.error, LeaseLost)
    assert "wait for it there" in str(slow.error)
    assert await in_database(committed, database) == set()
    await sync_to_async(add)(database, "the caller's own work")
    assert await in_database(committed, database) == {"the caller's own work"}


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
async def test_transaction_that_has_begun_when_its_block_has_caught_a_timeout_is_committed_under_the_lease(
    database, store
):
    slow = Slow(database)

    async def work():
        async with order(database):
            started = asyncio.ensure_future(sync_to_async(slow, thread_sensitive=False)())
            await slow.wait_until_reached()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(started, 0)

    await work()
    assert is_held(store)
    await slow.finish()
    assert slow.error is None
    assert not is_held(store)


class Twice(Slow):
    """Two transactions in a thread, of which only the first has begun when it may go on."""

    def __call__(self):
        try:
            with atomic(self.database):
                Counter.objects.using(self.database).create(name="a")
                self.at("inside")
            add(self.database, "b")
        except BaseException as error:
            self.error = error
            raise
        finally:
            connections[self.database].close()
            self.over.set()


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("form", ["transaction", "lease", False])
@pytest.mark.parametrize("ends", ["caught", "cancelled"])
async def test_second_transaction_of_a_thread_is_refused_if_the_first_one_has_outlived_the_block(
    database, store, form, ends
):
    slow = Twice(database)

    async def work():
        async with order(database, fence=form):
            started = asyncio.ensure_future(sync_to_async(slow, thread_sensitive=False)())
            await slow.wait_until_reached()
            if ends == "cancelled":
                asyncio.current_task().cancel()
                await started
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(started, 0)

    with pytest.raises(asyncio.CancelledError) if ends == "cancelled" else contextlib.nullcontext():
        await asyncio.create_task(work())
    assert is_held(store)
    await slow.finish()
    assert isinstance(slow.error, LeaseLost)
    assert not is_held(store)
    assert await in_database(committed, database) == {"a"}


def locking(slow, **options):
    """Return a function that takes the lock itself, and works in its block."""

    def work():
        with order(slow.database, **options):
            slow()

    return work


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("point", ["before", "inside"])
async def test_task_does_not_have_the_lease_of_a_function_for_which_it_has_stopped_waiting(database, store, point):
    # InnoDB locks the gaps beside a deleted row of the same name until it is purged, and with them other names.
    slow = Slow(database, point, name=f"slow {uuid4()}")
    started = asyncio.ensure_future(sync_to_async(locking(slow), thread_sensitive=False)())
    await slow.wait_until_reached()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(started, 0)
    for retry in (locking(Slow(database, "none"), wait=0), lambda: add_locked(database)):
        with pytest.raises(AcquireTimeout):
            await sync_to_async(in_thread, thread_sensitive=False)(retry, ())
    await sync_to_async(add)(database, "the caller's own work")
    assert is_held(store)
    await slow.finish()
    assert slow.error is None
    await asyncio.to_thread(until, lambda: not is_held(store))
    await sync_to_async(add)(database, "and more of it")
    assert await in_database(committed, database) == {slow.name, "the caller's own work", "and more of it"}


def add_locked(database):
    with atomic(database), order(database, wait=0):  # inside a transaction it would join a lease of its own
        add(database)


async def test_coroutine_that_a_function_of_a_thread_calls_has_its_lease(database, store):
    async def call():
        return await sync_to_async(add)(database)

    def work():
        with order(database) as lease:
            assert async_to_sync(call)() == lease.token

    await sync_to_async(work)()
    assert not is_held(store)


@pytest.mark.parametrize("is_first", [True, False])
async def test_task_that_outlives_the_block_in_which_it_was_started_begins_no_transaction(database, store, is_first):
    go_on = asyncio.Event()

    async def background():
        if not is_first:
            await in_database(add, database, "first")
        await go_on.wait()
        await in_database(add, database, "late")

    async with order(database):
        task = asyncio.create_task(background())
        if not is_first:
            await in_database(until, lambda: committed(database) == {"first"})
    go_on.set()
    with pytest.raises(LeaseLost):
        await task
    assert await in_database(committed, database) == (set() if is_first else {"first"})


async def test_task_with_an_empty_context_may_outlive_the_block(database, store):
    async with order(database):
        task = asyncio.create_task(in_database(add, database), context=contextvars.Context())
    await task
    assert await in_database(committed, database) == {"a"}


@pytest.mark.parametrize("release", ["in_another_task", "in_a_thread"])
async def test_task_may_go_on_with_other_work_after_its_lease_was_released_elsewhere(database, store, release):
    lease = await order(database).aacquire()
    if release == "in_a_thread":
        await asyncio.to_thread(lease.release)
    else:
        await asyncio.create_task(lease.arelease())
    assert not is_held(store)
    await in_database(add, database)
    assert await in_database(committed, database) == {"a"}


@pytest.mark.parametrize("apart", [False, True], ids=["", "in a task"])
async def test_task_may_go_on_after_functions_of_threads_have_taken_and_released_a_lease(database, store, apart):
    for thread_sensitive in (True, False):
        lease = await sync_to_async(order(database).acquire, thread_sensitive=thread_sensitive)()
        release = sync_to_async(lease.release, thread_sensitive=thread_sensitive)()
        await (asyncio.shield(release) if apart else release)
        await in_database(add, database, f"{thread_sensitive}")
    assert await in_database(committed, database) == {"True", "False"}


async def test_write_without_a_transaction_after_the_cancellation_is_refused(database, store):
    class SlowWrite(Slow):
        def __call__(self):
            try:
                self.at("before")
                Counter.objects.using(self.database).create(name="a")
            except BaseException as error:
                self.error = error
                raise
            finally:
                connections[self.database].close()
                self.over.set()

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
    await auntil(lambda: waiters(store))
    assert not next_one.done()
    await slow.finish()
    await (await next_one).arelease()
    assert await in_database(committed, database) == {"a"}


urlpatterns = []


async def test_client_that_goes_away_does_not_end_the_lease_before_the_commit(database, store, monkeypatch):
    """The request goes through Django's real ASGI handler, where every request has its own thread."""
    slow = Slow(database)

    @locked("order", pk, using=database)
    async def view(request, pk):
        try:
            await sync_to_async(slow)()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    cancelled = asyncio.Event()
    monkeypatch.setattr(f"{__name__}.urlpatterns", [path("ship/<int:pk>", view)])
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=["django_dlock.middleware.LockMiddleware"]):
        clear_url_caches()
        scope = {"type": "http", "method": "POST", "path": "/ship/42", "headers": [], "query_string": b""}
        client = ApplicationCommunicator(ASGIHandler(), scope)
        await client.send_input({"type": "http.request", "body": b""})
        await slow.wait_until_reached()
        await client.send_input({"type": "http.disconnect"})
        await asyncio.wait_for(cancelled.wait(), WITHIN)
        next_one = asyncio.create_task(order(database).aacquire())
        await auntil(lambda: waiters(store))
        assert not next_one.done()
        await slow.finish()
        await (await next_one).arelease()
        await client.wait(WITHIN)
    assert slow.error is None
    assert await in_database(committed, database) == {"a"}


MIDDLEWARE_LEFT = threading.Event()
LOCKS = "django_dlock.middleware.LockMiddleware"


@async_only_middleware
def noting_its_end(get_response):
    async def middleware(request):
        try:
            return await get_response(request)
        finally:
            MIDDLEWARE_LEFT.set()

    return middleware


@pytest.mark.parametrize("way", ["block", "acquire"])
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
async def test_client_that_goes_away_does_not_end_the_lease_of_a_thread_between_transactions(
    database, store, monkeypatch, way
):
    slow = Slow(database, "before")
    MIDDLEWARE_LEFT.clear()

    def view(request, pk):
        lease = order(database).acquire() if way == "acquire" else None
        (locking(slow) if way == "block" else slow)()
        if lease is not None:
            lease.release()

    monkeypatch.setattr(f"{__name__}.urlpatterns", [path("ship/<int:pk>", view)])
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[f"{__name__}.noting_its_end", LOCKS]):
        clear_url_caches()
        scope = {"type": "http", "method": "POST", "path": "/ship/42", "headers": [], "query_string": b""}
        client = ApplicationCommunicator(ASGIHandler(), scope)
        await client.send_input({"type": "http.request", "body": b""})
        await slow.wait_until_reached()
        await client.send_input({"type": "http.disconnect"})
        await asyncio.to_thread(MIDDLEWARE_LEFT.wait, WITHIN)
        next_one = asyncio.create_task(order(database).aacquire())
        await auntil(lambda: waiters(store))
        assert not next_one.done()
        await slow.finish()
        await (await next_one).arelease()
        await client.wait(WITHIN)
    assert slow.error is None
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
