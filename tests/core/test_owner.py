"""A holder's description of itself is short and printable, and can be read again."""

import asyncio
import json
import os
import threading
from typing import Any

import pytest

from dlock_core import owner


def test_owner_names_process_thread_and_request() -> None:
    mark = owner.request_line.set("POST /orders/42/ship")
    try:
        data = owner.parsed(owner.text())
    finally:
        owner.request_line.reset(mark)
    assert data is not None
    assert data["pid"] == os.getpid()
    assert data["thread"] == threading.current_thread().name
    assert data["request"] == "POST /orders/42/ship"
    assert data["host"]
    assert data["app"]


def test_application_label_replaces_the_program_name() -> None:
    owner.name_application("billing")
    try:
        assert json.loads(owner.text())["app"] == "billing"
    finally:
        owner.name_application("")


@pytest.mark.parametrize("label", [None, 5, b"billing"], ids=repr)
def test_application_label_that_is_no_text_is_refused(label: Any) -> None:
    with pytest.raises(TypeError, match="label"):
        owner.name_application(label)
    assert json.loads(owner.text())["app"]


def test_owner_text_has_no_line_breaks_and_is_short() -> None:
    mark = owner.request_line.set("GET /\r\nSet-Cookie: a=b\0" + "x" * 5000)
    try:
        text = owner.text()
    finally:
        owner.request_line.reset(mark)
    assert text.isprintable()
    assert len(text) < 600


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"app":"shop","host":"h","pid":7,"thread":"t"}', "shop@h pid 7 t"),
        ('{"app":"shop","host":"h","pid":7,"thread":"t","request":"GET /"}', "GET / (shop@h pid 7 t)"),
        ('{"app":"shop","host":"h","pid":7}', "shop@h pid 7 MainThread"),
        ('{"app":"shop","host":"h","pid":7,"task":"t"}', "shop@h pid 7 t"),
        ("{}", "?@? pid ?"),
        ("another library", "another library"),
        ("17", "17"),
        ("a\x1b[2Jb", "a?[2Jb"),
        ("", ""),
    ],
)
def test_owner_is_described_in_words(text: str, words: str) -> None:
    assert owner.describe(text) == words


def test_main_thread_is_left_out_of_the_text_and_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "thread" not in json.loads(owner.text())
    assert owner.describe(owner.text()).endswith(f"pid {os.getpid()} MainThread")
    monkeypatch.setattr(threading.main_thread(), "name", "renamed")
    assert json.loads(owner.text())["thread"] == "renamed"
    assert owner.describe(owner.text()).endswith(" renamed")


def test_another_thread_that_is_called_as_the_main_thread_is_told_apart() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(owner.text()), name=threading.main_thread().name)
    thread.start()
    thread.join()
    assert json.loads(found[0])["thread"] == "MainThread"
    assert "id" in json.loads(found[0])


def test_our_own_text_is_described() -> None:
    assert f"pid {os.getpid()}" in owner.describe(owner.text())


def test_request_is_named_by_method_and_path_while_it_is_served() -> None:
    with owner.serving("POST", "/orders/42/ship") as line:
        assert line == owner.request_line.get() == "POST /orders/42/ship"
    assert owner.request_line.get() == ""


def test_hostile_path_is_one_short_line() -> None:
    with owner.serving("GET", "/\r\n\x1b[31m\u202e" + "x" * 500) as line:
        assert line.startswith("GET /???[31m?xxx")
        assert len(line) == 200


def test_threads_have_numbers_of_their_own_and_the_main_thread_needs_none() -> None:
    found: list[dict[str, object]] = []
    threads = [threading.Thread(target=lambda: found.append(json.loads(owner.text())), name="same") for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert found[0]["id"] != found[1]["id"]
    assert "id" not in json.loads(owner.text())


async def test_tasks_are_told_by_name_and_number() -> None:
    async def tell() -> dict[str, object]:
        return json.loads(owner.text())

    first, second = [await asyncio.create_task(tell(), name="same") for _ in range(2)]
    assert (first["task"], second["task"]) == ("same", "same")
    assert first["id"] != second["id"]
    assert "thread" not in first


def test_owner_text_that_is_too_deep_is_another_librarys() -> None:
    assert owner.parsed("[" * 100_000) is None
