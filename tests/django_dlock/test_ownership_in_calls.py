"""Who has left a lease that functions and coroutines acquire, join or release for each other, perhaps more than once."""

import asyncio
import contextlib
import contextvars
import gc
import itertools
import subprocess
import sys
import threading

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db.transaction import atomic
from django.http import HttpResponse
from django.test import RequestFactory

from django_dlock import lock
from django_dlock.errors import LeaseLost
from django_dlock.middleware import LockMiddleware
from django_dlock.tie import current
from tests.django_dlock.thread_work import Slow, add, in_database, in_thread, order
from tests.leases import is_held
from tests.waiting import WITHIN

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
        holder = [await order(database, ttl=1).aacquire()]
        holder.append(holder)

    async def whole():
        await forget()
        with pytest.warns(ResourceWarning, match="never released"):
            gc.collect()
        with contextlib.suppress(LeaseLost):
            await sync_to_async(write)(database)
        for is_sensitive in (True, False):
            await sync_to_async(in_thread, thread_sensitive=is_sensitive)(write, (database,))

    await asyncio.create_task(whole(), context=contextvars.Context())  # A request would keep the lease.


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
