"""Shows a lease to the fence, whatever the database; heals a store that lost its data and its time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlock_core import engine, hooks
from dlock_core.errors import DLockError, RowLocked, SnapshotTooOld, StaleToken
from dlock_core.fencing import Claim
from dlock_core.retry import Trouble, classify
from dlock_core.runtime import blocking, clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.held import Held

__all__ = ["Guard", "refusal"]


class Guard:
    """One lease at the fence; `deadline`, the end of its acquire, bounds the first wait for a row lock."""

    def __init__(
        self, held: Held, *, wait: float | None, deadline: float, finish: Callable[..., Any] = blocking
    ) -> None:
        self.held, self.wait, self.deadline, self.finish = held, wait, deadline, finish
        self._is_proven = False

    def __call__(self, step: Callable[[Claim], None]) -> None:
        """Carry out an admit, announce or confirm; raises StaleToken.

        A store that lost its data and its time gave a current holder too small a token: it gets a greater one, but
        never after the first admit, since what was read under the smaller one may be old by now.
        """
        try:
            self._prove(step)
        except StaleToken as error:
            hooks.refused(error)
            raise
        self._is_proven = True

    def _prove(self, step: Callable[[Claim], None]) -> None:
        try:
            step(self.claim())
        except StaleToken as error:
            if self._is_proven or not self.finish(engine.raise_token, self.held, error.highest or 0):
                raise
            step(self.claim())

    def claim(self) -> Claim:
        """Say what the lease shows to the fence now."""
        request = self.held.request
        limit = self.wait if self._is_proven else max(0.0, self.deadline - clock())
        return Claim(
            request.name, self.held.token, request.holder, request.shared, None if self.wait is None else limit
        )


def refusal(error: BaseException, claim: Claim, database: str) -> DLockError | None:
    """Say what an error of the database means at the fence: RowLocked, SnapshotTooOld; None: what its driver says."""
    trouble = classify(error)
    if trouble is Trouble.LOCK_TIMEOUT:
        return RowLocked(claim.name, waited=claim.limit or 0.0)
    if trouble is Trouble.SERIALIZATION and database == "sqlite":
        return SnapshotTooOld(claim.name, isolation="deferred SQLite")
    return None
