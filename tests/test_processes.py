"""The helper that runs other processes keeps its own promises."""

import os

import pytest
from django.db import transaction
from django.db.models import F

from tests.processes import Link, run, worker
from tests.testapp.models import Counter


def add_one(link: Link, alias: str) -> int:
    with transaction.atomic(using=alias):
        Counter.objects.using(alias).filter(name="a").update(value=F("value") + 1)
    return os.getpid()


def echo(link: Link) -> None:
    while True:
        link.say(link.hear())


def fail(link: Link) -> None:
    raise ValueError("told to fail")


def test_processes_share_the_database_of_the_test(database):
    Counter.objects.using(database).create(name="a")
    pids = run(add_one, [(database,)] * 3)
    assert len({*pids, os.getpid()}) == 4
    assert Counter.objects.using(database).get().value == 3


def test_failure_in_a_process_surfaces_with_its_traceback():
    with worker(fail) as one, pytest.raises(RuntimeError, match="told to fail"):
        one.result()


def test_killed_process_says_nothing_more():
    with worker(echo) as one:
        one.say("a")
        assert one.hear() == "a"
        one.kill()
        with pytest.raises((EOFError, OSError)):
            one.hear()


def test_paused_process_answers_after_it_is_resumed():
    with worker(echo) as one:
        one.say("a")
        one.hear()
        one.pause()
        one.say("b")
        assert not one.pipe.poll(0.05)
        one.resume()
        assert one.hear() == "b"
