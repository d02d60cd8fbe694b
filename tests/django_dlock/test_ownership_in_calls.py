"""Who has left a lease that functions and coroutines acquire, join or release for each other, perhaps more than once."""

import asyncio
import contextlib
import contextvars
import itertools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections
from django.db.models import F
from django.db.transaction import atomic
from django.http import HttpResponse
from django.test import RequestFactory

from django_dlock import lock
from django_dlock.errors import LeaseLost, StaleToken
from django_dlock.middleware import LockMiddleware
from django_dlock.models import Fence
from django_dlock.tie import current
from dlock_core.runtime import ASYNCIO
from tests.django_dlock.thread_work import Slow, add, in_database, in_thread, order, until_it_waits_no_more
from tests.garbage import collect_garbage
from tests.leases import is_held
from tests.waiting import WITHIN, auntil

pytestmark = pytest.mark.usefixtures("_connections_of_the_worker")


numbers = itertools.count()


def write(database):
    """Write in a transaction; return the token that the fence has then."""
    return add(database, f"{next(numbers)}")


@contextlib.asynccontextmanager
async def working_until_the_end(database):
    """Start a function of a thread that goes on after the block, where it must be refused."""
    slow = Slow(database, "before", name="refused")
    task = asyncio.create_task(sync_to_async(slow, thread_sensitive=False)())
    await slow.wait_until_reached()
    try:
        yield
    finally:
        await slow.finish()
        await asyncio.wait([task])
    assert isinstance(task.exception(), LeaseLost)


async def plainly(lease):
    await lease.arelease()


async def shielded(lease):
    await asyncio.shield(lease.arelease())


async def in_a_function(lease):
    await sync_to_async(lease.release)()


async def in_a_called_function(lease):
    await sync_to_async(async_to_sync(lease.arelease))()


WAYS = [plainly, shielded, in_a_function, in_a_called_function]


@contextlib.asynccontextmanager
async def acquired(wanted, release):
    lease = await wanted.aacquire()
    yield lease
    await release(lease)


@pytest.mark.parametrize("release", [None, *WAYS])
async def test_work_that_was_started_when_its_owner_had_joined_again_does_not_outlive_the_lease(
    database, store, release
):
    lease = await order(database).aacquire()
    asked = asyncio.create_task(lease.arelease())  # It runs when this task waits, in the join.
    again, working = order(database, reentrant=True), working_until_the_end(database)
    async with again if release is None else acquired(again, release):
        await working.__aenter__()
    await asked
    assert not is_held(store)
    await sync_to_async(write)(database)
    await working.__aexit__(None, None, None)


async def mail(database, release):
    await release(await lock("mail", 1, using=database).aacquire())


def calls_another_function(lease, call):
    async def inner():
        await sync_to_async(lease.release)()

    async_to_sync(inner)()
    call()


def releases_and_calls(lease, call):
    lease.release()
    call()


@pytest.mark.parametrize("inside", WAYS)
@pytest.mark.parametrize("function", [calls_another_function, releases_and_calls])
async def test_owner_learns_of_a_release_whatever_the_function_calls_afterwards(database, store, inside, function):
    lease = await order(database).aacquire()
    async with working_until_the_end(database):
        await sync_to_async(function)(lease, lambda: async_to_sync(mail)(database, inside))
        assert not is_held(store)
        await sync_to_async(write)(database)


@pytest.mark.parametrize("function", [calls_another_function, releases_and_calls])
async def test_owner_learns_of_a_release_in_a_transaction_of_the_function(database, store, function):
    def in_a_transaction():
        with atomic(database):
            write(database)
            function(lease, lambda: None)

    lease = await order(database).aacquire()
    async with working_until_the_end(database):
        await sync_to_async(in_a_transaction)()
        assert not is_held(store)
        await sync_to_async(write)(database)


@pytest.mark.parametrize("wanted", ["one", "several"])
@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
async def test_task_that_was_started_after_a_release_goes_on_after_another_one(database, store, wanted, first, second):
    """A view releases early, starts a task, and releases in its `finally` whatever happens."""
    go_on = asyncio.Event()

    async def notify():
        await go_on.wait()
        await in_database(write, database)

    one = order(database)
    lease = await (one if wanted == "one" else lock(one, lock("invoice", 7, using=database))).aacquire()
    await first(lease)
    task = asyncio.create_task(notify())
    await second(lease)
    go_on.set()
    await task


def by_a_block(database, release):
    del release
    with order(database):
        write(database)


def by_hand(database, release):
    lease = order(database).acquire()
    async_to_sync(release)(lease)


async def a_block(database, release):
    del release
    async with order(database):
        await sync_to_async(write)(database)


async def a_coroutine(database, release):
    await release(await order(database).aacquire())


def by(coroutine):
    return async_to_sync(coroutine)


TAKES = {"block": by_a_block, "hand": by_hand, "coroutine's block": by(a_block), "coroutine": by(a_coroutine)}


@pytest.mark.parametrize("first", TAKES)
@pytest.mark.parametrize("second", TAKES)
@pytest.mark.parametrize("release", WAYS)
def test_transaction_joins_the_lease_that_its_own_coroutines_have_released(database, store, first, second, release):
    """The lease lasts until COMMIT, so a second acquire of the same transaction must not wait for it."""
    with atomic(database):
        TAKES[first](database, release)
        TAKES[second](database, release)
        assert is_held(store)
    assert not is_held(store)
    assert current() == []


@pytest.mark.parametrize("release", WAYS)
def test_coroutine_joins_again_the_lease_of_its_callers_transaction(database, store, release):
    async def twice():
        for _ in range(2):
            await release(await order(database).aacquire())

    with atomic(database):
        async_to_sync(twice)()
        assert is_held(store)
    assert not is_held(store)


@pytest.mark.parametrize("release", WAYS)
def test_transaction_joins_an_earlier_lease_that_a_coroutine_has_released_inside(database, store, release):
    async def main():
        await release(lease)

    lease = order(database).acquire()
    with atomic(database):
        write(database)
        async_to_sync(main)()
        assert is_held(store)
        with order(database):
            write(database)
    assert not is_held(store)


@pytest.mark.parametrize("again", [lambda lease: lease.release(), None], ids=["release", "block"])
def test_thread_that_was_started_after_a_block_goes_on_after_the_next_one_of_its_transaction(database, store, again):
    go_on, errors = threading.Event(), []

    def work():
        go_on.wait(WITHIN)
        try:
            in_thread(write, (database,))
        except Exception as error:
            errors.append(error)

    with atomic(database):
        lease = order(database).acquire()
        lease.release()
        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
        thread.start()
        if again is None:
            with order(database):
                pass
        else:
            again(lease)
    go_on.set()
    thread.join(WITHIN)
    assert errors == []


async def a_view(request):
    async with lock("inner", 1):
        return HttpResponse()


async def test_owner_that_has_released_goes_on_after_a_request_that_it_makes_itself(database, store):
    lease = await order(database).aacquire()
    await sync_to_async(write)(database)
    await asyncio.shield(lease.arelease())
    await LockMiddleware(a_view)(RequestFactory().get("/"))
    await sync_to_async(write)(database)


@pytest.mark.parametrize("release", WAYS)
def test_function_that_has_released_goes_on_after_a_request_that_it_makes_itself(database, store, release):
    lease = order(database).acquire()
    async_to_sync(release)(lease)
    async_to_sync(LockMiddleware(a_view))(RequestFactory().get("/"))
    write(database)


async def test_task_whose_lease_was_collected_in_a_cycle_is_refused_once_at_most(database, store):
    async def forget():
        holder = [await order(database).aacquire()]
        holder.append(holder)

    async def whole():
        with pytest.warns(ResourceWarning, match="never released") as warned:  # noqa: PT031
            await forget()
            # The collector may be faster, and the thread that has called the database may still have the lease.
            await auntil(lambda: collect_garbage() or len(warned) > 0)
        with contextlib.suppress(LeaseLost):
            await sync_to_async(write)(database)
        for is_sensitive in (True, False):
            await sync_to_async(in_thread, thread_sensitive=is_sensitive)(write, (database,))

    await asyncio.create_task(whole(), context=contextvars.Context())  # A request would keep the lease.


class SlowStore:
    """Holds each release until it may go on."""

    def __init__(self, store, monkeypatch):
        self.asked, self.go_on, self.release = threading.Event(), threading.Event(), store.release
        monkeypatch.setattr(store, "release", self.slowly)

    async def slowly(self, runtime, *args):
        self.asked.set()
        if runtime is ASYNCIO:
            await asyncio.to_thread(self.go_on.wait, WITHIN)
        else:
            self.go_on.wait(WITHIN)
        return await self.release(runtime, *args)

    @contextlib.asynccontextmanager
    async def releasing(self, release):
        """Let a task release in the block, which is entered when the store was asked to."""
        task = asyncio.ensure_future(release)
        try:
            await asyncio.to_thread(self.asked.wait, WITHIN)
            yield
        finally:
            self.go_on.set()
            await task


class SlowWriter(Slow):
    token = None

    def work(self):
        self.at("before")
        with atomic(self.database):
            self.token = write(self.database)
            self.at("inside")


def raise_token(database):
    Fence.objects.using(database).filter(name="order:42").update(token=F("token") + 1)


async def owner(wanted, slow, release, started):
    """Acquire, start work in a thread, and release."""
    if release is None:
        async with wanted as lease:
            task = asyncio.create_task(sync_to_async(slow, thread_sensitive=False)())
            await slow.wait_until_reached()
            started.set_result((lease.token, task))
    else:
        lease = await wanted.aacquire()
        task = asyncio.create_task(sync_to_async(slow, thread_sensitive=False)())
        await slow.wait_until_reached()
        started.set_result((lease.token, task))
        await release(lease)


@pytest.mark.parametrize("release", [None, *WAYS])
async def test_work_that_begins_while_the_store_is_asked_to_release_is_refused_or_fenced(
    database, store, monkeypatch, release
):
    slow, started = SlowWriter(database, "before"), asyncio.get_running_loop().create_future()
    slow_store = SlowStore(store, monkeypatch)
    async with slow_store.releasing(owner(order(database), slow, release, started)):
        token, task = await started
        await slow.finish()
        await asyncio.wait([task])
        assert slow.token == token or isinstance(slow.error, LeaseLost)


@pytest.mark.parametrize("release", [None, *WAYS])
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
async def test_work_that_begins_while_the_store_is_asked_to_release_never_commits_over_a_newer_holder(
    database, store, monkeypatch, release
):
    slow, started = SlowWriter(database, "before"), asyncio.get_running_loop().create_future()
    slow_store = SlowStore(store, monkeypatch)
    async with slow_store.releasing(owner(order(database, fence="lease"), slow, release, started)):
        _, task = await started
        slow.point = "inside"
        slow.reached.clear()
        slow.go_on.set()
        slow.go_on = threading.Event()
        await asyncio.wait([task, asyncio.create_task(slow.wait_until_reached())], return_when=asyncio.FIRST_COMPLETED)
        slow.reached.set()  # It was refused before, perhaps.
        await in_database(raise_token, database)
        await slow.finish()
        await asyncio.wait([task])
        assert isinstance(slow.error, LeaseLost | StaleToken)


def goes_on(slow, lease):
    """Release, and work on while the other work of the lease's owner would begin a transaction."""
    lease.release()
    slow.go_on.set()
    slow.over.wait(WITHIN)


async def coroutine_goes_on(slow, lease):
    await lease.arelease()
    await slow.finish()


@pytest.mark.parametrize(
    "release",
    [
        sync_to_async(goes_on),
        sync_to_async(async_to_sync(coroutine_goes_on)),
    ],
    ids=["function", "coroutine"],
)
async def test_work_is_refused_as_soon_as_a_called_function_has_released_the_lease(database, store, release):
    slow = Slow(database, "before")
    lease = await order(database).aacquire()
    task = asyncio.create_task(sync_to_async(slow, thread_sensitive=False)())
    await slow.wait_until_reached()
    await release(slow, lease)
    with pytest.raises(LeaseLost):
        await task
    await sync_to_async(write)(database)


async def test_work_is_refused_as_soon_as_a_coroutine_has_released_the_lease_of_the_function_that_calls_it(
    database, store
):
    slow = Slow(database, "before")

    def work():
        lease = order(database).acquire()
        thread = threading.Thread(target=contextvars.copy_context().run, args=(suppressed, slow))
        thread.start()
        slow.reached.wait(WITHIN)
        async_to_sync(coroutine_goes_on)(slow, lease)
        thread.join(WITHIN)
        write(database)

    await asyncio.to_thread(in_thread, work, ())
    assert isinstance(slow.error, LeaseLost)


def suppressed(slow):
    with contextlib.suppress(LeaseLost):
        slow()


async def test_work_is_refused_after_a_function_has_released_although_its_caller_stops_waiting_for_it(database, store):
    slow, go_on = Slow(database, "before"), threading.Event()

    def release(give_up, lease):
        lease.release()
        give_up()
        go_on.wait(WITHIN)

    lease = await order(database).aacquire()
    task = asyncio.create_task(sync_to_async(slow, thread_sensitive=False)())
    await slow.wait_until_reached()
    await until_it_waits_no_more(release, lease)
    await slow.finish()
    with pytest.raises(LeaseLost):
        await task
    await sync_to_async(write)(database)
    await in_database(write, database)  # in a thread that is started afterwards
    go_on.set()


@pytest.mark.parametrize("release", [None, *WAYS])
async def test_function_for_which_its_caller_has_stopped_waiting_does_not_outlive_the_lease(database, store, release):
    slow = Slow(database, "before")

    def work(give_up):
        give_up()
        in_thread(slow, ())

    async with order(database) if release is None else acquired(order(database), release):
        await until_it_waits_no_more(work)
    assert not is_held(store)
    await slow.finish()
    assert isinstance(slow.error, LeaseLost)
    await sync_to_async(write)(database)


async def in_the_coroutine_that_has_stopped_waiting(lease, start, slow):
    async def work():
        await start
        await lease.arelease()
        await slow.finish()

    await sync_to_async(async_to_sync(work))()


async def in_the_function_that_calls_that_coroutine(lease, start, slow):
    async def work():
        await start

    def release():
        async_to_sync(work)()
        lease.release()
        async_to_sync(slow.finish)()

    await sync_to_async(release)()


@pytest.mark.parametrize(
    "release", [in_the_coroutine_that_has_stopped_waiting, in_the_function_that_calls_that_coroutine]
)
async def test_function_does_not_outlive_the_lease_of_an_owner_that_waits_for_who_has_stopped_waiting_for_it(
    database, store, release
):
    """A middleware takes the lock; the view, in a call of that, limits the time of a function and releases early."""
    slow = Slow(database, "before")

    def work(give_up):
        give_up()
        in_thread(slow, ())

    lease = await order(database).aacquire()
    await release(lease, until_it_waits_no_more(work), slow)
    assert not is_held(store)
    assert isinstance(slow.error, LeaseLost)
    await sync_to_async(write)(database)


async def test_thread_that_a_called_function_has_started_does_not_outlive_the_lease(database, store):
    slow = Slow(database, "before")

    def function():
        thread = threading.Thread(target=contextvars.copy_context().run, args=(suppressed, slow))
        thread.start()
        slow.reached.wait(WITHIN)
        lease.release()
        slow.go_on.set()
        thread.join(WITHIN)

    lease = await order(database).aacquire()
    await sync_to_async(function)()
    assert isinstance(slow.error, LeaseLost)
    await sync_to_async(write)(database)


async def limited_by_the_owner(start):
    await start


async def limited_in_a_call_of_the_owner(start):
    await sync_to_async(async_to_sync(limited_by_the_owner))(start)


async def limited_two_calls_further_in(start):
    await sync_to_async(async_to_sync(limited_in_a_call_of_the_owner))(start)


@pytest.mark.parametrize(
    "limited", [limited_by_the_owner, limited_in_a_call_of_the_owner, limited_two_calls_further_in]
)
@pytest.mark.parametrize("other", ["task", "function"])
async def test_work_is_refused_after_a_function_for_which_nobody_waits_has_released_the_lease(
    database, store, limited, other
):
    """A service releases in its `finally`, after the time limit of the view that has called it."""
    slow, late, over = Slow(database, "before"), threading.Event(), threading.Event()

    def service(give_up):
        try:
            give_up()
            late.wait(WITHIN)
        finally:
            lease.release()
            over.set()

    def work(give_up):
        give_up()
        in_thread(slow, ())

    lease = await order(database).aacquire()
    started = asyncio.create_task(sync_to_async(slow, thread_sensitive=False)()) if other == "task" else None
    if started is None:
        await limited(until_it_waits_no_more(work))
    await slow.wait_until_reached()
    await limited(until_it_waits_no_more(service))
    late.set()
    await asyncio.to_thread(over.wait, WITHIN)
    assert not is_held(store)
    await slow.finish()
    if started is not None:
        await asyncio.gather(started, return_exceptions=True)
    assert isinstance(slow.error, LeaseLost)
    await sync_to_async(write)(database)


@pytest.mark.parametrize("limited", [limited_by_the_owner, limited_in_a_call_of_the_owner])
async def test_function_for_which_nobody_waits_is_refused_after_it_was_the_last_to_leave_a_block(
    database, store, limited
):
    slow = Slow(database, "before")

    def work(give_up):
        give_up()
        with order(database, reentrant=True):
            joined.set()
            go_on.wait(WITHIN)
            write(database)
        in_thread(slow, ())

    joined, go_on = threading.Event(), threading.Event()
    async with order(database):
        await limited(until_it_waits_no_more(work))
        await asyncio.to_thread(joined.wait, WITHIN)
    go_on.set()
    await slow.wait_until_reached()
    assert not is_held(store)
    await slow.finish()
    assert isinstance(slow.error, LeaseLost)
    await sync_to_async(write)(database)


async def joined_again_by_a_task(database, leave):
    lease = await order(database).aacquire()
    await leave.give_up()
    again = await order(database, reentrant=True).aacquire()
    await lease.arelease()
    await leave.finish()
    await again.arelease()


async def joined_again_in_a_transaction(database, leave):
    def view():
        with atomic(database):
            with order(database):
                async_to_sync(leave.give_up)()
            with order(database, reentrant=True):
                async_to_sync(leave.finish)()

    await sync_to_async(view)()


class Leave:
    """A function that is given up inside a block that it has joined, leaves it later, and then writes."""

    def __init__(self, database, release):
        self.database, self.release = database, release
        self.joined, self.go_on, self.left = threading.Event(), threading.Event(), threading.Event()
        self.slow = Slow(database, "before")

    async def give_up(self):
        await until_it_waits_no_more(self)
        await asyncio.to_thread(self.joined.wait, WITHIN)

    def __call__(self, give_up):
        give_up()
        lease = order(self.database, reentrant=True).acquire()
        self.joined.set()
        self.go_on.wait(WITHIN)
        self.release(lease)
        self.left.set()
        in_thread(self.slow, ())

    async def finish(self):
        self.go_on.set()
        await asyncio.to_thread(self.left.wait, WITHIN)


@pytest.mark.parametrize("owner", [joined_again_by_a_task, joined_again_in_a_transaction])
@pytest.mark.parametrize(
    "release",
    [lambda lease: lease.release(), lambda lease: async_to_sync(lease.arelease)()],
    ids=["function", "coroutine"],
)
async def test_function_for_which_nobody_waits_is_refused_after_an_owner_that_has_joined_again(
    database, store, owner, release
):
    leave = Leave(database, release)
    await owner(database, leave)
    assert not is_held(store)
    await leave.slow.finish()
    assert isinstance(leave.slow.error, LeaseLost)
    await sync_to_async(write)(database)


async def test_function_in_a_copy_of_a_context_is_no_call_of_the_flow_that_the_context_is_from(database, store):
    """asgiref's `context=`; a function that this flow had called, and that has returned, says nothing about it."""
    slow, lease = Slow(database, "before"), await order(database).aacquire()
    await sync_to_async(write)(database)
    copy = contextvars.copy_context()
    working = asyncio.create_task(sync_to_async(slow, thread_sensitive=False)())
    await slow.wait_until_reached()
    await asyncio.create_task(sync_to_async(lease.release, thread_sensitive=False, context=copy)())
    assert not is_held(store)
    await slow.finish()
    await working


def test_calls_in_an_event_loop_that_a_closing_generator_runs_are_calls_like_any_other(database, store):
    async def innermost():
        return await sync_to_async(write)(database)

    async def cleanup():
        async with order(database) as lease:
            written.append(await sync_to_async(async_to_sync(innermost))() == lease.token)
        await sync_to_async(connections.close_all)()

    def generator():
        try:
            yield
        finally:
            asyncio.run(cleanup())

    written = []
    for _ in generator():
        break
    collect_garbage()
    assert written == [True]
    assert current() == []


async def test_coroutine_that_its_own_task_closes_hands_the_lease_of_its_function_back(database, store):
    leases, has_acquired = [], threading.Event()

    def acquire():
        leases.append(in_thread(order(database).acquire, ()))
        has_acquired.set()

    coroutine = sync_to_async(acquire, thread_sensitive=False)()
    future = coroutine.send(None)
    has_acquired.wait(WITHIN)
    await auntil(future.done)
    coroutine.close()
    assert await sync_to_async(write)(database) == leases[0].token
    await leases[0].arelease()
    assert current() == []


async def test_function_that_raises_generator_exit_hands_its_lease_back(database, store):
    def acquire():
        leases.append(order(database).acquire())
        raise GeneratorExit

    leases = []
    with pytest.raises(GeneratorExit):
        await sync_to_async(acquire)()
    assert await sync_to_async(write)(database) == leases[0].token
    await leases[0].arelease()


def leave_a_task_in(coroutine_function):
    """Stop an event loop whose task waits for a function, as a notebook does, and wait for the function's end."""
    started, go_on, executor = threading.Event(), threading.Event(), ThreadPoolExecutor()

    def function():
        started.set()
        go_on.wait(WITHIN)

    async def main():
        loop.set_default_executor(executor)
        task = loop.create_task(coroutine_function(sync_to_async(function, thread_sensitive=False)))
        await asyncio.to_thread(started.wait, WITHIN)
        return [task]

    loop = asyncio.new_event_loop()
    tasks = loop.run_until_complete(main())
    go_on.set()
    executor.shutdown()  # It waits for the function.
    loop.close()
    return tasks


@pytest.mark.filterwarnings("ignore")
def test_coroutine_that_is_closed_late_gives_its_leases_to_nobody(database, store):
    async def background(function):
        async with lock("mail", 1, using=database):
            await function()

    def work():
        tasks = leave_a_task_in(background)
        with order(database) as lease:
            tasks.clear()
            collect_garbage()
            assert [each.held.name for each in current()] == [lease.name]
            assert write(database) == lease.token
        assert current() == []
        write(database)

    contextvars.Context().run(work)


def test_function_goes_on_after_it_has_released_its_lease_in_a_copy_of_its_context(database, store):
    lease = order(database).acquire()
    contextvars.copy_context().run(lease.release)
    write(database)


def test_function_goes_on_after_a_callback_of_its_event_loop_has_released_its_lease(database, store):
    async def main():
        asyncio.get_running_loop().call_soon(lease.release)
        await asyncio.sleep(0)

    lease = order(database).acquire()
    asyncio.run(main())
    assert not is_held(store)
    write(database)


def test_transaction_writes_elsewhere_after_a_block_of_its_coroutine_has_failed(use_database, store):
    async def reserve():
        async with order("default"):
            raise ValueError("sold out")

    use_database("default"), use_database("other")
    with atomic("default"):
        with pytest.raises(ValueError, match="sold out"):
            async_to_sync(reserve)()
        write("other")
    assert not is_held(store)


LEASES_IN_CYCLES = """
import warnings

import django
from asgiref.sync import async_to_sync
from django.conf import settings

warnings.simplefilter("ignore", ResourceWarning)
databases = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
settings.configure(DATABASES=databases, INSTALLED_APPS=["django_dlock"], DLOCK={"default": {"BACKEND": "memory://"}})
django.setup()

from django_dlock import lock


class Service:
    pass


async def job(number):
    service = Service()
    service.itself = service
    service.lease = await lock("job", number, fence=False, ttl=1).aacquire()


for number in range(2000):
    async_to_sync(job)(number)
"""


def test_interpreter_survives_leases_that_are_collected_in_cycles():
    """CPython 3.11 may collect them inside a change of the context, which must not be changed then."""
    done = subprocess.run(
        [sys.executable, "-c", LEASES_IN_CYCLES], capture_output=True, text=True, check=False, timeout=WITHIN
    )
    assert (done.returncode, done.stderr) == (0, "")
