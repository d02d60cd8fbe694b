"""Background threads: one that sleeps until the next thing is due, and those that call the application's callbacks.

Work reaches these threads through deques and sets, never under a mutex: a signal handler or a finalizer may also hand
over work, and may interrupt the code that would hold the mutex. No thread survives a fork, so every object with a
thread registers here what a forked child must do.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from inspect import ismethod
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlock_core.runtime import Wakeup, clock, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[[], object]")

__all__ = ["Background", "CallbackThread", "Scheduler", "after_fork_in_child", "call_in_background", "callback_thread"]

logger = logging.getLogger("dlock")

MAX_IDLE_S: Final = 10.0
"""A thread that has had no work for this long ends. A scheduler also checks its work at least this often."""
MAX_CALLBACK_THREADS: Final = 8
"""This many callbacks may block before others have to wait for them."""
RESTART_DELAY_S: Final = 0.1
"""Pause before a thread that has failed continues, so that a permanent fault does not keep a processor busy."""


_in_child: Final[list[Callable[[], object]]] = []
_in_child_of: Final[weakref.WeakKeyDictionary[Any, Callable[[Any], object]]] = weakref.WeakKeyDictionary()
"""For each object that has to act in a forked child, the function of its class."""


def after_fork_in_child(function: F) -> F:
    """Call a function in every child that this process forks.

    A bound method, of which an object may register one, is forgotten along with its object.
    """
    if ismethod(function):
        _in_child_of[function.__self__] = function.__func__
    else:
        _in_child.append(function)
    return function


def _run_in_child() -> None:
    methods: list[Callable[[], object]] = [partial(function, owner) for owner, function in list(_in_child_of.items())]
    for function in [*_in_child, *methods]:
        try:
            function()
        except Exception:  # The others must still be called: each of them protects what belongs to the parent.
            logger.exception("dlock: a forked child could not forget what belongs to its parent: %r", function)


os.register_at_fork(after_in_child=_run_in_child)


_own_threads: Final[set[int]] = set()


def is_own_thread() -> bool:
    """Return whether the caller runs in one of these threads, which no exception may end."""
    return threading.get_ident() in _own_threads


class Background:
    """A daemon thread that runs `serve` whenever there is work, and is replaced if it has ended for any reason.

    Args:
        name: The thread's name.
        purpose: The purpose of the thread, as an infinitive; logged if no thread can be started.
        serve: Does the work, and returns when there has been none for a while.
        has_work: Returns whether there is work; asked once more when `serve` has returned.
    """

    def __init__(self, name: str, purpose: str, serve: Callable[[], None], has_work: Callable[[], object]) -> None:
        self._name, self._purpose, self._serve, self._has_work = name, purpose, serve, has_work
        self._running = threading.Lock()
        """The thread keeps it locked for as long as it lives."""

    @property
    def is_running(self) -> bool:
        """The thread lives."""
        return self._running.locked()

    def ensure(self) -> None:
        """Start the thread unless it is running; call this after handing over the work."""
        if not self._running.locked():
            self._start()

    def _start(self) -> None:
        try:
            start_thread(threading.Thread(target=self._run, name=self._name, daemon=True))
        except RuntimeError:  # Too many threads, or the interpreter is shutting down; the next call tries again.
            logger.exception("dlock: there is no thread %s", self._purpose)

    def _run(self) -> None:
        # Two threads may be started at once, of which one ends here. Work that arrives while the thread is ending is
        # seen by the thread, which checks again after unlocking, or by the caller, which checks the mutex after handing
        # it over.
        while self._has_work() and self._running.acquire(blocking=False):
            try:
                _own_threads.add(threading.get_ident())
                self._serve()
            except BaseException as error:  # noqa: BLE001 - this thread must outlive any surprise
                call_in_background(
                    logger.error, "dlock: the thread %s has failed, and goes on", self._purpose, exc_info=error
                )
                time.sleep(RESTART_DELAY_S)
            finally:
                _own_threads.discard(threading.get_ident())
                self._running.release()


class Scheduler:
    """A thread that sleeps until the next thing is due; it ends when nothing was planned for a while.

    Its owner keeps the plan, changes it freely and then calls `plan`.

    Args:
        name: The thread's name.
        purpose: What the thread is for, as an infinitive; logged when no thread can be started.
        next_due: Returns the time on our clock at which something is due next, None when nothing is planned.
        run_due: Does what is due. It is also called early, after `plan` or `MAX_IDLE_S`.
    """

    def __init__(
        self, name: str, purpose: str, next_due: Callable[[], float | None], run_due: Callable[[], object]
    ) -> None:
        self._next_due, self._run_due = next_due, run_due
        self._wake = Wakeup()
        self.sleeps_until = math.inf
        """When the thread checks its work next, `math.inf` while it is not running. Only the thread sets it, and work
        that is not due earlier need not be planned."""
        self.was_woken = False
        """Whether the last sleep was cut short, for something that is due earlier."""
        self.thread = Background(name, purpose, self._serve, lambda: next_due() is not None)

    def plan(self, due: float) -> None:
        """Wake the thread at `due`, or earlier; call this after `next_due` includes it. Never blocks."""
        if due < self.sleeps_until:
            self._wake.set()
        self.thread.ensure()

    def _serve(self) -> None:
        was_idle = False
        try:
            while (is_planned := self._next_due() is not None) or not was_idle:
                was_idle = not is_planned
                self._sleep()
                self._run_due()
        finally:
            self.sleeps_until = math.inf  # Before `Background` checks for work again, so that no work is missed.

    def _sleep(self) -> None:
        latest = clock() + MAX_IDLE_S
        # A caller that plans something now compares it with `sleeps_until`; work that was planned before that was set
        # is found by checking again after setting it. So the loop ends only if nothing was planned in between.
        while self.sleeps_until != (nearest := min(due if (due := self._next_due()) is not None else latest, latest)):
            self.sleeps_until = nearest
        self.was_woken = self._wake.wait(nearest - clock())
        self._wake.clear()  # Before the plan is read again.


class CallbackThread:
    """Calls callbacks one after the other, in a thread where a blocking or failing callback does no harm."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = SimpleQueue()
        self._unfinished: deque[None] = deque()
        """One entry for each callback that has not returned."""
        self._thread = Background("dlock-callbacks", "to call callbacks", self._serve, self._has_jobs)

    def __call__(self, function: Callable[..., object], *args: Any, **options: Any) -> None:
        """Call the function after the earlier ones; returns at once."""
        self._unfinished.append(None)
        self._jobs.put((function, args, options))
        self._thread.ensure()

    def pending(self) -> int:
        """Return how many callbacks have not returned."""
        return len(self._unfinished)

    def _has_jobs(self) -> bool:
        return not self._jobs.empty()

    def _serve(self) -> None:
        with suppress(Empty):
            while True:
                function, args, options = self._jobs.get(timeout=MAX_IDLE_S)
                try:
                    function(*args, **options)
                except BaseException:
                    with suppress(BaseException):
                        logger.exception("dlock: a callback failed: %r", function)
                finally:
                    self._unfinished.pop()
                    del function, args, options  # They may keep a lease alive.


_callback_threads: Final[list[CallbackThread]] = [CallbackThread() for _ in range(MAX_CALLBACK_THREADS)]


def callback_thread() -> CallbackThread:
    """Return the thread with the least work; callbacks that must keep their order go to the same one."""
    return min(_callback_threads, key=CallbackThread.pending)


def call_in_background(function: Callable[..., object], *args: Any, **options: Any) -> None:
    """Call a function in another thread, so that it cannot delay a lock; returns at once."""
    callback_thread()(function, *args, **options)


@after_fork_in_child
def _forget_threads() -> None:
    _own_threads.clear()
    _callback_threads[:] = [CallbackThread() for _ in range(MAX_CALLBACK_THREADS)]
