"""The commands print the JSON that is documented: the same fields, with values of the same types."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from dlock_core import Lock
from tests.cli.running import dlock
from tests.waiting import until

DOCS = Path(__file__).parents[2] / "docs/reference"
EXAMPLE = re.compile(r"^```json\n(.*?)^```", re.M | re.S)


def documented(page: str) -> list[Any]:
    return [json.loads(text) for text in EXAMPLE.findall((DOCS / page).read_text())]


def shape(value: Any, key: str = "") -> Any:
    """Return what a program can rely on: fields and types of values; an owner's own description may be anything."""
    if key in ("owner", "left_out"):
        return "an object"
    if isinstance(value, dict):
        return {name: shape(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return "number or null" if value is None or type(value) in (int, float) else type(value).__name__


@pytest.fixture
def contended(backend, redis_server):
    """Hold a lease for which another thread waits."""
    with Lock(backend, "order:1") as lease:
        thread = threading.Thread(target=lambda: Lock(backend, "order:1", wait=60).acquire().release())
        thread.start()
        until(lambda: len(told(redis_server, "list")["entries"]) >= 2)
        yield redis_server
    thread.join()
    del lease


def told(server, *args: str) -> Any:
    return json.loads(dlock(*args, "--store", server.url, "--format", "json").out)


@pytest.mark.parametrize("verb", [["list"], ["show", "order:1"]])
def test_picture_is_as_documented(contended, verb):
    (example,) = documented("snapshot.md")
    actual = json.loads(
        dlock(*verb, "--store", contended.url, "--store", "down=redis://localhost:1", "--format", "json").out
    )
    assert actual["schema"] == example["schema"] == 1
    assert set(actual) >= set(example)
    assert [shape(entry) for entry in actual["entries"]] == [shape(entry) for entry in example["entries"][:2]]
    assert shape(actual["unreadable"]) == shape(example["unreadable"])


def test_doctor_is_as_documented(redis_server):
    _, example, _ = documented("commands.md")
    assert shape(told(redis_server, "doctor")) == shape(example)


def test_release_is_as_documented(backend, redis_server):
    lease = Lock(backend, "order:1").acquire()
    example, *_ = documented("commands.md")
    assert shape(told(redis_server, "release", "order:1", "--no-input")) == shape(example)
    lease.release()


def test_purge_is_as_documented(tmp_path):
    from sqlalchemy import create_engine

    from sqla_dlock.fencing import metadata

    url = f"sqlite:///{tmp_path}/shop.db"
    engine = create_engine(url)
    metadata.create_all(engine)
    engine.dispose()
    *_, example = documented("commands.md")
    assert shape(json.loads(dlock("purge", "--database", url, "--format", "json").out)) == shape(example)
