"""Releases that failed, until a store that could not be asked answers again.

A holder who is done must not keep others waiting for a whole ttl because its store was away for a moment: restarting,
loading its data, busy with a script. So a release that failed is repeated behind the caller, until the store has
answered or the lease has run out. A repeated release names its holder, and so ends no later lease of that lock.
"""

from __future__ import annotations

import logging
from operator import attrgetter
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from dlock_core.errors import BackendUnavailable
from dlock_core.observability import hooks
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.scheduler import Scheduler, after_fork_in_child, call_in_background

if TYPE_CHECKING:
    from dlock_core.backend import Backend
    from dlock_core.leases.lease import LeaseRecord
    from dlock_core.runtime import Runtime

__all__ = ["forget_releases", "release_again"]

logger = logging.getLogger("dlock")

MIN_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
"""Between two attempts to release in the background: the pause doubles while the store does not answer."""


async def release_again(runtime: Runtime, held: LeaseRecord) -> bool:
    """Repeat a release that has failed: at once, and if that fails, too, in the background.

    Returns whether this call has ended the grant; raises BackendUnavailable when the store could not be asked now.
    """
    try:
        return await _repeat(runtime, held)
    except BackendUnavailable as error:
        if not error.refused:
            _release_in_background(held)
        raise


async def _repeat(runtime: Runtime, held: LeaseRecord) -> bool:
    held.begin_release()
    found = await held.backend.release(runtime, held.request, held.granted)
    is_first = held.ended is None
    held.end(found)
    return is_first


class _Late:
    """A lease whose release has failed, kept here until the store has answered or the lease has run out."""

    __slots__ = ("attempts", "held", "until")

    def __init__(self, held: LeaseRecord, until: float) -> None:
        self.held, self.until, self.attempts = held, until, 0


class _LateReleases:
    """The thread that repeats the releases of one store: not the watchdog's, because renewals cannot wait for it.

    A store that is silent keeps it for the time limit of a request. So a failure ends the round, however many leases
    are left, and those come first in the next one: only some of them may be on a node that is away.
    """

    def __init__(self) -> None:
        self._late: dict[str, _Late] = {}
        """By holder. Any thread may add, or remove all."""
        self._due, self._pause = 0.0, MIN_PAUSE_S
        self._scheduler = Scheduler("dlock-releases", "to release leases: they run out", self._next_due, self._run_due)

    def add(self, held: LeaseRecord, seconds: float) -> None:
        """Repeat the release of a lease that holds for so many seconds."""
        now = clock()
        soon = now + MIN_PAUSE_S
        self._due = min(self._due, soon) if self._late else soon
        self._late[held.request.holder] = _Late(held, now + seconds)
        self._scheduler.plan(self._due)

    def forget(self) -> None:
        """Let all of them run out."""
        self._late.clear()

    def _next_due(self) -> float | None:
        return self._due if self._late else None

    def _run_due(self) -> None:
        if clock() < self._due:
            return
        for late in sorted([*self._late.values()], key=attrgetter("attempts")):
            if not self._is_over(late):
                self._due, self._pause = clock() + self._pause, min(2 * self._pause, MAX_PAUSE_S)
                return
            self._late.pop(late.held.request.holder, None)
        self._pause = MIN_PAUSE_S

    def _is_over(self, late: _Late) -> bool:
        """Try once more to release a lease that has neither ended nor run out; False: the store cannot be asked yet."""
        held = late.held
        if held.ended is not None or clock() >= late.until:
            return True
        late.attempts += 1
        try:
            if run(_repeat(BLOCKING, held)) and hooks.subscribed:
                call_in_background(held.emit_released)  # What a hook does delays no other release.
        except BackendUnavailable as error:
            return error.refused
        except BaseException as error:  # noqa: BLE001 - the other leases depend on this thread
            call_in_background(logger.error, "dlock: a release failed, and its lease runs out", exc_info=error)
        return True


_late_releases: WeakKeyDictionary[Backend, _LateReleases] = WeakKeyDictionary()


def _release_in_background(held: LeaseRecord) -> None:
    """Repeat a release that could not be carried out, while the lease lasts."""
    seconds = held.remaining()
    if seconds > 0.0:
        known = _late_releases.get(held.backend)
        if known is None:
            known = _late_releases.setdefault(held.backend, _LateReleases())
        known.add(held, seconds)


def forget_releases(backend: Backend) -> None:
    """Repeat no release of a store that is closed: what it could not release runs out."""
    known = _late_releases.get(backend)
    if known is not None:
        known.forget()


@after_fork_in_child
def _begin_anew() -> None:
    _late_releases.clear()  # The threads did not come along, and the leases are the parent's.
