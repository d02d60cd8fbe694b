"""Keys and names of advisory locks, and the comments in which sessions name them: the parts that need no database."""

import re

import pytest

from dlock_core.backend import AcquireRequest
from dlock_core.backends.advisory.labels import Told, checked_prefix, comment, in_comment, in_label, key_of, word_of
from dlock_core.backends.advisory.postgresql import LockRow, states_of
from dlock_core.names import MAX_NAME_BYTES, join

KEYS = {
    "order:42": -1484960212693564947,
    "a": 8408475929734341367,
    "order:%C3%B6": -7395242706208081747,
    "x" * MAX_NAME_BYTES: 5480685138369967440,
}
"""Computed by PostgreSQL: ('x' || left(encode(sha256('dlock:a'), 'hex'), 16))::bit(64)::bigint."""
HALF_THE_SAME = ("order:40808", "order:121100")
"""The upper halves of their keys are the same."""


@pytest.mark.parametrize("name", KEYS)
def test_key_is_what_other_languages_compute(name):
    assert key_of(name) == KEYS[name]


def test_prefix_is_part_of_the_key():
    assert key_of("order:42", "shop:") == 2560717841989523926


def test_names_whose_keys_begin_alike_have_keys_of_their_own():
    first, second = (key_of(name) for name in HALF_THE_SAME)
    assert first >> 32 == second >> 32
    assert first != second


@pytest.mark.parametrize("name", ["order:42", "a", "a.b_c~d-e:0", "x" * 58])
def test_plain_name_stays_readable_for_get_lock(name):
    assert word_of(name) == f"dlock:{name}"


@pytest.mark.parametrize("name", ["x" * 59, "x" * MAX_NAME_BYTES, "Order:42", join("ö"), join("a b"), join("%")])
def test_name_that_is_long_or_not_plain_is_hashed(name):
    assert re.fullmatch(r"dlock:#[0-9a-f]{32}", word_of(name))


def test_names_that_mysql_would_take_for_each_other_are_not():
    names = ["order:a", "order:A", "ORDER:a", "x" * 59, "x" * 60, "X" * 60, join("é"), join("e"), join("É")]
    assert len({word_of(name).casefold() for name in names}) == len(names)


@pytest.mark.parametrize("prefix", ["", "Dlock:", "a b", "a'b", "ä", "a" * 32, "a%", "a#"])
def test_prefix_that_leaves_no_room_or_is_not_plain_is_refused(prefix):
    with pytest.raises(ValueError, match="prefix"):
        checked_prefix(prefix)


@pytest.mark.parametrize("prefix", [None, 1, b"a"])
def test_prefix_is_text(prefix):
    with pytest.raises(TypeError, match="prefix"):
        checked_prefix(prefix)


OWNERS = ('{"app":"shop","pid":1}', "*/ DROP TABLE x; --", ":name %s ? $1 '\"", "注文\n", "")


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("name", ["order:42", join("a b", "*/"), join("%s"), join("/")])
def test_comment_says_who_asks_for_what_and_holds_nothing_that_is_sql(name, owner):
    request = AcquireRequest(name, "ab" * 16, 30.0, shared=True, owner=owner)
    written = comment(request)
    assert re.fullmatch(r"/\* dlock [\w.~%/-]+ [0-9a-f]{32} s [\w.~%-]* \*/", written, re.ASCII)
    assert in_comment(f"{written}\nSELECT 1") == Told(name, 0, "ab" * 16, shared=True, owner=owner)


def test_comment_that_was_cut_off_still_tells_the_name():
    written = comment(AcquireRequest("x" * MAX_NAME_BYTES, "ab" * 16, 30.0, owner="y" * 1000))
    told = in_comment(written[:1023])
    assert told is not None
    assert (told.name, told.holder) == ("x" * MAX_NAME_BYTES, "ab" * 16)


def test_label_is_found_by_its_key_among_others():
    text = "shop dlock:17#order:41 dlock:18#order:42"
    assert in_label(text, "dlock:", key_of("order:42")) == Told("order:42", 18)
    assert in_label(text, "dlock:", key_of("order:41")) == Told("order:41", 17)
    assert in_label(text, "dlock:", key_of("order:43")) is None


@pytest.mark.parametrize(
    "text", ["", "shop", "dlock", "dlock:", "dlock:x#order:42", "dlock:#order:42", "xdlock:1#order:42"]
)
def test_text_of_others_is_no_label(text):
    assert in_label(text, "dlock:", key_of("order:42")) is None


def test_label_that_was_cut_off_says_so():
    text = f"dlock:1795269526619918#{'x' * 100}"[:63]
    told = in_label(text, "dlock:", key_of("x" * 100))
    assert told is not None
    assert told.token == 1795269526619918
    assert re.fullmatch("x+…", told.name)


def row(name: str, pid: int, *, granted: bool, application_name: str = "", query: str = "") -> LockRow:
    return LockRow(key_of(name), granted, False, pid, application_name, query, "u@h", "db", 2.0, 1.0)


def test_lock_that_one_session_names_is_listed_with_all_of_its_sessions():
    request = AcquireRequest("order:42", "ab" * 16, 30.0, owner="me")
    rows = [
        row("order:42", 1, granted=True, application_name="dlock:1000000#order:42"),
        row("order:42", 2, granted=False, query=comment(request)),
        row("nobody:knows", 3, granted=True, application_name="pglock"),
    ]
    (state,) = states_of(rows, "dlock:")
    assert state.name == "order:42"
    assert [(holder.token, holder.held_for) for holder in state.holders] == [(1000000, 1.0)]
    assert [(waiter.holder, waiter.owner, waiter.waited_for) for waiter in state.waiters] == [("ab" * 16, "me", 1.0)]
