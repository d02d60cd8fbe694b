"""A lease belongs to the flow that acquired it: who else works under it, and for how long."""

import asyncio
import contextlib
import contextvars
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from asgiref import sync
from asgiref.sync import async_to_sync, sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.db.transaction import atomic
from django.http import HttpResponse
from django.test import RequestFactory, override_settings
from django.urls import clear_url_caches, path
from django.utils.decorators import async_only_middleware

import django_dlock
from django_dlock import lock, locked, pk
from django_dlock.errors import AcquireTimeout, LeaseLost
from django_dlock.middleware import LockMiddleware
from django_dlock.thread_calls import keep_from_callers
from django_dlock.tie import MAX_LEFT_LEASES, current
from django_dlock.tracker import leases_of_context
from dlock_core.owner import request_line
from tests.django_dlock.sessions import committed
from tests.django_dlock.thread_work import Slow, Twice, add, in_database, in_thread, locking, order
from tests.leases import is_awaited, is_held
from tests.testapp.models import Counter
from tests.waiting import WITHIN, auntil, until

pytestmark = pytest.mark.usefixtures("_connections_of_the_worker")


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


async def stop_waiting_for(function, wait_until_reached, **options):
    """Call a function of a thread, and stop to wait for it in the task that has called it, once its work has begun."""

    async def end():
        await asyncio.to_thread(wait_until_reached, WITHIN)
        limit.reschedule(asyncio.get_running_loop().time())

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:
            ending = asyncio.create_task(end())
            await sync_to_async(function, thread_sensitive=False, **options)()
    await ending


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
async def test_transaction_that_has_begun_when_its_block_has_caught_a_timeout_is_committed_under_the_lease(
    database, store
):
    slow = Slow(database)

    async def work():
        async with order(database):
            await stop_waiting_for(slow, slow.reached.wait)

    await work()
    assert is_held(store)
    await slow.finish()
    assert slow.error is None
    assert not is_held(store)


async def leave(slow, ends, **options):
    """Leave a block, by a time limit that it has "caught" or because it is "cancelled", while its thread is at work."""

    async def work():
        async with order(slow.database, **options):
            started = asyncio.ensure_future(sync_to_async(slow, thread_sensitive=False)())
            await slow.wait_until_reached()
            if ends == "cancelled":
                asyncio.current_task().cancel()
                await started
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(started, 0)

    with pytest.raises(asyncio.CancelledError) if ends == "cancelled" else contextlib.nullcontext():
        await asyncio.create_task(work())


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("form", ["transaction", "lease", False])
@pytest.mark.parametrize("ends", ["caught", "cancelled"])
async def test_second_transaction_of_a_thread_is_refused_if_the_first_one_has_outlived_the_block(
    database, store, form, ends
):
    slow = Twice(database)
    await leave(slow, ends, fence=form)
    assert is_held(store)
    await slow.finish()
    assert isinstance(slow.error, LeaseLost)
    assert not is_held(store)
    assert await in_database(committed, database) == {"a"}


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("point", ["before", "inside"])
async def test_task_does_not_have_the_lease_of_a_function_for_which_it_has_stopped_waiting(database, store, point):
    # InnoDB locks the gaps beside a deleted row of the same name until it is purged, and with them other names.
    slow = Slow(database, point, name=f"slow {uuid4()}")
    await stop_waiting_for(locking(slow), slow.reached.wait)
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


async def in_thread_of_asgiref(work):
    return await sync_to_async(in_thread, thread_sensitive=False)(work, ())


ELSEWHERE = {
    "same loop": lambda loop, pool, work: asyncio.run_coroutine_threadsafe(in_thread_of_asgiref(work), loop).result(
        WITHIN
    ),
    "own loop": lambda loop, pool, work: asyncio.run(in_thread_of_asgiref(work)),
    "pool": lambda loop, pool, work: pool.submit(contextvars.copy_context().run, in_thread, work, ()).result(WITHIN),
}


@pytest.mark.parametrize("start", ELSEWHERE)
async def test_work_that_a_function_of_a_thread_starts_elsewhere_is_fenced(database, store, start):
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as pool:
        await sync_to_async(bool, thread_sensitive=False, executor=pool)()  # asgiref has used the pool's thread

        def work():
            with order(database) as lease:
                assert ELSEWHERE[start](loop, pool, lambda: add(database)) == lease.token

        await sync_to_async(in_thread, thread_sensitive=False)(work, ())
    assert not is_held(store)


@pytest.mark.parametrize("start", ["same loop", "own loop"])
async def test_work_that_a_function_of_a_thread_starts_elsewhere_may_join_its_lease(database, store, start):
    loop = asyncio.get_running_loop()

    def joining():
        with order(database, reentrant=True, wait=0) as lease:
            return lease.token

    def work():
        with order(database) as lease:
            assert ELSEWHERE[start](loop, None, joining) == lease.token

    await sync_to_async(in_thread, thread_sensitive=False)(work, ())
    assert not is_held(store)


def test_context_of_a_function_that_has_returned_is_handed_back_although_its_caller_was_cancelled():
    def caller():
        context = contextvars.copy_context()
        context.run(request_line.set, "GET /orders/42")
        with contextlib.suppress(asyncio.CancelledError):
            try:
                raise asyncio.CancelledError
            finally:
                sync._restore_context(context)
        return request_line.get()

    assert contextvars.copy_context().run(caller) == "GET /orders/42"


async def test_request_ends_no_lease_of_a_task_that_it_has_started_and_that_has_stopped_waiting_for_a_function(
    database, store
):
    left, go_on = asyncio.Event(), asyncio.Event()
    reached, end = threading.Event(), threading.Event()

    def quote():
        reached.set()
        end.wait(WITHIN)

    async def ship():
        async with order(database):
            pool = ThreadPoolExecutor(1)
            await stop_waiting_for(quote, reached.wait, executor=pool)
            end.set()
            await asyncio.to_thread(pool.shutdown)
            left.set()
            await go_on.wait()
            await in_database(add, database)

    async def view(request):
        tasks.append(asyncio.create_task(ship()))
        await left.wait()
        return HttpResponse()

    tasks = []
    await LockMiddleware(view)(RequestFactory().get("/"))
    assert is_held(store)
    go_on.set()
    await tasks[0]
    assert await in_database(committed, database) == {"a"}


async def test_lease_that_its_task_has_joined_in_a_thread_is_fenced_after_the_first_handle_was_released(
    database, store
):
    first = await order(database).aacquire()
    joined = await sync_to_async(in_thread)(order(database, reentrant=True).acquire, ())
    await first.arelease()
    assert await in_database(add, database) == joined.token
    await joined.arelease()
    assert not is_held(store)
    await in_database(add, database, "and more")


async def test_lease_that_was_left_with_an_open_transaction_is_known_once(database, store):
    class Locking(Slow):
        def work(self):
            with atomic(self.database):
                Counter.objects.using(self.database).create(name="a")
                self.at("inside")
                for number in range(3):
                    with lock("part", number, using=self.database, fence=False):
                        known.append(leases_of_context.get())

    slow, known = Locking(database), []
    await leave(slow, "caught", fence=False)
    await slow.finish()
    assert slow.error is None
    assert all(len(each) == len(set(each)) <= number + 2 for number, each in enumerate(known))
    assert len(known) == 3


foreign = contextvars.ContextVar("dlock_of_another_program")


async def test_variables_of_other_programs_are_handed_back_as_before(database, store):
    def work():
        foreign.set("theirs")
        locking(slow)()

    slow = Slow(database)
    await stop_waiting_for(work, slow.reached.wait)
    assert (foreign.get(), current()) == ("theirs", [])
    await slow.finish()
    assert slow.error is None


def test_every_context_variable_of_dlock_belongs_to_a_flow():
    pattern = re.compile(r"\bContextVar\((?!name)")
    made = [
        path.name
        for path in Path(django_dlock.__file__).parents[1].glob("*dlock*/**/*.py")
        if pattern.search(path.read_text())
    ]
    assert made == []


@pytest.mark.parametrize(("place", "name"), [(sync, "_restore_context"), (sync.SyncToAsync, "thread_handler")])
def test_steps_of_asgiref_are_wrapped_once_and_missed_with_a_warning(monkeypatch, place, name):
    wrapped = getattr(place, name)
    keep_from_callers()
    assert getattr(place, name) is wrapped
    with monkeypatch.context() as without:
        without.delattr(place, name)
        with pytest.warns(RuntimeWarning, match="Install an older asgiref"):
            keep_from_callers()


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


@pytest.mark.parametrize("parts", [("order", 42), ("invoice", 7)], ids=["same", "other"])
async def test_no_lock_lets_work_go_on_that_outlives_the_block(database, store, parts):
    """It may be a part of that work: of a function that takes the lock for each step, or first after the time limit."""
    go_on = asyncio.Event()

    async def background():
        await go_on.wait()
        async with lock(*parts, using=database):
            await in_database(add, database)

    async with order(database):
        task = asyncio.create_task(background())
    go_on.set()
    with pytest.raises(LeaseLost, match="order:42"):
        await task
    assert await in_database(committed, database) == set()


def joining_in_a_transaction(database):
    return atomic(database), order(database)


def joining(database):
    return contextlib.nullcontext(), order(database, reentrant=True)


class Helped(Slow):
    """Work that goes on, after its block was left, with a function that takes the same lock."""

    def __init__(self, database, joins, *, is_inside):
        super().__init__(database, "inside" if is_inside else "before")
        self.joins = joins

    def work(self):
        self.at("before")
        first, second = self.joins(self.database)
        with first, second:
            self.at("inside")
            with atomic(self.database):
                Counter.objects.using(self.database).create(name="helped")
        add(self.database)


@pytest.mark.parametrize("joins", [joining, joining_in_a_transaction])
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("ends", ["caught", "cancelled"])
async def test_function_of_a_block_that_was_left_writes_only_in_a_block_that_had_joined_it_before(
    database, store, joins, is_inside, ends
):
    slow = Helped(database, joins, is_inside=is_inside)
    await leave(slow, ends)
    await slow.finish()
    assert isinstance(slow.error, LeaseLost)
    assert await in_database(committed, database) == ({"helped"} if is_inside else set())
    assert not is_held(store)


def test_lease_that_a_function_has_released_is_not_known_to_its_context(database, store):
    with order(database) as lease:
        assert [each.held.token for each in leases_of_context.get()] == [lease.token]
    assert leases_of_context.get() == ()


@pytest.mark.parametrize("joins", [joining, joining_in_a_transaction])
async def test_task_that_has_left_its_block_is_apart_from_a_function_that_has_joined_its_lease(database, store, joins):
    slow = Helped(database, joins, is_inside=True)

    async def work():
        async with order(database):
            await stop_waiting_for(slow, slow.reached.wait)
        assert is_held(store)
        assert current() == []
        if "transaction" not in joins.__name__:
            await in_database(add, database, "the caller's own work")

    await work()
    await slow.finish()


async def test_second_release_in_another_task_lets_no_work_go_on_that_was_left(database, store):
    go_on = asyncio.Event()

    async def background():
        await go_on.wait()
        await in_database(add, database)

    lease = await order(database).aacquire()
    task = asyncio.create_task(background())
    await lease.arelease()
    await asyncio.create_task(lease.arelease())
    go_on.set()
    with pytest.raises(LeaseLost):
        await task


async def test_task_that_starts_the_next_one_in_its_block_keeps_few_leases(store):
    tasks, known = [], []

    async def job(number):
        async with lock("job", number, fence=False):
            known.append(len(leases_of_context.get()))
            if number < 5 * MAX_LEFT_LEASES:
                tasks.append(asyncio.create_task(job(number + 1)))

    await job(0)
    while tasks:
        await tasks.pop()
    assert len(known) == 5 * MAX_LEFT_LEASES + 1
    assert max(known) <= MAX_LEFT_LEASES + 2


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
        lease = await sync_to_async(in_thread, thread_sensitive=thread_sensitive)(order(database).acquire, ())
        release = sync_to_async(in_thread, thread_sensitive=thread_sensitive)(lease.release, ())
        await (asyncio.shield(release) if apart else release)
        await in_database(add, database, f"{thread_sensitive}")
    assert await in_database(committed, database) == {"True", "False"}


urlpatterns = []
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


async def asks(database):
    return await Counter.objects.using(database).acount()


async def is_asked(slow):
    slow.reached.set()
    await asyncio.to_thread(slow.go_on.wait, WITHIN)


def acquiring(slow):
    lease = order(slow.database).acquire()
    slow()
    lease.release()


def after_a_coroutine(slow):
    async_to_sync(asks)(slow.database)
    locking(slow)()


def in_a_second_coroutine(slow):
    with order(slow.database):
        async_to_sync(asks)(slow.database)
        async_to_sync(is_asked)(slow)
        slow()


WAYS = [lambda slow: locking(slow)(), acquiring, after_a_coroutine, in_a_second_coroutine]


@asynccontextmanager
async def request_whose_client_goes_away(view, slow, monkeypatch):
    """Send a request through Django's ASGI handler, where each has its own thread, and leave it when its work has begun."""
    monkeypatch.setattr(f"{__name__}.urlpatterns", [path("ship/<int:pk>", view)])
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[f"{__name__}.noting_its_end", LOCKS]):
        clear_url_caches()
        scope = {"type": "http", "method": "POST", "path": "/ship/42", "headers": [], "query_string": b""}
        client = ApplicationCommunicator(ASGIHandler(), scope)
        await client.send_input({"type": "http.request", "body": b""})
        await slow.wait_until_reached()
        await client.send_input({"type": "http.disconnect"})
        yield
        await client.wait(WITHIN)


async def is_next_after(slow, store):
    """Let the next holder wait, and the work end; only then may the next one have the lock."""
    next_one = asyncio.create_task(order(slow.database).aacquire())
    await auntil(lambda: is_awaited(store))
    assert not next_one.done()
    await slow.finish()
    await (await next_one).arelease()
    assert slow.error is None
    assert await in_database(committed, slow.database) == {"a"}


async def test_client_that_goes_away_does_not_end_the_lease_before_the_commit(database, store, monkeypatch):
    slow, cancelled = Slow(database), asyncio.Event()

    @locked("order", pk, using=database)
    async def view(request, pk):
        try:
            await sync_to_async(slow)()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with request_whose_client_goes_away(view, slow, monkeypatch):
        await asyncio.wait_for(cancelled.wait(), WITHIN)
        await is_next_after(slow, store)


@pytest.mark.parametrize("way", WAYS, ids=["block", "acquire", "after", "second"])
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
async def test_client_that_goes_away_does_not_end_the_lease_of_a_thread_between_transactions(
    database, store, monkeypatch, way
):
    slow = Slow(database, "before" if way is not in_a_second_coroutine else "none")
    MIDDLEWARE_LEFT.clear()

    def view(request, pk):
        way(slow)
        return HttpResponse()

    async with request_whose_client_goes_away(view, slow, monkeypatch):
        await asyncio.to_thread(MIDDLEWARE_LEFT.wait, WITHIN)
        await is_next_after(slow, store)
