"""What only starts work, and does it after the call, cannot be decorated: tasks of every queue, generators."""

from __future__ import annotations

import contextlib
import functools
import itertools
from types import SimpleNamespace

import pytest

from dlock_core.late import LateWork, runs_async

LOCKED = LateWork("@locked", "the call", "write `with lock(...)` inside it")


class Task:
    """A task as huey, dramatiq, Django and others make them: an object, with a method that enqueues it."""

    def __init__(self, method):
        setattr(self, method, lambda *args: None)

    def __call__(self, order_id):
        raise AssertionError("the task was enqueued")


class Around(contextlib.ContextDecorator):
    """A block that is also a decorator, as `transaction.atomic()` is."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def ship(order_id):
    pass


METHODS = ["apply_async", "call_local", "send_with_options", "enqueue", "delay", "defer", "kiq"]


@pytest.mark.parametrize("method", METHODS)
def test_task_of_any_queue_is_refused_even_below_another_decorator(method):
    task = Task(method)
    for function in (task, functools.update_wrapper(lambda order_id: [task(order_id)], task)):
        with pytest.raises(TypeError, match=r"^@locked must stand below the decorator that makes .* a task"):
            LOCKED.refuse_function(function)


def test_task_that_cannot_be_called_is_refused_as_a_task():
    with pytest.raises(TypeError, match="below the decorator"):
        LOCKED.refuse_function(SimpleNamespace(enqueue=ship))


def test_function_that_rq_has_given_a_method_is_still_the_function_that_its_worker_runs():
    @functools.wraps(ship)
    def function(order_id):
        pass

    function.delay = function.enqueue = ship
    LOCKED.refuse_function(function)


def test_generator_is_refused():
    def late():
        yield

    async def too_late():
        yield

    for function in (late, too_late):
        with pytest.raises(
            TypeError, match=r"^@locked cannot cover the generator .*write `with lock\(...\)` inside it"
        ):
            LOCKED.refuse_function(function)


def test_context_manager_is_refused_as_the_generator_that_it_is():
    def generator():
        yield

    async def async_generator():
        yield

    for function in (
        contextlib.contextmanager(generator),
        contextlib.asynccontextmanager(async_generator),
        Around()(generator),
        Around()(contextlib.contextmanager(generator)),
    ):
        with pytest.raises(TypeError, match=r"^@locked cannot cover the generator"):
            LOCKED.refuse_function(function)


def test_function_that_exhausts_a_generator_is_a_function():
    def generator():
        yield 1

    @functools.wraps(generator)
    def as_list():
        return list(generator())

    LOCKED.refuse_function(as_list)
    LOCKED.refuse_function(Around()(ship))


def late_answers():
    def generator():
        yield

    async def async_generator():
        yield

    return {
        "generator": generator(),
        "async generator": async_generator(),
        "context manager": contextlib.contextmanager(generator)(),
        "async context manager": contextlib.asynccontextmanager(async_generator)(),
    }


@pytest.mark.parametrize("kind", late_answers())
def test_answer_whose_body_is_still_to_run_is_refused(kind):
    with pytest.raises(TypeError, match=r"^@locked: .*ship.* runs after the call: write `with lock\(...\)` inside it$"):
        LOCKED.refuse_answer(ship, late_answers()[kind], "await it")


LAZY = [
    map(str, [1]), filter(None, [1]), zip([1]), enumerate([1]), itertools.accumulate([1]), itertools.chain([1]),
    itertools.chain.from_iterable(map(list, ["a"])), itertools.compress([1], [1]), itertools.cycle([1]),
    itertools.dropwhile(bool, [1]), itertools.filterfalse(bool, [1]), itertools.groupby([1]), itertools.islice([1], 1),
    itertools.pairwise([1]), itertools.starmap(str, [(1,)]), itertools.takewhile(bool, [1]), itertools.zip_longest([1]),
]  # fmt: skip


@pytest.mark.parametrize("answer", LAZY)
def test_iterator_whose_work_is_done_when_it_is_read_is_refused(answer):
    with pytest.raises(TypeError, match=r"^@locked: .*ship.* returned a lazy iterator, .*: return a list of it$"):
        LOCKED.refuse_answer(ship, answer, "await it")


def test_coroutine_of_a_blocking_function_is_closed_and_refused():
    async def answer():
        pass

    with pytest.raises(TypeError, match=r"^@locked: .*ship.* returned a coroutine.*: await it$"):
        LOCKED.refuse_answer(ship, answer(), "await it")


def test_answer_that_is_there_is_returned():
    for answer in (42, [1], range(2), iter([1]), iter({1: 1}.items()), reversed([1]), itertools.repeat(1, 2), None):
        assert LOCKED.refuse_answer(ship, answer, "") is answer


@pytest.mark.parametrize("made", [classmethod, property])
def test_what_cannot_be_called_says_where_the_decorator_belongs(made):
    with pytest.raises(TypeError, match=rf"^@locked .*below @{made.__name__}"):
        LOCKED.refuse_function(made(ship))


def test_callables_of_every_other_kind_are_functions():
    class Shop:
        def ship(self, order_id):
            pass

        def __call__(self, order_id):
            pass

    ships = (ship, Shop().ship, Shop(), functools.partial(ship, 1), functools.lru_cache(ship), staticmethod(ship))
    for function in ships:
        LOCKED.refuse_function(function)


def test_object_whose_call_is_async_is_async_as_functions_are():
    class Ship:
        async def __call__(self, order_id):
            pass

        async def ship(self, order_id):
            pass

    for function in (Ship(), Ship().ship, functools.partial(Ship(), 1), functools.partial(Ship().ship, 1)):
        assert runs_async(function)
    for function in (ship, Task("enqueue"), Ship):
        assert not runs_async(function)


def test_class_of_which_only_the_constructor_would_be_covered_is_refused():
    class Ship:
        def __call__(self):
            pass

    for made in (Ship, functools.partial(Ship), functools.partial(functools.partial(Ship, 1), x=2)):
        with pytest.raises(TypeError, match=r"^@locked decorates a function or method.*only the constructor"):
            LOCKED.refuse_function(made)


def test_task_and_generator_in_a_partial_are_refused():
    def generator():
        yield

    for function in (Task("enqueue"), generator):
        with pytest.raises(TypeError, match=r"^@locked (must stand below|cannot cover)"):
            LOCKED.refuse_function(functools.partial(function, 1))


def test_what_is_no_function_at_all_is_refused():
    with pytest.raises(TypeError, match=r"^@locked decorates a function or method, not 'ship'$"):
        LOCKED.refuse_function("ship")
