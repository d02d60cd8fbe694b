"""If-Match and If-None-Match, as RFC 9110 defines them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlock_core.errors import PreconditionFailed, PreconditionMalformed, PreconditionRequired, StaleObject
from dlock_core.web import http
from dlock_core.web.preconditions import Tag, as_precondition, entity_tag, evaluate, parse

TAG = entity_tag("shop_order", 42, 3)
HTML = entity_tag("shop_order", 42, 3, "html")
OLD = entity_tag("shop_order", 42, 2)


class Order:
    pk = 42


def judge(method, tag=TAG, *, instance=None, required=True, accept_weak=False, **headers):
    given = {name.replace("_", "-").title(): value for name, value in headers.items()}
    request = SimpleNamespace(method=method, headers=given)
    return evaluate(request, instance, tag, name="Order(42)", required=required, accept_weak=accept_weak)


def test_tag_is_one_quoted_word_and_the_same_in_every_process():
    assert TAG == '"JLWj57hCsB9yvzGZn1VbTA"'
    assert entity_tag("shop_order", "42", 3) == TAG  # a key from a URL


ROWS = [
    ("shop_order", 42, 3),
    ("shop_order", 42, 4),
    ("shop_order", 423, 3),
    ("shop_order", ("4", "2"), 3),
    ("shop_order", "4,2", 3),
    ("shop_order", '4", "2', 3),
    ("shop_order4", 2, 3),
    ("shop_invoice", 42, 3),
    ("shop_order", "\ud800", 3),
]


def test_no_two_rows_or_versions_share_a_tag():
    assert len({entity_tag(*row) for row in ROWS}) == len(ROWS)


@given(key=st.text(), version=st.integers(), variant=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=200, deadline=None)
def test_tag_of_any_key_can_be_sent_in_a_header_and_read_again(key, version, variant):
    tag = entity_tag("t", key, version, variant)
    assert tag.isascii()
    assert parse(f" {tag} , W/{tag}", header="If-Match", name="") == [Tag(tag[1:-1]), Tag(tag[1:-1], is_weak=True)]


@pytest.mark.parametrize(
    ("given", "tags"),
    [
        ("*", None),
        (" * ", None),
        ("", []),
        (" , ,", []),
        ('"a"', [Tag("a")]),
        ('""', [Tag("")]),
        ('"a,b", W/"c"', [Tag("a,b"), Tag("c", is_weak=True)]),
        (', "a"\t,,"b",', [Tag("a"), Tag("b")]),
        ('"\xe9\xff"', [Tag("\xe9\xff")]),
    ],
)
def test_lists_of_tags_are_read(given, tags):
    assert parse(given, header="If-Match", name="") == tags


MALFORMED = [
    "abc",
    '"abc',
    'abc"',
    '"a" "b"',
    'w/"a"',
    'W/ "a"',
    '*, "a"',
    '"a", *',
    "'a'",
    '"a"b',
    '"a b"',
    '"\u20ac"',
    '"\x00"',
    '"a"\n',
]


@pytest.mark.parametrize("given", MALFORMED)
def test_malformed_if_match_is_refused_rather_than_overlooked(given):
    with pytest.raises(PreconditionMalformed) as refused:
        judge("PUT", if_match=given)
    assert (refused.value.header, refused.value.given) == ("If-Match", given)
    assert "list of quoted tags" in str(refused.value)


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "POST", "MERGE"])
def test_change_needs_the_tag_that_was_seen(method):
    assert judge(method, if_match=TAG) is False
    with pytest.raises(PreconditionRequired, match="send its ETag back"):
        judge(method)
    with pytest.raises(PreconditionFailed, match="read it again"):
        judge(method, if_match=OLD)
    assert judge(method, required=False) is False


@pytest.mark.parametrize("given", [f'"other", {TAG}', f"{OLD},{TAG}", "*", f",,{TAG}"])
def test_one_match_of_a_list_is_enough_and_a_star_matches_what_exists(given):
    assert judge("PUT", if_match=given) is False


@pytest.mark.parametrize("given", [f"W/{TAG}", f'W/{TAG}, "other"', "", TAG.lower(), entity_tag("shop_order", 43, 3)])
def test_weak_empty_and_foreign_tags_do_not_match(given):
    with pytest.raises(PreconditionFailed):
        judge("PUT", if_match=given)


def test_weak_tag_is_explained_and_may_be_allowed():
    with pytest.raises(PreconditionFailed, match="a weak tag, W/, never matches"):
        judge("PUT", if_match=f"W/{TAG}")
    assert judge("PUT", if_match=f"W/{TAG}", accept_weak=True) is False
    with pytest.raises(PreconditionFailed):
        judge("PUT", if_match=f"W/{OLD}", accept_weak=True)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("given", [TAG, f"W/{TAG}", f'"x", {TAG}', "*"])
def test_reader_who_has_it_is_told_so(method, given):
    assert judge(method, if_none_match=given) is True


@pytest.mark.parametrize("given", [OLD, f"W/{OLD}", "", *MALFORMED])
def test_reader_who_has_it_not_or_cannot_say_gets_all_of_it(given):
    assert judge("GET", if_none_match=given) is False


def test_reader_may_insist_on_a_version():
    assert judge("GET", if_match=TAG) is False
    with pytest.raises(PreconditionFailed):
        judge("GET", if_match=OLD)
    with pytest.raises(PreconditionFailed):  # If-Match comes first
        judge("GET", if_match=OLD, if_none_match=TAG)


def test_change_may_insist_that_there_is_nothing_or_not_this():
    for tags in ("*", TAG, f"W/{TAG}"):
        with pytest.raises(PreconditionFailed) as refused:
            judge("PUT", required=False, if_none_match=tags)
        assert refused.value.header == "If-None-Match"
    assert judge("PUT", required=False, if_none_match=OLD) is False
    with pytest.raises(PreconditionMalformed):
        judge("PUT", required=False, if_none_match="abc")


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "CONNECT"])
def test_methods_that_touch_nothing_have_no_preconditions(method):
    assert judge(method, if_match=OLD, if_none_match=TAG) is False


def test_cache_is_told_representations_apart_but_any_of_them_shows_the_version():
    assert judge("GET", HTML, if_none_match=HTML) is True
    assert judge("GET", HTML, if_none_match=TAG) is False
    assert judge("PUT", HTML, if_match=TAG) is judge("PUT", TAG, if_match=HTML) is False
    with pytest.raises(PreconditionFailed):
        judge("PUT", HTML, if_match=OLD)


def test_several_lines_of_a_header_are_one_list():
    from flask import Flask, request
    from starlette.requests import Request

    lines = [("If-Match", OLD), ("If-Match", TAG)]
    scope = {"type": "http", "method": "PUT", "headers": [(name.lower().encode(), tag.encode()) for name, tag in lines]}
    assert evaluate(Request(scope), None, TAG, name="", required=True, accept_weak=False) is False
    with Flask("shop").test_request_context(method="PUT", headers=lines):
        assert evaluate(request, None, TAG, name="", required=True, accept_weak=False) is False


def test_object_that_changed_after_its_version_was_checked_is_412_not_409():
    checked, other = Order(), Order()
    judge("PUT", instance=checked, if_match=TAG)
    judge("PUT", instance=other, if_match="*")
    conflict = StaleObject(checked, expected=3, found=4)
    assert http.answer(conflict).status == 412
    assert isinstance(as_precondition(conflict), PreconditionFailed)
    assert http.answer(StaleObject(other, expected=3, found=4)).status == 409
    assert http.answer(StaleObject(None, expected=3, found=4)).status == 409


@pytest.mark.parametrize(
    "error",
    [
        PreconditionFailed("Order(42)", header="If-Match", given='"a"'),
        PreconditionMalformed("Order(42)", header="If-Match", given="a"),
        PreconditionRequired("Order(42)"),
    ],
)
def test_errors_carry_their_data_through_a_pickle(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
    assert copy.name == "Order(42)"
