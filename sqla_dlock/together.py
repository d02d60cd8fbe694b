"""Several locks of sessions as one, all or none: what `lock(lock(...), lock(...))` makes."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from dlock_core import together
from dlock_core.runtime import ASYNCIO, BLOCKING, blocking, run
from dlock_core.together import TiedLocks, leaving
from sqla_dlock.greenlets import SPAWNING, Awaiting, await_, in_greenlet
from sqla_dlock.leases import AsyncLease, Lease

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import TracebackType

    from dlock_core.runtime import Runtime
    from dlock_core.tied import Turn
    from sqla_dlock.ties import SessionTie

__all__ = ["Leases", "Locks", "take_all"]

L = TypeVar("L", Lease, AsyncLease)


class Leases(together.Leases[Lease]):
    """The leases of several locks, in the order in which these were given to `lock`."""

    __slots__ = ()

    def release(self) -> None:
        """Release each of them, see `Lease.release`."""
        with ExitStack() as stack:
            for lease in self:
                stack.callback(lease.release)


class Locks(TiedLocks):
    """Several locks, of any stores, sessions and databases, held all or none; see `lock`."""

    def acquire(self) -> Leases:
        """Hold all of them, each to the end of its session's transaction; raises what `Lock.acquire` raises."""
        leases = self._hold()
        for lease in leases:
            lease._tie.leave_with_transaction(lease._leave)
        return leases

    def __enter__(self) -> Leases:
        return self._blocks.enter(threading.current_thread(), self._hold())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leaving(self._blocks.leave(threading.current_thread())).__exit__(kind, error, trace)

    def _hold(self) -> Leases:
        if in_greenlet():
            return Leases(await_(take_all(self, ASYNCIO, SPAWNING, Awaiting(), Lease)))
        return Leases(run(take_all(self, BLOCKING, BLOCKING, blocking, Lease)))


def take_all(
    locks: TiedLocks, runtime: Runtime, database: Runtime, finish: Callable[..., Any], lease: Callable[[SessionTie], L]
) -> Coroutine[Any, Any, together.Leases[L]]:
    """Acquire the locks of a group, each for its session; see `SessionLock.take`."""

    def grant(each: Any, turn: Turn) -> Any:
        return each.grant(runtime, database, finish, turn)

    async def take_up(each: Any, tie: SessionTie, turn: Turn) -> L:
        return lease(await each.take_up(runtime, database, tie, turn))

    return locks.take(runtime, grant, take_up)
