"""Who has left a lease: however it was released, work that goes on is refused, its owner is not, and joined blocks last."""

import asyncio
import contextlib
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections
from django.db.transaction import atomic
from django.http import HttpResponse
from django.test import RequestFactory

from django_dlock import lock, ownership
from django_dlock.errors import AcquireTimeout, LeaseLost
from django_dlock.middleware import LockMiddleware
from django_dlock.tie import current
from django_dlock.tracker import leases_of_context
from tests.django_dlock.sessions import committed
from tests.django_dlock.thread_work import Slow, add, in_database, in_thread, order
from tests.garbage import collect_garbage
from tests.leases import is_held
from tests.testapp.models import Counter
from tests.waiting import WITHIN, auntil

pytestmark = pytest.mark.usefixtures("_connections_of_the_worker")


def start(slow):
    """Start a function of a thread that is at work when its caller goes on, as after a time limit."""
    return asyncio.create_task(sync_to_async(slow, thread_sensitive=False)())


async def acquired_in_a_thread(wanted):
    return await sync_to_async(wanted.acquire)()


async def released_in_two_steps(lease):
    released = lease.arelease()
    await asyncio.sleep(0)
    await released


ACQUIRES = {"task": lambda wanted: wanted.aacquire(), "thread": acquired_in_a_thread}
RELEASES = {
    "plain": lambda lease: lease.arelease(),
    "shield": lambda lease: asyncio.shield(lease.arelease()),
    "wait_for": lambda lease: asyncio.wait_for(lease.arelease(), WITHIN),
    "gather": lambda lease: asyncio.gather(lease.arelease()),
    "task": lambda lease: asyncio.create_task(lease.arelease()),
    "thread": lambda lease: sync_to_async(lease.release)(),
    "any thread": lambda lease: sync_to_async(in_thread, thread_sensitive=False)(lease.release, ()),
    "called back": lambda lease: sync_to_async(async_to_sync(lease.arelease))(),
    "later": released_in_two_steps,
}


@pytest.mark.parametrize("acquire", ACQUIRES)
@pytest.mark.parametrize("release", RELEASES)
async def test_work_that_goes_on_is_refused_and_its_owner_is_not_however_the_lease_was_released(
    database, store, acquire, release
):
    slow = Slow(database, "before")
    lease = await ACQUIRES[acquire](order(database))
    task = start(slow)
    await slow.wait_until_reached()
    await RELEASES[release](lease)
    assert not is_held(store)
    await slow.finish()
    with pytest.raises(LeaseLost, match="wait for it there"):
        await task
    await sync_to_async(add)(database, "the owner's own")
    await asyncio.create_task(in_database(add, database, "and of its next task"))
    assert await in_database(committed, database) == {"the owner's own", "and of its next task"}


@pytest.mark.parametrize("release", ["plain", "shield"])
async def test_work_that_goes_on_is_refused_after_the_release_of_several_locks(database, store, release):
    slow = Slow(database, "before")
    leases = await lock(order(database), lock("invoice", 7, using=database)).aacquire()
    task = start(slow)
    await slow.wait_until_reached()
    await RELEASES[release](leases)
    await slow.finish()
    with pytest.raises(LeaseLost):
        await task
    await sync_to_async(add)(database)


async def test_lease_holds_until_the_release_that_was_asked_for_is_done(database, store):
    lease = await order(database).aacquire()
    release = lease.arelease()
    assert await in_database(add, database) == lease.token
    joined = await order(database, reentrant=True).aacquire()
    await release
    assert is_held(store)
    slow = Slow(database, "before")
    task = start(slow)
    await slow.wait_until_reached()
    await joined.arelease()
    await slow.finish()
    with pytest.raises(LeaseLost):
        await task


def sync_only(get_response):
    def middleware(request):
        return get_response(request)

    return middleware


@pytest.mark.parametrize("is_behind_sync_middleware", [False, True])
async def test_work_that_goes_on_is_refused_after_its_request_has_ended_the_lease(
    database, store, is_behind_sync_middleware
):
    slow, tasks = Slow(database, "before"), []

    async def view(request):
        leases.append(await order(database).aacquire())
        tasks.append(start(slow))
        await slow.wait_until_reached()
        return HttpResponse()

    leases = []
    inner = sync_to_async(sync_only(async_to_sync(view))) if is_behind_sync_middleware else view
    await LockMiddleware(inner)(RequestFactory().get("/"))
    assert not is_held(store)
    await slow.finish()
    with pytest.raises(LeaseLost):
        await tasks[0]


@pytest.mark.parametrize("join", ACQUIRES)
@pytest.mark.parametrize("release", ["plain", "shield", "thread"])
async def test_handle_that_has_joined_in_any_way_keeps_the_lease_when_the_first_one_is_released(
    database, store, join, release
):
    first = await order(database).aacquire()
    joined = await ACQUIRES[join](order(database, reentrant=True))
    await RELEASES[release](first)
    assert await in_database(add, database, "under the lease") == joined.token
    slow = Slow(database, "before")
    task = start(slow)
    await slow.wait_until_reached()
    await RELEASES[release](joined)
    assert not is_held(store)
    await sync_to_async(add)(database, "afterwards")
    await slow.finish()
    with pytest.raises(LeaseLost):
        await task


@contextlib.contextmanager
def by_hand(wanted):
    lease = wanted.acquire()
    try:
        yield lease
    finally:
        lease.release()


@contextlib.asynccontextmanager
async def by_hand_async(wanted):
    lease = await wanted.aacquire()
    try:
        yield lease
    finally:
        await lease.arelease()


def joining(database, joins, inside, go_on, errors):
    """Work in a thread under a handle that has joined the lease."""
    try:
        with joins(order(database, reentrant=True)) as lease:
            inside.set()
            go_on.wait(WITHIN)
            assert add(database, "under the joined handle") == lease.token
    except BaseException as error:
        errors.append(error)
        raise
    finally:
        connections.close_all()


class Background:
    """Work that a view starts under its lease, and that has joined it."""

    def __init__(self, database, joins):
        self.errors, self.inside, self.go_on = [], threading.Event(), threading.Event()
        self.work = (database, joins, self.inside, self.go_on, self.errors)

    def start(self):
        run = contextvars.copy_context().run
        self.thread = threading.Thread(target=run, args=(joining, *self.work))
        self.thread.start()
        assert self.inside.wait(WITHIN)

    def finish(self):
        self.go_on.set()
        self.thread.join(WITHIN)
        assert not self.errors


def leaves_a_block(database, background):
    with order(database):
        background.start()


def leaves_a_transaction(database, background):
    with atomic(database):
        order(database).acquire()
        Counter.objects.using(database).create(name="a")
        background.start()


def forgets(database, background):
    forgotten.append(order(database).acquire())
    background.start()


forgotten = []


@pytest.mark.parametrize("view", [leaves_a_block, leaves_a_transaction, forgets])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("joins", [lambda wanted: wanted, by_hand], ids=["block", "by hand"])
async def test_request_ends_no_lease_that_its_background_work_has_joined(
    database, store, view, is_async, joins, caplog
):
    background = Background(database, joins)

    def sync_view(request):
        view(database, background)
        connections.close_all()
        return HttpResponse()

    async def async_view(request):
        return await sync_to_async(sync_view, thread_sensitive=False)(request)

    forgotten.clear()
    if is_async:
        await LockMiddleware(async_view)(RequestFactory().get("/"))
    else:
        await asyncio.to_thread(LockMiddleware(sync_view), RequestFactory().get("/"))
    assert ("without releasing" in caplog.text) == (view is forgets)
    assert is_held(store)
    await asyncio.to_thread(background.finish)
    assert not is_held(store)
    assert "under the joined handle" in await in_database(committed, database)


@pytest.mark.parametrize("release", ["plain", "shield", "thread"])
@pytest.mark.parametrize("acquire", ACQUIRES)
@pytest.mark.parametrize("joins", [lambda wanted: wanted, by_hand_async], ids=["block", "by hand"])
async def test_owner_that_has_released_is_apart_from_another_task_that_has_joined(
    database, store, acquire, release, joins, caplog
):
    """It waits for that task like any other, and its writes outside a transaction are not refused."""
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def background():
        async with joins(order(database, reentrant=True)) as lease:
            inside.set()
            await go_on.wait()
            assert await in_database(add, database, "under the joined handle") == lease.token

    async def view(request):
        lease = await ACQUIRES[acquire](order(database))
        tasks.append(asyncio.create_task(background()))
        await inside.wait()
        await RELEASES[release](lease)
        assert current() == []
        await Counter.objects.using(database).acreate(name="the owner's own")
        for again in (order(database, wait=0), order(database, wait=0, reentrant=True)):
            with pytest.raises(AcquireTimeout):
                await again.aacquire()
            with pytest.raises(AcquireTimeout):
                await sync_to_async(acquire_in_a_transaction)(database, again)
        return HttpResponse()

    tasks = []
    await LockMiddleware(view)(RequestFactory().get("/"))
    assert "without releasing" not in caplog.text
    assert is_held(store)
    go_on.set()
    await tasks[0]
    assert not is_held(store)


async def test_function_that_calls_a_coroutine_to_release_goes_on_beside_work_that_has_joined(database, store):
    def work():
        ownership._changes.set(())
        lease = order(database).acquire()
        background.start()
        async_to_sync(lease.arelease)()
        assert current() == []
        background.finish()
        add(database, "the function's own")

    background = Background(database, lambda wanted: wanted)
    await sync_to_async(in_thread, thread_sensitive=False)(work, ())
    assert await in_database(committed, database) == {"under the joined handle", "the function's own"}


def acquire_in_a_transaction(database, wanted):
    with atomic(database):
        wanted.acquire()


@pytest.mark.parametrize("release", ["shield", "task", "wait_for"])
async def test_owner_that_asked_for_its_release_waits_for_a_transaction_that_is_still_open(database, store, release):
    slow = Slow(database, "inside")
    lease = await order(database).aacquire()
    task = start(slow)
    await slow.wait_until_reached()
    await RELEASES[release](lease)
    with pytest.raises(AcquireTimeout):
        await order(database, wait=0).aacquire()
    await slow.finish()
    await task
    await (await order(database).aacquire()).arelease()


def in_a_loop(lease):
    asyncio.run(released_elsewhere(lease))


async def released_elsewhere(lease):
    await asyncio.create_task(lease.arelease())


def in_a_pool(lease):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(contextvars.copy_context().run, lease.release).result(WITHIN)


@pytest.mark.parametrize("release", [in_a_loop, in_a_pool])
async def test_function_whose_lease_another_flow_has_released_goes_on(database, store, release):
    def work():
        release(order(database).acquire())
        add(database, "a")
        with order(database):
            add(database, "b")

    await asyncio.to_thread(in_thread, work, ())
    assert await in_database(committed, database) == {"a", "b"}


async def in_a_group(release):
    async with asyncio.TaskGroup() as group:
        group.create_task(release())


STEPS = {
    "await": lambda release: release(),
    "gather": lambda release: asyncio.gather(release()),
    "wait_for": lambda release: asyncio.wait_for(release(), WITHIN),
    "group": in_a_group,
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("is_in_a_thread", [False, True])
async def test_function_goes_on_after_a_coroutine_that_it_calls_has_released_its_lease(
    database, store, step, is_in_a_thread
):
    """In a step in a thread, which is the one in which the function waits, or in a task."""
    slow = Slow(database, "before")

    def work():
        lease = order(database).acquire()
        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(contextvars.copy_context().run, slow)
            assert slow.reached.wait(WITHIN)
            try:
                async_to_sync(main)(lease)
                add(database, "the function's own")
                with order(database):
                    add(database, "and under its next lease")
            finally:
                slow.go_on.set()
            return working.exception(WITHIN)

    async def main(lease):
        await STEPS[step](sync_to_async(lease.release) if is_in_a_thread else lease.arelease)

    error = await asyncio.to_thread(in_thread, work, ())
    assert {"the function's own", "and under its next lease"} <= await in_database(committed, database)
    if step == "await":  # Otherwise a task has released it, perhaps one of several that shared the work.
        assert isinstance(error, LeaseLost)


async def test_task_whose_lease_another_task_releases_goes_on_and_so_do_its_other_tasks(database, store):
    """A dispatcher acquires, and its workers release: the second has the lease of the first in its context."""
    go_on = [asyncio.Event(), asyncio.Event()]

    async def work(number, lease):
        await go_on[number].wait()
        await in_database(add, database, f"{number}")
        await lease.arelease()

    tasks = []
    for number in range(2):
        lease = await lock("message", number, using=database).aacquire()
        tasks.append(asyncio.create_task(work(number, lease)))
    for number, task in enumerate(tasks):
        go_on[number].set()
        await task
        await sync_to_async(add)(database, f"the dispatcher's own after {number}")
    written = {"0", "1", "the dispatcher's own after 0", "the dispatcher's own after 1"}
    assert await in_database(committed, database) == written


@pytest.mark.parametrize("ends", ["block", "transaction"])
async def test_work_that_a_function_of_a_thread_has_started_elsewhere_does_not_outlive_its_lease(database, store, ends):
    loop, slow = asyncio.get_running_loop(), Slow(database, "before")
    block = contextlib.nullcontext if ends == "block" else lambda: atomic(database)

    async def background():
        await sync_to_async(slow, thread_sensitive=False)()

    def work():
        with block(), order(database):
            futures.append(asyncio.run_coroutine_threadsafe(background(), loop))
            slow.reached.wait(WITHIN)
        add(database, "the function's own")

    futures = []
    await sync_to_async(in_thread, thread_sensitive=False)(work, ())
    assert not is_held(store)
    await slow.finish()
    with pytest.raises(LeaseLost):
        await asyncio.wrap_future(futures[0])
    await sync_to_async(add)(database, "the caller's own")
    assert await in_database(committed, database) == {"the function's own", "the caller's own"}


async def test_join_that_is_cancelled_releases_the_lease_that_its_owner_has_left_meanwhile(database, store):
    busy, go_on = threading.Event(), threading.Event()

    def occupy():
        busy.set()
        go_on.wait(WITHIN)

    async def join():
        async with order(database, reentrant=True):
            raise AssertionError("it was cancelled before")

    async with order(database) as lease:
        occupying = asyncio.create_task(sync_to_async(occupy)())  # the thread in which the join ends
        await asyncio.to_thread(busy.wait, WITHIN)
        joining = asyncio.create_task(join())
        await auntil(lambda: len(lease._tied.tie.handles) == 2)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert not is_held(store)
    go_on.set()
    await occupying


async def test_handles_that_have_joined_and_were_released_are_not_kept(store):
    handles = []
    async with lock("order", 42, fence=False):
        for _ in range(20):
            handles.append(await lock("order", 42, fence=False, reentrant=True).aacquire())
            await handles[-1].arelease()
        assert len(ownership._joined.get()) == 1


async def test_work_that_goes_on_is_refused_after_both_handles_were_released_side_by_side(database, store):
    slow = Slow(database, "before")
    first = await order(database).aacquire()
    joined = await order(database, reentrant=True).aacquire()
    task = start(slow)
    await slow.wait_until_reached()
    await asyncio.gather(first.arelease(), joined.arelease())
    assert not is_held(store)
    await slow.finish()
    with pytest.raises(LeaseLost):
        await task
    await sync_to_async(add)(database)


def test_releases_of_coroutines_that_a_worker_calls_are_not_kept(store):
    async def job(number):
        lease = await lock("job", number, fence=False).aacquire()
        await asyncio.shield(lease.arelease())

    for number in range(20):
        async_to_sync(job)(number)
    assert len(ownership._changes.get()) <= 2  # of the last job, and of that before, which it has inherited
    assert len(leases_of_context.get()) <= 1


@pytest.mark.parametrize("release", ["shield", "thread"])
async def test_releases_by_others_are_not_kept(store, release):
    for number in range(20):
        lease = await lock("order", number, fence=False).aacquire()
        other = await lock("invoice", number, fence=False).aacquire()
        await RELEASES[release](lease)
        await other.arelease()
    assert len(ownership._changes.get()) <= 2  # of the last job, and of that before, which it has inherited


@pytest.mark.parametrize("release", RELEASES)
async def test_task_that_is_started_after_the_release_goes_on_whatever_its_owner_calls(database, store, release):
    go_on = asyncio.Event()

    async def notify():
        await go_on.wait()
        await in_database(add, database)

    lease = await order(database).aacquire()
    await RELEASES[release](lease)
    task = asyncio.create_task(notify())
    await sync_to_async(bool)()
    await lease.arelease()
    go_on.set()
    await task


async def test_work_that_goes_on_is_refused_after_a_function_has_released_in_its_transaction(database, store):
    def ship():
        with atomic(database):
            Counter.objects.using(database).create(name="a")
            lease.release()

    slow = Slow(database, "before")
    lease = await order(database).aacquire()
    task = start(slow)
    await slow.wait_until_reached()
    await sync_to_async(in_thread)(ship, ())
    assert not is_held(store)
    await slow.finish()
    with pytest.raises(LeaseLost):
        await task
    await sync_to_async(add)(database, "the owner's own")


class Joined:
    """A task of the owner's that has joined the lease until it may release it."""

    def __init__(self, database):
        self.database, self.joined, self.go_on = database, asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self.work())

    async def work(self):
        async with order(self.database, reentrant=True):
            self.joined.set()
            await self.go_on.wait()

    async def finish(self):
        self.go_on.set()
        await self.task


async def test_work_that_goes_on_is_refused_although_another_task_has_joined_after_the_owners_release(database, store):
    lease = await order(database).aacquire()
    first = Joined(database)
    await first.joined.wait()
    slow, copy = Slow(database, "before"), contextvars.copy_context()
    working = start(slow)
    await slow.wait_until_reached()
    await lease.arelease()
    second = copy.run(Joined, database)
    await second.joined.wait()
    await first.finish()
    await second.finish()
    assert not is_held(store)
    await slow.finish()
    with pytest.raises(LeaseLost):
        await working


def release_the_others(dropped):
    handles = [lock("order", 1, reentrant=True).acquire() for _ in range(3)]
    cycle = [handles.pop(dropped)]
    cycle.append(cycle)  # As with an error's traceback: the references to the handle die before it is finalized.
    del cycle
    collect_garbage()
    for handle in handles:
        handle.release()
    assert not leases_of_context.get()


@pytest.mark.parametrize("dropped", range(3))
def test_lease_is_released_although_one_of_its_handles_was_dropped(store, dropped):
    contextvars.Context().run(release_the_others, dropped)  # Outside of a request, nothing keeps the handle.
    assert not is_held(store, "order:1")


def in_later_thread_of_number(number, function):
    """Run a function in a thread that has the number of one that has ended; return its result."""
    answers = []

    def run():
        if threading.get_ident() == number:
            answers.append(in_thread(function, ()))

    for _ in range(1000):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if answers:
            return answers[0]
    pytest.skip("the system gave the number of a thread to none of a thousand later ones")


def test_later_thread_that_has_the_number_of_the_owners_is_refused(database, store):
    def own():
        with order(database):
            copies.append(contextvars.copy_context())
        return threading.get_ident()

    def work():
        try:
            copies[0].run(add, database)
        except LeaseLost:
            return "refused"
        return "written"

    copies = []
    with ThreadPoolExecutor(1) as threads:
        number = threads.submit(in_thread, own, ()).result()
    assert in_later_thread_of_number(number, work) == "refused"
    assert committed(database) == set()


def test_work_in_another_thread_does_not_outlive_a_handle_that_was_dropped_and_its_own_thread_goes_on(database, store):
    def drop_its_handle():
        lease = order(database).acquire()
        copies.append(contextvars.copy_context())
        with pytest.warns(ResourceWarning):
            del lease

    copies = []
    contextvars.Context().run(drop_its_handle)
    with ThreadPoolExecutor(1) as threads, pytest.raises(LeaseLost):
        threads.submit(in_thread, copies[0].run, (add, database)).result()
    copies[0].run(add, database, "the thread's own")
    assert committed(database) == {"the thread's own"}


def test_transaction_that_began_in_a_copied_context_of_the_thread_is_joined_after_the_release(database, store):
    lease, block = order(database).acquire(), atomic(database)
    contextvars.copy_context().run(block.__enter__)
    contextvars.copy_context().run(add, database)
    lease.release()
    again = order(database, wait=0).acquire()
    assert again.token == lease.token
    again.release()
    block.__exit__(None, None, None)
    assert not is_held(store)


def test_release_inside_a_transaction_is_not_kept_after_it(database, store):
    lease = order(database).acquire()
    with atomic(database):
        add(database)
        lease.release()
        assert is_held(store)
    assert not is_held(store)
    assert ownership._changes.get() == ()


async def test_lease_that_a_coroutine_releases_for_a_function_lasts_as_long_as_any_of_its_transactions(
    database, store, use_database
):
    async def release(lease):
        await lease.arelease()

    def work():
        lease = order(database).acquire()
        with atomic(database):
            add(database)
            with atomic("other"):
                add("other")
                async_to_sync(release)(lease)
            again = order(database, wait=0).acquire()
            assert again.token == lease.token
            again.release()

    await sync_to_async(use_database)("other")
    await sync_to_async(in_thread, thread_sensitive=False)(work, ())
    assert not is_held(store)
