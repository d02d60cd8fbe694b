"""Clients learn what failed and when to retry, but no tokens, versions or words of a holder or store."""

from __future__ import annotations

import json
import math
import pickle
import sqlite3
from contextlib import closing
from html.parser import HTMLParser

import pytest

from dlock_core import errors
from dlock_core.owner import serving
from dlock_core.transactions.fencing import FenceEntry, refusal
from dlock_core.web import http

FIREFOX = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


class Order:
    pk = 42


def unavailable():
    error = errors.BackendUnavailable("order:42", reason="redis://:hunter2@db:6379 refused")
    error.__cause__ = ConnectionError("hunter2")
    return error


EVERY_ANSWER = [
    (errors.AcquireTimeout("order:42", waited=1.0, held_by="hunter2@db", retry_after=7.2), 423, "8"),
    (errors.RowLocked("order:42", waited=1.0), 423, "1"),
    (errors.StaleObject(Order(), expected=1, found=987654), 409, None),
    (errors.PreconditionFailed("Order(42)", header="If-Match", given='"98765"'), 412, None),
    (errors.PreconditionMalformed("Order(42)", header="If-Match", given="98765"), 400, None),
    (errors.PreconditionRequired("Order(42)"), 428, None),
    (errors.NoSuchKey("order:42", key="987654x"), 404, None),
    (errors.StaleToken("order:42", token=987654, highest=987655), 409, None),
    (errors.LeaseLost("order:42", token=987654, reason="hunter2"), 409, None),
    (unavailable(), 503, "1"),
]


@pytest.mark.parametrize(("error", "status", "retry_after"), EVERY_ANSWER)
def test_every_conflict_has_its_status_and_only_those_that_pass_say_when_to_retry(error, status, retry_after):
    answer = http.answer(error)

    assert answer.status == status
    assert answer.headers.get("Retry-After") == retry_after


def test_busy_database_is_not_told_as_somebody_at_work_on_the_object(tmp_path):
    """SQLite has one writer at a time, which may be at work on something else."""
    with closing(sqlite3.connect(tmp_path / "a", isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with closing(sqlite3.connect(tmp_path / "a", timeout=0)) as other, pytest.raises(sqlite3.Error) as caught:
            other.execute("BEGIN IMMEDIATE")
    error = refusal(caught.value, FenceEntry("order:10", 1, "a" * 32), "sqlite")

    told = json.loads(http.answer(error).body)
    assert (told["status"], told["title"]) == (423, "Database is busy")
    assert "somebody" not in told["detail"].lower()
    assert "the database is busy" in str(error)
    assert pickle.loads(pickle.dumps(error)).is_database


@pytest.mark.parametrize("error", [error for error, *_ in EVERY_ANSWER])
@pytest.mark.parametrize("accept", ["application/json", "text/html"])
def test_neither_tokens_nor_versions_nor_what_holder_or_store_said_reach_the_client(error, accept):
    text = http.answer(error, accept).body.decode()

    assert "hunter2" not in text
    assert "98765" not in text


@pytest.mark.parametrize(
    "error",
    [
        errors.AlreadyHeld("order:42"),
        errors.NotHeld("order:42"),
        errors.NotSupported("no row locks"),
        errors.SnapshotTooOld("order:42", isolation="REPEATABLE READ"),
        errors.DLockError("?"),
    ],
)
def test_mistakes_of_the_program_are_not_hidden_behind_a_polite_answer(error):
    assert http.answer(error) is None


def test_an_integrations_own_subclass_is_answered_like_the_core_error():
    class Twin(errors.RowLocked, RuntimeError):
        pass

    assert http.answer(Twin("order:42")).status == 423


@pytest.mark.parametrize(
    ("seconds", "header"),
    [(0, "1"), (-3, "1"), (0.2, "1"), (1.01, "2"), (59, "59"), (math.inf, "86400"), (math.nan, "1")],
)
def test_retry_after_is_whole_seconds_and_at_least_one(seconds, header):
    error = errors.AcquireTimeout("order:42", waited=0, retry_after=seconds)

    assert http.answer(error).headers["Retry-After"] == header


def test_json_is_a_problem_document_that_names_the_lock():
    answer = http.answer(errors.AcquireTimeout("order:42", waited=0))

    assert answer.headers["Content-Type"] == "application/problem+json"
    assert json.loads(answer.body) == {
        "type": "urn:dlock:acquire-timeout",
        "title": "In use by someone else",
        "status": 423,
        "detail": "Someone else is working on order:42. Try again in a moment.",
        "lock": "order:42",
    }


def test_a_conflict_about_a_row_names_the_object():
    body = json.loads(http.answer(errors.StaleObject(Order(), expected=1)).body)

    assert (body["type"], body["object"]) == ("urn:dlock:stale-object", "Order(42)")


def test_html_has_a_language_a_title_and_one_heading_with_the_same_words():
    seen = []

    class Page(HTMLParser):
        def handle_starttag(self, tag, attrs):
            seen.append((tag, dict(attrs)))

        def handle_data(self, data):
            seen.append(data)

    answer = http.answer(errors.RowLocked("order:42"), FIREFOX)
    Page().feed(answer.body.decode())

    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert ("html", {"lang": "en"}) in seen
    assert seen[seen.index(("title", {})) + 1] == seen[seen.index(("h1", {})) + 1] == "In use by someone else"


def test_a_hostile_name_stays_text_in_html():
    class Hostile:
        pk = "<script>alert(1)</script>{detail}&\udc80"

    page = http.answer(errors.StaleObject(Hostile(), expected=1), "text/html").body.decode()

    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "{detail}&amp;" in page


def test_caches_learn_that_the_answer_depends_on_accept():
    assert http.answer(errors.RowLocked("order:42")).headers["Vary"] == "Accept"


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        ("", False),
        ("*/*", False),
        (FIREFOX, True),
        ("text/html", True),
        ("TEXT/HTML", True),
        ("text/*", True),
        ("application/json", False),
        ("application/problem+json", False),
        ("text/html, application/json", False),
        ("text/html, */*", True),
        ("text/html, application/*", True),
        ("application/json, text/html;q=0.9", False),
        ("application/json;q=0.5, text/html;q=0.6", True),
        ("application/json;q=0.5, application/problem+json;q=0.7, text/html;q=0.6", False),
        ("text/html ; level=1 ; q=0.1, application/json;q=0.2", False),
        ("text/html;q=0, */*", False),
        ("application/json;q=0, application/problem+json;q=0, */*;q=0.1", True),
        ("image/png", False),
        ("text/html;q=nan", False),
        ("text/html;q=7", False),
        ("text/html;q=", False),
        (";;,,/;q", False),
    ],
)
def test_html_is_for_those_who_prefer_it_and_everybody_else_gets_json(accept, html):
    assert http.prefers_html(accept) is html


def test_length_of_the_body_is_told():
    answer = http.answer(errors.RowLocked("örder:42"), "text/html")

    assert answer.headers["Content-Length"] == str(len(answer.body))


@pytest.mark.parametrize(("error", "level"), [(errors.LeaseLost("order:42"), "INFO"), (unavailable(), "ERROR")])
def test_conflict_is_everyday_and_a_missing_store_an_error_in_the_log(caplog, error, level):
    caplog.set_level("INFO", logger="dlock")
    with serving("POST", "/orders/42/ship"):
        assert http.respond(error, "text/html") == http.answer(error, "text/html")

    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (level, f"POST /orders/42/ship: {error}")
    ]


def test_what_is_not_answered_is_not_logged(caplog):
    caplog.set_level("INFO", logger="dlock")

    assert http.respond(errors.NotSupported("no row locks")) is None
    assert not caplog.records
