"""Random programs that acquire, join, start work and release in any way: who may write afterwards, and who is refused."""

import asyncio
import contextlib
import itertools
import random
import threading

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections
from django.db.transaction import atomic
from django.http import HttpResponse
from django.test import RequestFactory

from django_dlock.errors import AcquireTimeout, LeaseLost
from django_dlock.middleware import LockMiddleware
from django_dlock.tie import current
from tests.django_dlock.thread_work import add, in_database, in_thread, order
from tests.leases import is_held
from tests.waiting import WITHIN, auntil

pytestmark = pytest.mark.usefixtures("_connections_of_the_worker")

PROGRAMS = 40
MAX_STEPS = 4
"""Before the releases; and as many pieces of work at most, which is less than the threads of a loop's executor."""

numbers = itertools.count()


async def in_a_coroutine_of_a_function(wanted):
    def function():
        return async_to_sync(wanted.aacquire)()

    return await sync_to_async(function)()


def of_a_thread(method, *, is_own):
    return sync_to_async(in_thread, thread_sensitive=not is_own)(method, ())


ACQUIRES = [
    lambda wanted: wanted.aacquire(),
    lambda wanted: of_a_thread(wanted.acquire, is_own=False),
    lambda wanted: of_a_thread(wanted.acquire, is_own=True),
    in_a_coroutine_of_a_function,
]
RELEASES = [
    lambda lease: lease.arelease(),
    lambda lease: asyncio.shield(lease.arelease()),
    lambda lease: asyncio.wait_for(lease.arelease(), WITHIN),
    lambda lease: asyncio.create_task(lease.arelease()),
    lambda lease: of_a_thread(lease.release, is_own=False),
    lambda lease: of_a_thread(lease.release, is_own=True),
]
WRITES = [
    lambda database: in_database(add, database, f"{next(numbers)}"),
    lambda database: of_a_thread(lambda: add(database, f"{next(numbers)}"), is_own=False),
    lambda database: of_a_thread(lambda: add(database, f"{next(numbers)}"), is_own=True),
]


class Work:
    """Work that is started under the lease, in a thread, and goes on when its owner has released it."""

    def __init__(self, database, *, joins, has_block):
        self.database, self.joins, self.has_block = database, joins, has_block
        self.begun, self.leave, self.go_on = threading.Event(), threading.Event(), threading.Event()
        self.task = asyncio.create_task(sync_to_async(in_thread, thread_sensitive=False)(self.work, ()))

    def work(self):
        with self.handle() as lease:
            self.begun.set()
            if lease is not None:
                self.leave.wait(WITHIN)
                assert add(self.database, f"{next(numbers)}") == lease.token
                lease.ensure_held()
        self.go_on.wait(WITHIN)
        add(self.database, f"{next(numbers)}")

    @contextlib.contextmanager
    def handle(self):
        if self.joins and self.has_block:
            with order(self.database, reentrant=True) as lease:
                yield lease
        elif self.joins:
            lease = order(self.database, reentrant=True).acquire()
            yield lease
            lease.release()
        else:
            yield None


def acquire_in_a_transaction(database):
    with atomic(database):
        order(database, wait=0).acquire()


async def run_at_random(database, store, chance):
    handles = [await chance.choice(ACQUIRES)(order(database))]
    token, works = handles[0].token, []
    for step in range(chance.randint(1, MAX_STEPS)):
        kind = "work" if step == 0 else chance.choice(["work", "join", "write"])
        if kind == "work":
            works.append(Work(database, joins=chance.random() < 0.4, has_block=chance.random() < 0.5))
            await asyncio.to_thread(works[-1].begun.wait, WITHIN)
        elif kind == "join":
            handles.append(await chance.choice(ACQUIRES)(order(database, reentrant=True)))
        else:
            assert await chance.choice(WRITES)(database) == token
    chance.shuffle(handles)
    joined = [each for each in works if each.joins]
    while handles:
        await chance.choice(RELEASES)(handles.pop())
        assert is_held(store) == bool(handles or joined)
    assert current() == []
    await chance.choice(WRITES)(database)
    if joined:
        with pytest.raises(AcquireTimeout):
            await order(database, wait=0).aacquire()
        with pytest.raises(AcquireTimeout):
            await sync_to_async(in_thread)(acquire_in_a_transaction, (database,))
    for each in joined:
        each.leave.set()
    await auntil(lambda: not is_held(store))
    for each in works:
        each.go_on.set()
        with pytest.raises(LeaseLost):
            await each.task
    await chance.choice(WRITES)(database)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("seed", range(PROGRAMS))
@pytest.mark.parametrize("is_request", [False, True])
async def test_work_that_goes_on_is_refused_and_its_owner_is_not_in_any_program(database, store, seed, is_request):
    async def view(request):
        await run_at_random(database, store, random.Random(seed))
        return HttpResponse()

    if is_request:
        await LockMiddleware(view)(RequestFactory().get("/"))
    else:
        await asyncio.create_task(run_at_random(database, store, random.Random(seed)))
    connections.close_all()
