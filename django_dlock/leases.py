"""The lease that `lock(...)` gives, and what happens to it when its block or its request ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from django_dlock.errors import as_database_error
from django_dlock.ties import current, forget
from dlock_core import engine
from dlock_core.errors import DLockError
from dlock_core.holding import renew
from dlock_core.runtime import ASYNCIO, BLOCKING, run
from dlock_core.tie import LETTING_RUN_OUT
from dlock_core.tied import TiedLease

if TYPE_CHECKING:
    from types import TracebackType

    from django_dlock.ties import DatabaseTie
    from dlock_core.deadline import Seconds
    from dlock_core.lease import Released

__all__ = ["Lease", "release_forgotten", "release_forgotten_async"]


class _AsDjango:
    """Raises the Django twin of a core error."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DLockError):
            twin = as_database_error(error)
            if twin is not error:
                raise twin from error.__cause__


AS_DJANGO: Final = _AsDjango()


class Lease(TiedLease):
    """A lock that this context holds. Its methods do no I/O, but for those that renew and release."""

    __slots__ = ()

    def ensure_held(self) -> None:
        """Raise LeaseLost unless the lease surely holds now; without I/O."""
        with AS_DJANGO:
            super().ensure_held()

    def release(self) -> Released | None:
        """Release now; None when it is not the time: the end of the transaction releases, or the block that was joined.

        Raises NotHeld in a forked child, BackendUnavailable when the store cannot be asked: the lease then runs out.
        """
        with AS_DJANGO:
            is_due = self._leave()
            if self._tie.is_over:
                forget(self._tie)
            return run(engine.release(BLOCKING, self._held)) if is_due else self._held.ended

    async def arelease(self) -> Released | None:
        """See `release`."""
        with AS_DJANGO:
            is_due = self._leave()
            if self._tie.left:  # transactions that are still open belong to threads, which have contexts of their own
                forget(self._tie)
            return await engine.release(ASYNCIO, self._held) if is_due else self._held.ended

    def _exit(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with LETTING_RUN_OUT:
            self.release()
        with AS_DJANGO:
            self._tie.ensure_was_held(error)

    async def _aexit(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tie.is_aborted = error is not None and self._tie.depth == 1
        with LETTING_RUN_OUT:
            await self.arelease()
        with AS_DJANGO:
            self._tie.ensure_was_held(error)

    def renew(self, ttl: Seconds | None = None) -> None:
        """Push the expiry to `ttl` seconds from now (None: its ttl); raises LeaseLost, BackendUnavailable."""
        with AS_DJANGO:
            run(renew(BLOCKING, self._held, ttl))

    async def arenew(self, ttl: Seconds | None = None) -> None:
        """See `renew`."""
        with AS_DJANGO:
            await renew(ASYNCIO, self._held, ttl)


def release_forgotten() -> list[str]:
    """Release what this context still holds outside any transaction, and tell its names; for the end of a request."""
    forgotten = _forgotten()
    for tie in forgotten:
        if tie.leave():
            with LETTING_RUN_OUT:
                run(engine.release(BLOCKING, tie.held))
    return [tie.held.name for tie in forgotten]


async def release_forgotten_async() -> list[str]:
    """See `release_forgotten`."""
    forgotten = _forgotten()
    for tie in forgotten:
        if tie.leave():
            with LETTING_RUN_OUT:
                await engine.release(ASYNCIO, tie.held)
    return [tie.held.name for tie in forgotten]


def _forgotten() -> list[DatabaseTie]:
    forgotten = [tie for tie in current() if not tie.left]
    for tie in forgotten:
        forget(tie)
    return forgotten
