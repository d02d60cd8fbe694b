"""One thing has one name in every process, however it is spelled, and two things never share one."""

import functools
import json
import os
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from fractions import Fraction
from functools import partial
from http.cookies import SimpleCookie
from ipaddress import ip_address
from pathlib import Path, PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock
from uuid import UUID

import pydantic
import pydantic.v1
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import QueryParams

from dlock_core import Lock, MultiLock
from dlock_core.names import canonical, join
from dlock_core.testing import MemoryBackend

PARTS = st.lists(
    st.text(min_size=1, max_size=12) | st.integers() | st.binary(min_size=1, max_size=8), min_size=1, max_size=4
)


def test_parts_are_joined_with_colons() -> None:
    assert join("order", 42) == "order:42"
    assert join("order", UUID(int=7)) == "order:00000000-0000-0000-0000-000000000007"


def test_a_colon_inside_a_part_does_not_separate() -> None:
    assert join("lock", "a:b") == "lock:a%3Ab"
    assert join("lock", "a", "b") == "lock:a:b"


@pytest.mark.parametrize("first", ["order:42", b"order:42"])
def test_finished_name_as_first_part_is_refused_with_its_parts(first: object) -> None:
    with pytest.raises(ValueError, match=r"give its parts one by one, 'order', 42;"):
        join(first)


@given(PARTS, PARTS)
def test_different_parts_make_different_names(one: list[object], other: list[object]) -> None:
    def text(part: object) -> bytes:
        return part if isinstance(part, bytes) else str(part).encode(errors="surrogatepass")

    same = [text(part) for part in one] == [text(part) for part in other]
    assert (join("kind", *one) == join("kind", *other)) == same


@given(PARTS)
def test_joined_name_is_canonical_plain_ascii(parts: list[object]) -> None:
    name = join("kind", *parts)
    assert canonical(name) == name
    assert name.isascii()
    assert name.isprintable()
    assert not set(name) & set(" {}*?[]'\"\\/\n\0")


@given(st.text(min_size=1, max_size=40))
def test_canonical_form_of_a_canonical_name_is_itself(text: str) -> None:
    try:
        name = canonical(text)
    except ValueError:
        assert "" in text.split(":")
        return
    assert canonical(name) == name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("order:42", "order:42"),
        ("a b", "a%20b"),
        ("%41", "A"),
        ("%3a", "%3A"),
        ("50%", "50%25"),
        ("ä", "%C3%A4"),
        ("%c3%a4", "%C3%A4"),
    ],
)
def test_one_name_however_it_is_escaped(written: str, name: str) -> None:
    assert canonical(written) == name


def test_case_matters() -> None:
    assert canonical("Order") != canonical("order")


class Small(StrEnum):
    ORDER = "order"


class OldStyle(str, Enum):  # noqa: UP042 - as Django's choices are, or were
    ORDER = "order"


class Shouted(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "SHOUTED"


@pytest.mark.parametrize("text", [OldStyle.ORDER, Small.ORDER, Shouted("order")], ids=repr)
def test_name_of_a_text_of_another_type_is_its_plain_text(text: str) -> None:
    name = canonical(text)
    assert type(name) is str
    assert f"{name}" == "order"


class Plain(Enum):
    ORDER = 1


class Number(IntEnum):
    ONE = 1


class Key:
    """An object with its own text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    def key(self) -> int:
        return 42


class Sub(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (42, "42"),
        (b"abc", "abc"),
        (memoryview(b"abc"), bytearray(b"abc")),
        (Decimal("1.0"), Decimal("1.00")),
        (Decimal("1E+3"), 1000),
        (Decimal("-0.0"), 0),
        (NOON, NOON.astimezone(timezone(timedelta(hours=5, minutes=30)))),
        (Small.ORDER, "order"),
        (OldStyle.ORDER, "order"),
        (Number.ONE, 1),
        (Fraction(4, 2), 2),
        (Key("abc"), "abc"),
        (Sub("abc"), "abc"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_equal_things_have_one_name(one: object, other: object) -> None:
    assert join("kind", one) == join("kind", other)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (date(2026, 3, 1), "2026-03-01"),
        (NOON, "2026-03-01%2012%3A00%3A00%2B00%3A00"),
        (datetime(2026, 3, 1, 12), "2026-03-01%2012%3A00%3A00"),  # noqa: DTZ001 - naive on purpose
        (time(12, 30), "12%3A30%3A00"),
        (timedelta(days=1), "1%20day%2C%200%3A00%3A00"),
        (Decimal("12.50"), "12.5"),
        (Plain.ORDER, "Plain.ORDER"),
        (ip_address("::1"), "%3A%3A1"),
        (PurePosixPath("a/b"), "a%2Fb"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_types_that_have_one_text(part: object, text: str) -> None:
    assert join("kind", part) == f"kind:{text}"


@dataclass
class Record:
    """Its text consists of its fields, whatever their texts are."""

    number: int = 1


class Loud:
    """Its text contains the default text of an object."""

    def __str__(self) -> str:
        return f"loud {super().__str__()}"


REFUSED = [
    *[None, True, 1.5, float("nan"), 1j, [], (), {}, set(), frozenset(), range(3), deque(), iter("ab"), map(str, ())],
    *[object(), SimpleNamespace(a=1), Record(), Loud(), Key, Record, Plain, Key("a").key, len, functools.partial(len)],
    *[lambda: 42, (each for each in "ab"), Mock(), MagicMock(), Mock(spec=int), Decimal, UUID, time(12, tzinfo=UTC)],
]


@pytest.mark.parametrize("part", REFUSED, ids=lambda part: type(part).__name__)
def test_value_without_a_text_that_is_always_the_same_is_refused(part: object) -> None:
    with pytest.raises(TypeError, match=r"a part of a lock's name is|has no one text"):
        join("order", part)


@pytest.mark.parametrize("kind", [partial(Lock, name="a"), partial(MultiLock, names=["a"])])
def test_lock_in_a_name_is_told_where_locks_belong(kind: Any) -> None:
    with pytest.raises(
        TypeError, match=r"pass several locks, and nothing else, to one lock\(\); .* one @locked for each"
    ):
        join("order", kind(MemoryBackend()))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1E+99999999"])
def test_number_without_a_sensible_text_is_refused(number: str) -> None:
    with pytest.raises(ValueError, match=r"number|digits"):
        join("order", Decimal(number))


class Payload(pydantic.BaseModel):
    order_id: int
    note: str = ""


class OldPayload(pydantic.v1.BaseModel):
    order_id: int


class Form:
    """As the forms and fields of web frameworks, whose text is HTML."""

    def __str__(self) -> str:
        return "<form>…</form>"

    __html__ = __str__


class Reference(Payload):
    """A record that says what its key is."""

    def __str__(self) -> str:
        return str(self.order_id)


CONTENTS = [
    *[Payload(order_id=42), OldPayload(order_id=42), pydantic.RootModel[int](42), QueryParams("note=x")],
    *[MappingProxyType({"order_id": 42}), SimpleCookie("note=x"), ValueError("42"), Form()],
]


@pytest.mark.parametrize("part", CONTENTS, ids=lambda part: type(part).__name__)
def test_value_whose_text_is_all_that_it_contains_is_refused(part: object) -> None:
    with pytest.raises(TypeError, match="whose text is its contents, not a key: give the attribute that is its key"):
        join("order", part)


def test_record_with_its_own_text_is_a_key() -> None:
    assert join("order", Reference(order_id=42, note="x")) == "order:42"


SEVERAL = [[1, 2], (1, 2), {1}, frozenset(), range(2), {1: 2}.keys(), iter([1])]


@pytest.mark.parametrize("parts", SEVERAL, ids=lambda parts: type(parts).__name__)
def test_parts_in_a_list_are_to_be_passed_one_by_one(parts: object) -> None:
    with pytest.raises(TypeError, match=r"one by one, lock\(\*them\)"):
        join("order", parts)


def test_file_is_no_list_of_parts() -> None:
    with Path(__file__).open() as file, pytest.raises(TypeError, match="not TextIOWrapper, whose type defines no text"):
        join("order", file)


def test_method_that_was_not_called_is_named() -> None:
    with pytest.raises(TypeError, match=r"not method 'key': call it, key\(\)"):
        join("order", Key("a").key)


def test_value_that_is_refused_is_not_asked_for_its_repr() -> None:
    class Query:
        def __repr__(self) -> str:
            pytest.fail("this would send a query")

    with pytest.raises(TypeError, match="not Query"):
        join("order", Query())


SAY_NAMES = r"""
import datetime, decimal, enum, fractions, ipaddress, json, pathlib, sys, uuid
from dlock_core.names import join
class Plain(enum.Enum):
    A, B = frozenset("abc"), object()
class Perm(enum.Flag):
    R, W, X = enum.auto(), enum.auto(), enum.auto()
zone = datetime.timezone(datetime.timedelta(hours=int(sys.argv[1])))
noon = datetime.datetime.fromtimestamp(1_700_000_000, zone)
parts = ["é", "e\u0301", b"\xff", 42, uuid.UUID(int=7), decimal.Decimal("1.50"), noon, datetime.date(2026, 3, 1), Plain.A, Plain.B,
    Perm.R | Perm.X, fractions.Fraction(1, 3), ipaddress.ip_network("10.0.0.0/8"), pathlib.PurePosixPath("a")]
print(json.dumps([join("kind", part) for part in parts]))
"""


def test_names_are_the_same_in_processes_with_other_hashes_and_time_zones() -> None:
    def names(seed: str, zone: str, hours: int) -> list[str]:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": zone}
        command = [sys.executable, "-c", SAY_NAMES, str(hours)]
        return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)  # type: ignore[no-any-return]

    here, there = names("1", "Asia/Tokyo", 9), names("2", "America/Lima", -5)
    assert here == there
    assert len(set(here)) == len(here)


MOMENTS = st.datetimes(min_value=datetime(1000, 1, 1), max_value=datetime(9000, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
NUMBERS = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**40), max_value=10**40) | st.integers()


@given(NUMBERS, NUMBERS)
def test_numbers_share_a_name_only_if_they_are_equal(one: Decimal | int, other: Decimal | int) -> None:
    assert (join("kind", one) == join("kind", other)) == (one == other)


@given(MOMENTS, st.integers(-23, 23), MOMENTS)
def test_moments_share_a_name_only_if_they_are_equal(moment: datetime, hours: int, other: datetime) -> None:
    elsewhere = moment.astimezone(timezone(timedelta(hours=hours)))
    assert join("kind", elsewhere) == join("kind", moment)
    assert (join("kind", elsewhere) == join("kind", other)) == (moment == other)


@pytest.mark.parametrize("parts", [(), ("",), ("order", ""), (b"",), (Key(""),)])
def test_missing_part_is_refused(parts: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=r"empty|neither a name nor locks were given: pass"):
        join(*parts)


def test_longest_name_has_512_bytes_when_encoded() -> None:
    assert len(join("x" * 512)) == len(canonical("x" * 512)) == 512
    for too_long in ("x" * 513, "ä" * 86):
        with pytest.raises(ValueError, match="at most 512 bytes"):
            join(too_long)
        with pytest.raises(ValueError, match="at most 512 bytes"):
            canonical(too_long)


def test_error_quotes_only_the_beginning_of_a_long_name() -> None:
    with pytest.raises(ValueError) as caught:
        canonical("x" * 100_000)
    assert len(str(caught.value)) < 200
