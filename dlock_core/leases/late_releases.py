"""Repeats releases and abandons that failed until an unreachable store answers again.

A holder that is done, or a waiter that has given up, must not keep others waiting for a whole ttl because the store was
unavailable for a moment: restarting, loading its data, busy with a script. So a failed request is repeated in the
background, until the store has answered or the lease has run out. It names its holder, and so ends no later lease of
that lock.
"""

from __future__ import annotations

import logging
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.scheduler import Scheduler, after_fork_in_child, call_in_background

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from dlock_core.backend import Backend
    from dlock_core.runtime import Runtime

    Step = Callable[[Runtime], Coroutine[Any, Any, object]]

__all__ = ["repeat_in_background"]

logger = logging.getLogger("dlock")

MIN_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
"""Between two rounds of attempts: the pause doubles while the store does not answer."""
MAX_FAILING_S: Final = 0.05
"""A round in which an attempt has failed ends when it has taken this long."""
MAX_ABANDONED: Final = 20
"""While this many steps are pending for a store, no abandon is added: every failed acquire would leave one. A release
is always added."""


class _Late:
    """A step that has failed, kept until the store has answered or the lease that it would end has run out."""

    __slots__ = ("holder", "step", "tried", "until")

    def __init__(self, holder: str, step: Step, tried: float, until: float) -> None:
        self.holder, self.step, self.tried, self.until = holder, step, tried, until


class _LateSteps:
    """The thread that repeats failed steps at one store. It is not the watchdog's, because renewals cannot wait for it.

    A silent store blocks it for the time limit of a request. So a round ends soon after a failure, and the step that
    was tried longest ago comes first: perhaps only some of the steps concern a node that is unavailable, and new
    failures there must not delay the others.
    """

    def __init__(self) -> None:
        self._late: dict[str, _Late] = {}
        """By holder. Any thread may add entries."""
        self._due, self._pause = 0.0, MIN_PAUSE_S
        self._scheduler = Scheduler("dlock-releases", "to release leases: they run out", self._next_due, self._run_due)

    def add(self, holder: str, step: Step, seconds: float, *, is_release: bool = True) -> None:
        """Repeat a step for this many seconds, unless it is an abandon and too many are pending."""
        if not is_release and len(self._late) >= MAX_ABANDONED:
            return
        now = clock()
        soon = now + MIN_PAUSE_S
        self._due = min(self._due, soon) if self._late else soon
        self._late[holder] = _Late(holder, step, now, now + seconds)
        self._scheduler.plan(self._due)

    def _next_due(self) -> float | None:
        return self._due if self._late else None

    def _run_due(self) -> None:
        began, is_away = clock(), False
        if began < self._due:
            return
        for late in sorted([*self._late.values()], key=attrgetter("tried")):
            if self._is_over(late):
                self._late.pop(late.holder, None)
            else:
                is_away = True
            if is_away and clock() > began + MAX_FAILING_S:
                break
        if is_away:
            self._due, self._pause = clock() + self._pause, min(2 * self._pause, MAX_PAUSE_S)
        else:
            self._pause = MIN_PAUSE_S

    def _is_over(self, late: _Late) -> bool:
        """Try a step once more, unless its time is over; return False if the store still cannot be reached."""
        late.tried = clock()
        if late.tried >= late.until:
            return True
        try:
            run(late.step(BLOCKING))
        except BackendUnavailable as error:
            return error.refused
        except BaseException as error:  # noqa: BLE001 - the other leases depend on this thread
            call_in_background(logger.error, "dlock: a release failed, and its lease runs out", exc_info=error)
        return True


_late_steps: WeakKeyDictionary[Backend, _LateSteps] = WeakKeyDictionary()


def repeat_in_background(backend: Backend, holder: str, step: Step, seconds: float, *, is_release: bool = True) -> None:
    """Repeat `step(runtime)`, which has failed, while the lease lasts: for this many seconds."""
    if seconds > 0.0:
        known = _late_steps.get(backend)
        if known is None:
            known = _late_steps.setdefault(backend, _LateSteps())
        known.add(holder, step, seconds, is_release=is_release)


@after_fork_in_child
def _begin_anew() -> None:
    _late_steps.clear()  # The threads were not forked, and the leases are the parent's.
