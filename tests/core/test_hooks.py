"""Hooks see everything and change nothing."""

import functools
import logging
from typing import Any

import pytest

from dlock_core import Lock
from dlock_core.observability import hooks
from dlock_core.runtime import BLOCKING, run
from dlock_core.testing import MemoryBackend
from tests.waiting import until


def test_hook_sees_a_lock_taken_and_released() -> None:
    seen: list[hooks.Event] = []
    hooks.subscribe(seen.append)
    try:
        with Lock(MemoryBackend(), "a") as lease:
            token = lease.token
    finally:
        hooks.unsubscribe(seen.append)
    with Lock(MemoryBackend(), "b"):
        pass
    assert [(event.kind, event.name, event.token) for event in seen] == [
        ("acquired", "a", token),
        ("released", "a", token),
    ]
    assert all(event.seconds >= 0 for event in seen)


def test_hook_that_fails_is_logged_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[hooks.Event] = []

    def fail(_: hooks.Event) -> None:
        raise ZeroDivisionError

    hooks.subscribe(fail)
    hooks.subscribe(seen.append)
    try:
        with caplog.at_level(logging.ERROR, logger="dlock"), Lock(MemoryBackend(), "a"):
            pass
    finally:
        hooks.unsubscribe(fail)
        hooks.unsubscribe(seen.append)
    assert len(seen) == 2
    assert "a hook failed on acquired of lock 'a'" in caplog.text


async def notify(_: hooks.Event) -> None:
    """Tell somebody; nobody would await it."""


@pytest.mark.parametrize(
    "hook",
    [None, 5, notify, functools.partial(notify), lambda: None],
    ids=["none", "number", "async", "partial", "no argument"],
)
def test_hook_that_cannot_be_called_with_an_event_is_refused(hook: Any) -> None:
    before = hooks.subscribed
    with pytest.raises(TypeError, match=r"^hook is "):
        hooks.subscribe(hook)
    assert hooks.subscribed == before


def test_callback_whose_answer_was_never_run_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def stop(*_: object) -> None:
        pass

    def hook(event: hooks.Event) -> object:
        return stop(event)

    store = MemoryBackend()
    hooks.subscribe(hook)  # type: ignore[arg-type]
    try:
        lease = Lock(store, "late", on_lost=lambda: stop()).acquire()  # type: ignore[arg-type, return-value]  # noqa: PLW0108
    finally:
        hooks.unsubscribe(hook)  # type: ignore[arg-type]
    lease._held.lose("a test")
    lease.release()
    until(lambda: "on_lost of lock 'late' did nothing: it returned a coroutine" in caplog.text)
    assert "a hook did nothing on acquired of lock 'late': it returned a coroutine" in caplog.text


def test_unknown_hook_may_be_unsubscribed() -> None:
    hooks.unsubscribe(print)


def test_interrupt_in_the_middle_of_a_hook_leaves_no_grant_behind() -> None:
    def interrupt(_: hooks.Event) -> None:
        raise KeyboardInterrupt

    store = MemoryBackend()
    hooks.subscribe(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            Lock(store, "a").acquire()
    finally:
        hooks.unsubscribe(interrupt)
    assert run(store.inspect(BLOCKING)) == []
