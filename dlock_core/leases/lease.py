"""What a process knows of one lease, without I/O: until when it surely holds, and how it ended.

Validity is local and monotonic, counted from before the attempt was sent, less an allowance for drift, so that a
process which was stopped sees at once that it lost the lease. (Idea: the Redlock page of the Redis documentation.)
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dlock_core.errors import LeaseLost, NotHeld
from dlock_core.observability import hooks
from dlock_core.runtime import clock
from dlock_core.scheduler import CallbackThread, callback_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.backend import Backend, Granted, Released, Request

__all__ = ["valid_until"]

DRIFT: Final = 0.01
"""How much faster our clock may run than the store's: one percent, far more than quartz does."""
GUARD: Final = 0.002
"""Seconds for the coarseness of expiry in the store."""


def valid_until(sent: float, valid_for: float) -> float:
    """Give the moment until which a grant asked for at `sent` surely holds."""
    return sent + valid_for * (1 - DRIFT) - GUARD


logger = logging.getLogger("dlock")


class Held:
    """One grant: shared by every handle that joined it, known to the watchdog, released once."""

    __slots__ = (
        "__weakref__",
        "backend",
        "depth",
        "due",
        "ended",
        "granted",
        "in_time",
        "lost_because",
        "now",
        "on_lost",
        "pid",
        "release_requests",
        "renewing",
        "request",
        "since",
        "teller",
        "trouble",
        "until",
        "untold",
    )

    def __init__(
        self, backend: Backend, request: Request, granted: Granted, sent: float, now: Callable[[], float] = clock
    ) -> None:
        self.backend, self.request, self.granted, self.now = backend, request, granted, now
        self.since, self.until = sent, valid_until(sent, granted.valid_for)
        self.pid = os.getpid()
        self.depth = 0
        """Handles that have not been left."""
        self.due = 0
        self.renewing = True
        self.in_time, self.release_requests = False, 0
        self.ended: Released | None = None
        self.lost_because, self.trouble = "", "it ran out before it was renewed"
        self.on_lost: tuple[Callable[[], None], ...] = ()
        self.untold = True
        """Deleted by whoever tells of the loss: the deletion of an attribute succeeds only once."""
        self.teller: CallbackThread | None = None
        """Where the events of a lost lease are told, so that they keep their order."""

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def token(self) -> int:
        return self.granted.token

    def remaining(self) -> float:
        """Give the seconds for which the lease surely holds; 0.0 once it is lost, released or another process's."""
        if self.lost_because or self.ended is not None or self.pid != os.getpid():
            return 0.0
        left = self.until - self.now()
        return left if left > 0.0 else 0.0

    def is_lost(self) -> bool:
        """Tell whether the lease ended otherwise than by its release."""
        return self.ended is None and self.remaining() == 0.0

    def ensure(self) -> None:
        """Raise LeaseLost unless the lease surely holds."""
        if self.remaining() == 0.0:
            raise LeaseLost(self.name, token=self.token, reason=self.why())

    def ensure_own_process(self) -> None:
        """Raise NotHeld in a forked child: the lease is its parent's."""
        if self.pid != os.getpid():
            raise NotHeld(self.name, reason=f"it belongs to process {self.pid}, which forked this one")

    def why(self) -> str:
        """Say why the lease does not hold."""
        if self.pid != os.getpid():
            return f"it belongs to process {self.pid}, which forked this one"
        return "it was released" if self.ended is not None else self.lost_because or self.trouble

    def prepare_release(self) -> None:
        """Note that a release is about to be sent: nobody renews it any more, and whether it surely holds still."""
        self.renewing = False
        self.in_time = self.in_time or self.remaining() > 0.0
        self.release_requests += 1

    def end(self, found: Released) -> Released:
        """Note how the lease ended; the first note stands."""
        self.ended = self.ended or found
        return self.ended

    def extend(self, sent: float, valid_for: float) -> None:
        """Note a renewal that was asked for at `sent`; an answer after the lease ran out does not heal it."""
        if self.is_lost():
            self.lose()
        else:
            self.until = max(self.until, valid_until(sent, valid_for))

    def lose(self, reason: str = "") -> None:
        """Note the loss, and have it told, once, in another thread: what callbacks do delays nobody."""
        if self.ended is not None:
            return
        self.lost_because = self.lost_because or reason or self.trouble
        try:
            del self.untold
        except AttributeError:
            return
        chosen = callback_thread()
        chosen(self._tell_loss, self.lost_because)
        self.teller = chosen  # Only now: whoever sees it tells of a later event, which must come after the loss.

    def emit(self, kind: hooks.Kind, reason: str = "") -> None:
        """Tell the hooks of an event of this lease, after its loss if that is being told."""
        event = (kind, self.name, self.token, self.now() - self.since, reason, False, self)
        if self.teller is None:
            hooks.emit(*event)
        else:
            self.teller(hooks.emit, *event)

    def _tell_loss(self, reason: str) -> None:
        with suppress(BaseException):  # A handler of the application's logging must not keep the callbacks from us.
            logger.warning("dlock: lease of lock %r (token %d) is lost: %s", self.name, self.token, reason)
        hooks.emit("lost", self.name, self.token, self.now() - self.since, reason, lease=self)
        for callback in self.on_lost:
            try:
                callback()
            except BaseException:
                with suppress(BaseException):
                    logger.exception("dlock: on_lost of lock %r failed", self.name)
