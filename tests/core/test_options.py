"""An option of a plausible but wrong type is a clear error before any I/O, and another library's word names ours."""

from __future__ import annotations

import math
import threading
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock, Mock

import pytest
from sqlalchemy.orm import Session

import django_dlock
import sqla_dlock
from dlock_core import AsyncLock, AsyncMultiLock, Lock, MultiLock
from dlock_core.backends.memory import MemoryBackend
from dlock_core.sql.row_locks import RowLock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


async def later() -> None:
    pass


class Later:
    async def __call__(self) -> None:
        pass

    def generator(self) -> Iterator[None]:
        yield

    async def async_generator(self) -> AsyncIterator[None]:
        yield


def core(**options: Any) -> Any:
    return Lock(MemoryBackend(), "order:42", **options)


def core_async(**options: Any) -> Any:
    return AsyncLock(MemoryBackend(), "order:42", **options)


def in_django(**options: Any) -> Any:
    return django_dlock.lock("order", 42, **options)


def in_django_decorated(**options: Any) -> Any:
    return django_dlock.locked("order", **options)


def in_sqlalchemy(**options: Any) -> Any:
    return sqla_dlock.lock(Session(), "order", 42, **options)


def in_sqlalchemy_decorated(**options: Any) -> Any:
    return sqla_dlock.locked("order", **options)


def several(**options: Any) -> Any:
    return MultiLock(MemoryBackend(), ["a", "b"], **options)


def several_async(**options: Any) -> Any:
    return AsyncMultiLock(MemoryBackend(), ["a", "b"], **options)


TIED = [in_django, in_django_decorated, in_sqlalchemy, in_sqlalchemy_decorated]
ONE = [core, core_async, *TIED]
EVERY = [*ONE, several, several_async]


@pytest.mark.parametrize("make", ONE)
@pytest.mark.parametrize(
    "options",
    [
        {"renew": 60.0},
        {"renew": 1},
        {"shared": "no"},
        {"fair": 3},
        {"reentrant": "yes"},
        {"shared": None},
        {"on_lost": "x"},
        {"on_lost": later},
    ],
    ids=lambda options: next(iter(options)),
)
def test_option_of_a_wrong_type_is_refused_by_its_name(make: Any, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(TypeError, match=rf"^{name} is "):
        make(**options)


@pytest.mark.parametrize("make", ONE)
@pytest.mark.parametrize(
    "on_lost",
    [
        Later(), partial(later), partial(Later()), AsyncMock(), lambda lease: lease,
        Later().generator, Later().async_generator, staticmethod(later), partial(staticmethod(later)),
    ],
    ids=[
        "object", "partial", "partial of an object", "mock", "argument",
        "generator", "async generator", "staticmethod", "partial of a staticmethod",
    ],
)  # fmt: skip
def test_callback_that_would_be_awaited_iterated_or_given_something_is_refused(make: Any, on_lost: Any) -> None:
    with pytest.raises(TypeError, match=r"^on_lost is "):
        make(on_lost=on_lost)


@pytest.mark.parametrize(
    "on_lost",
    [Mock(), [].clear, threading.Event().set, print, lambda *_: None, Mock],
    ids=["mock", "built-in", "method", "print", "any arguments", "class"],
)
def test_callback_that_can_be_called_is_accepted(on_lost: Any) -> None:
    core(on_lost=on_lost)


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize(
    "ttl", [math.nan, math.inf, -math.inf, 0, -1, timedelta(0), timedelta(days=9999), 10**400], ids=repr
)
def test_ttl_that_is_no_time_is_refused(make: Any, ttl: Any) -> None:
    with pytest.raises(ValueError, match=r"^ttl must be"):
        make(ttl=ttl)


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize("wait", [math.nan, math.inf, -1, timedelta(-1), 10**400], ids=repr)
def test_wait_that_is_no_time_is_refused(make: Any, wait: Any) -> None:
    with pytest.raises(ValueError, match=r"^wait must be"):
        make(wait=wait)


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize("option", ["ttl", "wait"])
@pytest.mark.parametrize("value", ["30", True, False, Decimal(30), [30], b"30"], ids=repr)
def test_time_of_a_wrong_type_is_refused(make: Any, option: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{option} is seconds"):
        make(**{option: value})


@pytest.mark.parametrize("make", [several, several_async])
def test_several_locks_are_shared_or_not(make: Any) -> None:
    with pytest.raises(TypeError, match=r"^shared is True or False"):
        make(shared="no")


@pytest.mark.parametrize("make", TIED)
@pytest.mark.parametrize("options", [{"fence": "x"}, {"fence": 1}, {"fence": None}, {"snapshot": True}], ids=repr)
def test_choice_that_there_is_not_is_refused(make: Any, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"^{name} must be"):
        make(**options)


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("timeout", "wait= .* ttl="),
        ("blocking_timeout", "wait="),
        ("blocking", "wait=0"),
        ("expire", "ttl="),
        ("auto_renewal", "renew="),
        ("sleep", "woken"),
    ],
)
def test_word_of_another_library_names_ours(make: Any, word: str, ours: str) -> None:
    with pytest.raises(TypeError, match=rf"a lock has no option '{word}'; .*{ours}.*Its options: .*wait"):
        make(**{word: 5})


@pytest.mark.parametrize("make", EVERY)
def test_unknown_option_is_told_the_known_ones(make: Any) -> None:
    with pytest.raises(TypeError, match=r"no option 'colour'\. Its options: ttl, wait, shared"):
        make(colour="red")


@pytest.mark.parametrize("make", [in_django, in_sqlalchemy])
def test_options_of_several_locks_are_given_to_each(make: Any) -> None:
    group = django_dlock.lock if make is in_django else sqla_dlock.lock
    with pytest.raises(
        TypeError, match=r"no option 'ttl'.*wait \(of all together; the others are given to each lock\)"
    ):
        group(make(), make(), ttl=5)


@pytest.mark.parametrize("option", ["shared", "nowait", "skip_locked", "no_key", "key"])
@pytest.mark.parametrize("value", ["no", 1, 0, None, 2.5], ids=repr)
def test_switch_of_a_row_lock_is_true_or_false(option: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{option} is True or False"):
        RowLock(**{option: value})


@pytest.mark.parametrize("make", [core, in_django, in_sqlalchemy])
def test_good_options_are_taken(make: Any) -> None:
    make(
        ttl=timedelta(seconds=5), wait=None, renew=False, fair=False, reentrant=True, shared=True, on_lost=lambda: None
    )


@pytest.mark.parametrize("seconds", [10**400, 10**5000], ids=["400 digits", "5000 digits"])
@pytest.mark.parametrize("option", ["ttl", "wait"])
def test_number_that_is_far_too_large_is_refused_in_a_few_words(option: str, seconds: int) -> None:
    with pytest.raises(ValueError, match=option) as caught:
        core(**{option: seconds})
    assert len(str(caught.value)) < 100
