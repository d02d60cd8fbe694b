"""The thread that sleeps until something is due, and what a forked child does first."""

import os
import threading
import weakref

import pytest

from dlock_core import scheduler
from dlock_core.runtime import clock
from dlock_core.scheduler import Scheduler, after_fork_in_child
from tests.garbage import collect_garbage
from tests.waiting import until

WITHIN = 30.0


class Alarms:
    """Events that are set when they are due."""

    def __init__(self) -> None:
        self.planned: dict[threading.Event, float] = {}
        self.scheduler = Scheduler("test-alarms", "to ring", self.next_due, self.ring)

    def next_due(self) -> float | None:
        return min(self.planned.values(), default=None)

    def ring(self) -> None:
        for event in [event for event, due in [*self.planned.items()] if due <= clock()]:
            del self.planned[event]
            event.set()

    def plan(self, seconds: float) -> threading.Event:
        event = threading.Event()
        self.planned[event] = due = clock() + seconds
        self.scheduler.plan(due)
        return event


def test_what_is_due_earlier_wakes_the_thread_that_sleeps_for_something_later() -> None:
    alarms = Alarms()
    late = alarms.plan(WITHIN * 2)
    early = alarms.plan(0.05)
    assert early.wait(WITHIN)
    assert not late.is_set()


def test_thread_ends_when_nothing_was_planned_for_a_while_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_IDLE_S", 0.01)
    alarms = Alarms()
    for _ in range(3):
        assert alarms.plan(0.0).wait(WITHIN)
        until(lambda: not alarms.scheduler.thread.is_running)


class Inherited:
    forgotten = False

    def forget(self) -> None:
        self.forgotten = True


def test_forked_child_runs_every_hook_whatever_one_raises_and_none_of_an_object_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "_in_child", [])
    monkeypatch.setattr(scheduler, "_in_child_of", weakref.WeakKeyDictionary())
    kept, gone = Inherited(), Inherited()
    after_fork_in_child(gone.forget)
    after_fork_in_child(_fail)
    after_fork_in_child(kept.forget)
    del gone
    collect_garbage()
    assert [*scheduler._in_child_of] == [kept]
    child = os.fork()
    if child == 0:
        os._exit(0 if kept.forgotten else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not kept.forgotten


def _fail() -> None:
    raise ZeroDivisionError


class SoftLimit(Exception):
    """Raised by a signal handler."""


def test_interrupt_inside_the_start_of_a_thread_arrives_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python forgets a thread that could not be started, which is a KeyError if the thread is already running."""
    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    start, limbo = getattr(threading, name), threading._limbo  # type: ignore[attr-defined]
    left_by_others = set(limbo)  # An interrupted start() leaves its thread there; other tests have done so.

    def interrupted(*args: object, **options: object) -> None:
        start(*args, **options)
        until(lambda: set(limbo) <= left_by_others)
        raise SoftLimit

    alarms = Alarms()
    with monkeypatch.context() as patches:
        patches.setattr(threading, name, interrupted)
        with pytest.raises(SoftLimit):
            alarms.plan(0.01)
    assert alarms.plan(0.01).wait(WITHIN)
