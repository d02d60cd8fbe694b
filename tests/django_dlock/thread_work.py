"""Work in threads and tasks that the tests of asyncio stop and let go on."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.transaction import atomic

from django_dlock import lock
from django_dlock.models import Fence
from tests.testapp.models import Counter
from tests.waiting import WITHIN

_GIVEN_UP = ThreadPoolExecutor(50)
"""The threads of functions that were given up: an event loop would wait for those of its own before it closes."""


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
            self.work()
        except BaseException as error:
            self.error = error
            raise
        finally:
            connections[self.database].close()
            self.over.set()

    def work(self):
        self.at("before")
        with atomic(self.database):
            Counter.objects.using(self.database).create(name=self.name)
            self.at("inside")

    def at(self, point):
        if point == self.point:
            self.reached.set()
            self.go_on.wait(WITHIN)

    async def wait_until_reached(self):
        await asyncio.to_thread(self.reached.wait, WITHIN)

    async def finish(self):
        self.go_on.set()
        await asyncio.to_thread(self.over.wait, WITHIN)


class Twice(Slow):
    """Two transactions in a thread, of which only the first has begun when it may go on."""

    def work(self):
        super().work()
        add(self.database, "b")


def locking(slow, **options):
    """Return a function that takes the lock itself, and works in its block."""

    def work():
        with order(slow.database, **options):
            slow()

    return work


async def in_database(function, *args):
    return await asyncio.to_thread(in_thread, function, args)


async def until_it_waits_no_more(function, *args):
    """Call a function in a thread, and stop waiting for it when it calls its first argument."""
    loop = asyncio.get_running_loop()

    def give_up():
        loop.call_soon_threadsafe(limit.reschedule, loop.time())

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:
            await sync_to_async(function, thread_sensitive=False, executor=_GIVEN_UP)(give_up, *args)


def in_thread(function, args):
    try:
        return function(*args)
    finally:
        connections.close_all()


def forget_connections():
    for connection in connections.all(initialized_only=True):
        connection.close()
        del connections[connection.alias]
