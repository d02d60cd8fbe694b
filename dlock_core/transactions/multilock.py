"""`lock(...)` of every integration for several locks, all or none, over one or more databases and stores."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Never

from dlock_core.errors import DLockError, LeaseLost
from dlock_core.leases.blocks import Blocks
from dlock_core.leases.multilock import acquire_all
from dlock_core.options import Seconds, deadline, unknown_option, wait_seconds
from dlock_core.runtime import clock
from dlock_core.transactions.tied_lease import reraise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import EllipsisType

    from dlock_core.backend import Backend
    from dlock_core.leases.acquisition import Acquisition
    from dlock_core.runtime import DatabaseRuntime
    from dlock_core.transactions.tie import Tie
    from dlock_core.transactions.transaction_lock import LockAcquire, TiedLock

__all__ = ["TiedLocks"]


class TiedLocks:
    """Locks that are held all or none; `wait` limits the whole acquire (default: the wait of each, from its start)."""

    _leases_type: ClassVar[type[Any]]
    """The class of the result when all are held."""

    def __init__(
        self,
        locks: Sequence[Any],
        kind: type[TiedLock],
        *,
        wait: Seconds | EllipsisType | None = ...,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise unknown_option(unknown, ("wait (of all together; the others are given to each lock)",))
        for each in locks:
            if isinstance(each, TiedLocks):
                raise TypeError(f"{each!r} are several locks already: pass each of them to one lock()")
            if not isinstance(each, kind):
                raise TypeError(f"every part must be a lock, or none: {each!r} is not")
        self.locks = tuple(locks)
        self.wait = wait if wait is ... else wait_seconds(wait)
        self._blocks = Blocks()

    def __repr__(self) -> str:
        return f"<locks {', '.join(repr(each.name) for each in self.locks)}>"

    async def _hold(self, runtime: DatabaseRuntime, enter: Callable[[Any], object] | None = None) -> Any:
        """Acquire all of them, and only then tie them to their transactions, because that may begin their snapshots.

        See `LockAcquire.hold` for `enter`, which gets all handles.
        """
        group = _Group(self, runtime)
        try:
            finish = partial(group.bind, self._leases_type, enter)
            return await acquire_all(runtime, group.members, group.until, finish)
        except DLockError as error:
            reraise(error, group.acquires[0].own_error)


class _Group:
    """One acquire of several locks, in the order that all callers use; a lock that one owner lists twice once."""

    def __init__(self, locks: TiedLocks, runtime: DatabaseRuntime) -> None:
        since = clock()
        self.acquires: list[LockAcquire] = [
            each._new_acquire(runtime, wait=locks.wait, since=since)  # noqa: SLF001 - no user is to call it
            for each in locks.locks
        ]
        ranked = sorted(self.acquires, key=_rank)
        for _, same_name in groupby(ranked, key=lambda each: _rank(each)[:2]):
            _refuse_impossible(*same_name)
        self.until = max(deadline(since, each.wait) for each in self.acquires)
        """When the longest of the waits is over."""
        same_wish: dict[tuple[str, str, int], list[LockAcquire]] = {}
        for each in ranked:
            same_wish.setdefault((*_rank(each)[:2], each.owner_key), []).append(each)
        self.members = [_Member(*acquires) for acquires in same_wish.values()]

    async def bind(self, leases_type: type[Any], enter: Callable[[Any], object] | None) -> Any:
        """Tie each lease to its transactions, and return all handles in the order of the given locks."""
        for each in self.acquires:
            each.for_block = enter is not None
        for member in self.members:
            await member.bind()
        for member in self.members:
            member.check()
        leases = leases_type(each.lease for each in self.acquires)
        if enter is None:
            for each in self.acquires:
                each.keep()
        else:
            enter(leases)
        return leases


class _Member:
    """One lock of a group, or several with one name and owner, of which the first is acquired; a `GroupMember`."""

    def __init__(self, first: LockAcquire, *others: LockAcquire) -> None:
        self._first, self._all = first, (first, *others)

    @property
    def backend(self) -> Backend:
        return self._first.backend

    @property
    def pending(self) -> Acquisition | None:
        return self._first.pending

    async def acquire(self) -> None:
        await self._first.acquire()

    async def bind(self) -> None:
        """Tie the lease to its transactions, once for each of the locks that share it."""
        for each in self._all:
            each.tied = self._first.tied
            each.take_handle()
            await each.bind()

    def check(self) -> None:
        """Raise LeaseLost if the lease was lost during the wait for the others."""
        tied: Any = self._first.tied
        tie: Tie = tied.tie
        tie.held.ensure()
        if not tie.is_joinable:
            raise LeaseLost(tie.held.name, token=tie.held.token, reason="another thread has released it")

    def detach(self) -> None:
        for each in self._all:
            each.detach()

    async def undo(self) -> None:
        for each in reversed(self._all):
            await each.undo()

    def undo_later(self) -> None:
        self._first.undo_later()  # The others have joined its lease.


def _rank(acquire: LockAcquire) -> tuple[str, str, bool]:
    return acquire.store.alias, acquire.lock.name, acquire.lock.shared  # Exclusive first: a shared one can join it.


def _refuse_impossible(first: LockAcquire, *others: LockAcquire) -> None:
    """Raise ValueError for locks of one name that have no defined order, or cannot be held together."""
    name, alias = first.lock.name, first.store.alias
    if any(each.backend is not first.backend for each in others):
        raise ValueError(
            f"the lock {name!r} is requested in two stores that both have the alias {alias!r}, so in no order that all "
            "callers use: configure the stores under different names, and refer to them by these"
        )
    if not first.lock.shared and any(each.owner_key != first.owner_key for each in others):
        raise ValueError(f"two sessions cannot hold the lock {name!r} together, unless it is shared: pass one of them")
