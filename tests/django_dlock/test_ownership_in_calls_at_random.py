"""Random programs of functions and coroutines that call each other: who may write afterwards, and who is refused."""

import asyncio
import contextlib
import contextvars
import itertools
import random
import threading

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db.transaction import atomic

from django_dlock.errors import LeaseLost
from django_dlock.tie import current
from tests.django_dlock.thread_work import add, in_database, in_thread, order, until_it_waits_no_more
from tests.leases import is_held
from tests.waiting import WITHIN

pytestmark = pytest.mark.usefixtures("_connections_of_the_worker")

PROGRAMS = 40
MAX_STEPS = 4
"""Of one function or coroutine."""
MAX_DEPTH = 3
"""How deeply functions and coroutines call each other."""

numbers = itertools.count()


class Work:
    """A function, in a thread with a copy of the context in which it was started, that writes when it may go on."""

    def __init__(self, database, *, is_under):
        self.database, self.is_under = database, is_under
        self.go_on, self.over, self.error = threading.Event(), threading.Event(), None

    def __call__(self, give_up=lambda: None):
        give_up()
        try:
            self.go_on.wait(WITHIN)
            in_thread(add, (self.database, f"{next(numbers)}"))
        except LeaseLost as error:
            self.error = error
        finally:
            self.over.set()


class Joined(Work):
    """The same in a block that it joins, which it leaves when it may."""

    def __init__(self, database, release):
        super().__init__(database, is_under=True)
        self.release = release
        self.joined, self.may_leave, self.left = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, give_up=lambda: None):
        give_up()
        lease = order(self.database, reentrant=True, wait=0).acquire()
        self.joined.set()
        self.may_leave.wait(WITHIN)
        self.release(lease)
        self.left.set()
        super().__call__()

    def leave(self):
        self.may_leave.set()
        self.left.wait(WITHIN)


async def shielded(lease):
    await asyncio.shield(lease.arelease())


async def plainly(lease):
    await lease.arelease()


class Program:
    """One flow of control, in which functions and coroutines acquire, join, start work and release in any order."""

    def __init__(self, database, store, chance, *, has_transaction=False):
        self.database, self.store, self.chance = database, store, chance
        self.has_transaction = has_transaction
        self.handles, self.released, self.works, self.joined, self.was_held = [], [], [], [], False

    def steps(self):
        kinds = ["acquire", "release", "release", "again", "work", "write", "call", "call", "leave"]
        kinds += ["give up", "release late", "give up what joins"]
        return self.chance.choices(kinds, k=self.chance.randint(1, MAX_STEPS))

    def pop(self):
        self.released.append(self.handles.pop(self.chance.randrange(len(self.handles))))
        return self.released[-1]

    def function(self, depth=0):
        for kind in self.steps():
            if kind == "acquire" and self.may_acquire:
                self.function_acquires()
            elif kind == "release" and self.handles:
                self.function_releases(self.pop())
            elif kind == "again" and self.released:
                self.function_releases(self.chance.choice(self.released))
            elif kind == "work":
                self.starts_work()
            elif kind == "write":
                self.writes()
            elif kind == "leave" and self.joined:
                self.joined.pop().leave()
            elif kind == "call" and depth < MAX_DEPTH:
                async_to_sync(self.coroutine)(depth + 1)

    async def coroutine(self, depth=0):
        for kind in self.steps():
            if kind == "acquire" and self.may_acquire:
                await self.coroutine_acquires()
            elif kind == "release" and self.handles:
                await self.coroutine_releases(self.pop())
            elif kind == "again" and self.released:
                await self.coroutine_releases(self.chance.choice(self.released))
            elif kind == "work":
                self.starts_work()
            elif kind == "write":
                await sync_to_async(self.writes)()
            elif kind == "call" and depth < MAX_DEPTH:
                await sync_to_async(self.function)(depth + 1)
            elif kind == "leave" and self.joined:
                await asyncio.to_thread(self.joined.pop().leave)
            else:
                await self.coroutine_gives_up(kind)

    async def coroutine_gives_up(self, kind):
        if kind == "give up":
            await until_it_waits_no_more(self.new_work())
        elif kind == "give up what joins" and self.handles:
            await self.coroutine_gives_up_what_joins()
        elif kind == "release late" and self.handles and not (self.has_transaction or self.joined):
            await self.coroutine_gives_up_a_release(self.pop())

    def function_acquires(self):
        wanted = order(self.database, reentrant=True, wait=0)
        self.handles.append(wanted.acquire() if self.chance.random() < 0.5 else async_to_sync(wanted.aacquire)())
        self.was_held = True

    async def coroutine_acquires(self):
        wanted = order(self.database, reentrant=True, wait=0)
        acquired = wanted.aacquire if self.chance.random() < 0.5 else sync_to_async(wanted.acquire)
        self.handles.append(await acquired())
        self.was_held = True

    def function_releases(self, lease):
        way = self.chance.choice([lease.release, async_to_sync(lease.arelease), None])
        way() if way is not None else async_to_sync(self.chance.choice([plainly, shielded]))(lease)

    async def coroutine_releases(self, lease):
        ways = [plainly, shielded, lambda each: asyncio.create_task(each.arelease())]
        ways += [lambda each: sync_to_async(each.release)(), lambda each: sync_to_async(async_to_sync(each.arelease))()]
        await self.chance.choice(ways)(lease)

    async def coroutine_gives_up_a_release(self, lease):
        """Stop waiting for a function before it releases, as in its `finally`.

        Not while a transaction or others keep the lease: this flow is not told before it is over.
        """
        go_on, over = threading.Event(), threading.Event()

        def release(give_up):
            try:
                give_up()
                go_on.wait(WITHIN)
                lease.release()
            finally:
                over.set()

        await until_it_waits_no_more(release)
        go_on.set()
        await asyncio.to_thread(over.wait, WITHIN)
        await sync_to_async(self.writes)()  # Only its next call tells this flow of the release.

    async def coroutine_gives_up_what_joins(self):
        release = self.chance.choice([lambda lease: lease.release(), lambda lease: async_to_sync(lease.arelease)()])
        joined = Joined(self.database, release)
        self.works.append(joined)
        self.joined.append(joined)
        await until_it_waits_no_more(joined)
        await asyncio.to_thread(joined.joined.wait, WITHIN)

    @property
    def may_acquire(self):
        """Whether others do not have the lease alone: who has released it would wait for them like anybody else."""
        return self.handles or not self.joined

    def starts_work(self):
        threading.Thread(target=contextvars.copy_context().run, args=(self.new_work(),)).start()

    def new_work(self):
        self.works.append(Work(self.database, is_under=bool(self.handles)))
        return self.works[-1]

    def writes(self):
        token = add(self.database, f"{next(numbers)}")
        assert not self.handles or token == self.handles[-1].token

    def leave_all(self):
        while self.joined:
            self.joined.pop().leave()

    def end(self):
        """Let the work go on, and return whether exactly that was refused which was started under a lease."""
        for each in self.works:
            each.go_on.set()
            each.over.wait(WITHIN)
        return [each.error is not None for each in self.works] == [each.is_under for each in self.works]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("seed", range(PROGRAMS))
async def test_work_is_refused_if_it_was_started_under_a_lease_of_any_coroutine(database, store, seed):
    async def whole():
        await program.coroutine()
        while program.handles:
            await program.coroutine_releases(program.pop())
        await asyncio.to_thread(program.leave_all)
        assert current() == []
        assert not is_held(store)
        await sync_to_async(program.writes)()

    program = Program(database, store, random.Random(seed))
    await asyncio.create_task(whole())
    assert await asyncio.to_thread(program.end)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("seed", range(PROGRAMS))
@pytest.mark.parametrize("has_transaction", [False, True])
async def test_work_is_refused_if_it_was_started_under_a_lease_of_any_function(database, store, seed, has_transaction):
    def whole():
        with atomic(database) if has_transaction else contextlib.nullcontext():
            program.function()
            while program.handles:
                program.function_releases(program.pop())
            assert is_held(store) == (has_transaction and program.was_held) or program.joined
        program.leave_all()
        assert not is_held(store)
        assert current() == []
        program.writes()

    program = Program(database, store, random.Random(seed), has_transaction=has_transaction)
    await in_database(whole)
    assert await asyncio.to_thread(program.end)
