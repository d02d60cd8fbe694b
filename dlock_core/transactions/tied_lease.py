"""The handle of a lease that is tied to transactions, for sync and async code, Django and SQLAlchemy.

What needs the lease, and how it ends, is decided by its `Tie`.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from os import getpid
from typing import TYPE_CHECKING, Any, Never, Protocol, TypeVar

from dlock_core.backend import Released
from dlock_core.errors import BackendUnavailable, DLockError, NotHeld
from dlock_core.leases import engine
from dlock_core.leases.handles import LeaseView, let_expire, warn_unreleased
from dlock_core.leases.multilock import Leases
from dlock_core.runtime import BLOCKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.options import Seconds
    from dlock_core.runtime import Runtime
    from dlock_core.transactions.fencing import FenceForm
    from dlock_core.transactions.tie import Tie

__all__ = ["Tied", "TiedLease", "TiedLeases", "is_in_block", "reraise"]


class Tied(Protocol):
    """What an integration keeps for one lease: its tie, and the connections or the session that it is tied to."""

    tie: Tie

    @property
    def settle_ended(self) -> Callable[[], None] | None:
        """Settles transactions whose end the integration has missed because of an interrupt; None if there are none."""

    def bind(self, database: Any, form: FenceForm, handle: TiedLease) -> None:
        """Tie the caller's open transactions to a new lease, and protect a database from now on."""

    def join(self, database: Any, form: FenceForm, handle: TiedLease) -> None:
        """Attach a handle that joins the lease, and protect a database that was not protected so far."""

    def keep(self, handle: TiedLease) -> None:
        """Keep a handle without a block alive for as long as the integration promises."""

    def begin_failed_exit(self, runtime: Runtime, handle: TiedLease) -> None:
        """Record that the block of a handle is about to be left with an error."""

    def begin_end(self, handle: TiedLease) -> None:
        """Record that a handle is about to be detached, and the lease perhaps to be released."""

    def note_detached(self, runtime: Runtime, handle: TiedLease) -> None:
        """Record that a handle was detached, and forget the lease if nothing needs it."""

    def note_collected(self) -> None:
        """Record, perhaps in the garbage collector, that the last handle was collected before it was released."""

    def forget(self) -> None:
        """Remove the lease from the integration's registry of leases."""


class TiedLease(LeaseView):
    """A handle of a tied lease, for sync and async code, Django and SQLAlchemy."""

    __slots__ = ("__weakref__", "_in_block", "_tied")

    def __init__(self, tied: Tied) -> None:
        self._held = tied.tie.held
        self._tied = tied
        self._in_block = False
        """Whether a block that has not ended holds it."""

    def __del__(self) -> None:
        tied: Tied | None = getattr(self, "_tied", None)  # None if an interrupt stopped the constructor
        if tied is not None and self._held.ended is None and tied.tie.note_collected(self):
            tied.note_collected()
            warn_unreleased(self)

    @staticmethod
    def _own_error(error: DLockError) -> DLockError:
        """Return the integration's own error for one of the core."""
        return error

    async def _renew(self, runtime: Runtime, ttl: Seconds | None) -> None:
        try:
            await engine.renew(runtime, self._held, ttl)
        except DLockError as error:
            reraise(error, self._own_error)

    async def _end(self, runtime: Runtime) -> Released | None:
        """Detach the handle, and release the lease if nothing else needs it; return None if something does."""
        tied, tie, held = self._tied, self._tied.tie, self._held
        if held.pid != getpid():
            held.ensure_own_process()
        try:
            if tie.open and tied.settle_ended is not None:
                tied.settle_ended()
            tied.begin_end(self)
            if tie.detach(self) and held.ended is None:
                if runtime is BLOCKING and tie.runtime is not BLOCKING:
                    tie.runtime.finish(engine.release, held)
                else:
                    await engine.release(runtime, held)
        finally:
            tied.note_detached(runtime, self)
        return held.ended

    async def _release(self, runtime: Runtime) -> Released | None:
        """End it, and repeat what an interrupt has cut short: no other code would come back to finish it."""
        try:
            return await self._end(runtime)
        except DLockError as error:
            reraise(error, self._own_error)
        except BaseException:
            await self._end(runtime)
            raise

    async def _leave_block(self, runtime: Runtime, error: BaseException | None) -> None:
        """End the `with` block; raises LeaseLost if its body ended without an error but only looked protected."""
        self._in_block = False
        if error is not None:
            self._tied.begin_failed_exit(runtime, self)
        try:
            await self._end(runtime)
        except (BackendUnavailable, NotHeld) as failure:
            let_expire(failure)
        except DLockError as failure:
            reraise(failure, self._own_error)
        if error is None and self._held.ended is not Released.RELEASED and (lost := self._tied.tie.loss_of_block()):
            raise self._own_error(lost)


MemberLease = TypeVar("MemberLease", bound=TiedLease)


class TiedLeases(Leases[MemberLease]):
    """Leases that are held together, in the order in which their locks were named."""

    __slots__ = ()

    async def _leave_block(self, runtime: Runtime, error: BaseException | None) -> None:
        """End the `with` block of each, last in, first out, even if one of them raises."""
        stack = AsyncExitStack()
        for lease in self:
            stack.push_async_exit(partial(_leave_block, lease, runtime))
        await stack.__aexit__(None if error is None else type(error), error, None)


async def _leave_block(lease: Any, runtime: Runtime, kind: object, error: BaseException | None, trace: object) -> None:
    await lease._leave_block(runtime, error)  # noqa: SLF001 - called by `Blocks`, never by the lease's user


def is_in_block(handle: TiedLease | None) -> bool:
    """Return whether a block that has not ended holds a lease; False for none."""
    return handle is not None and handle._in_block  # noqa: SLF001 - the user of a lease is not to see it


def reraise(error: DLockError, own_error: Callable[[DLockError], DLockError]) -> Never:
    """Raise an error of the core again, as the integration's own error if there is one."""
    own = own_error(error)
    if own is error:
        raise error
    raise own from error.__cause__
