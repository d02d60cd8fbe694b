"""Which flow a lease belongs to, a task or a function of a thread, and whether that flow has released it.

Work that is started under a lease, in threads and tasks, gets a copy of its owner's context, and the lease with it. If
it is still at work when the owner releases the lease, it must not begin another transaction, which nothing would fence;
the owner itself goes on. Nothing tells a copy of a context from its original. So a lease is removed from the context of
the flow that releases it, and every other context that still has it is a copy.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from django_dlock.tracker import leases_of_context
from dlock_core.flow import flow_variable
from dlock_core.owner import in_task

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextvars import ContextVar

    from dlock_core.transactions.tie import Tie
    from dlock_core.transactions.tied_lease import TiedLease

__all__ = ["Ownership", "apart"]

_joined: Final[ContextVar[tuple[tuple[Ownership, ref[TiedLease]], ...]]] = flow_variable("dlock_joined", ())
"""The handles that have joined a lease in this context, or in a function that has handed its own back."""

_kept: Final[ContextVar[tuple[tuple[Ownership, TiedLease], ...] | None]] = flow_variable("dlock_kept_leases", None)
"""Handles without a block and without a transaction: a request keeps them to its end, even if the caller does not.

None outside of a request, where nothing would release them: a handle that its caller drops lets its lease run out."""

_released: Final[ContextVar[tuple[Ownership, ...]]] = flow_variable("dlock_released", ())
"""The leases that this flow has released, or is about to, and that something still needs."""


class Ownership:
    """The handles of a lease, as far as it matters who has them, and whether the lease's owner has released its own.

    The owner is the task that acquired the lease, or that has called the function of a thread which did. Where there is
    no such task, or it has ended, it is the flow that releases the first handle.
    """

    def __init__(self, tie: Tie) -> None:
        self.tie = tie
        self._task = _current_task()
        self._first: ref[TiedLease] | None = None
        """The handle that was returned by the acquire."""
        self._loose: frozenset[ref[TiedLease]] = frozenset()
        """The handles without a block, which may be in the hands of another flow than that which joined."""
        self.is_over = False
        """Whether the owner needs the lease no more."""

    def acquired(self, handle: TiedLease) -> None:
        """Record the first handle."""
        self._first = ref(handle)

    def joined(self, handle: TiedLease) -> None:
        """Record that this flow has joined the lease."""
        _joined.set(
            (*[(each, known) for each, known in _joined.get() if known in each.tie.handles], (self, ref(handle)))
        )
        if self in _released.get():
            _released.set(tuple(each for each in _released.get() if each is not self))

    def keep(self, handle: TiedLease) -> None:
        """Keep a handle without a block as long as its transaction, or otherwise this request."""
        self._loose = self._loose & self.tie.handles | {ref(handle)}
        kept = _kept.get()
        if kept is not None and not self.tie.is_bound:
            _kept.set((*[each for each in kept if each[0].tie.held.ended is None], (self, handle)))

    def handed_back(self) -> None:
        """Record that a function has returned to this flow, together with the lease that it has acquired."""
        if self._task is None:
            self._task = _current_task()

    def releases(self, handle: TiedLease | None) -> bool:
        """Return whether this flow needs the lease no more, apart from this handle; record it if this is the owner.

        For the task that owns the lease, the function of a thread cannot tell whether that task or another has called
        it: `note_returned` records it when the function returns.

        Args:
            handle: What this flow releases; None if a function has done so that has returned to it.
        """
        handles, own = self.tie.handles, None if handle is None else ref(handle)
        if self._first in handles and self._first != own:
            return False
        others = handles - {own}
        if others and not others.isdisjoint(self.of_this_flow):
            return False
        task = None if self._task is None else self._task()
        is_passed_on = task is None or task.done()
        if not is_passed_on and self._task is _current_task():
            self.is_over = True
            return True
        if (not is_passed_on and in_task()) or not self._is_own(own):
            return False
        self.is_over = self.is_over or is_passed_on
        return True

    def _is_own(self, handle: ref[TiedLease] | None) -> bool:
        return handle is not None and (handle == self._first or (not self.is_over and (self, handle) in _joined.get()))

    @property
    def of_this_flow(self) -> set[ref[TiedLease]]:
        """The handles that this flow has, or may have: not those of blocks in other flows."""
        known: set[Any] = {self._first, *self._loose, *[each for owner, each in _joined.get() if owner is self]}
        return known & self.tie.handles

    def end_flow(self) -> bool:
        """Detach the handles of this flow, which ends; return whether the lease has to be released now."""
        self.is_over, is_due = True, False
        for each in self.of_this_flow:
            if (handle := each()) is not None:
                is_due = self.tie.detach(handle)
        return is_due

    def note_released_here(self) -> None:
        """Record that this flow has released the lease, or is about to, so that it may go on afterwards."""
        known = _released.get()
        if self not in known:
            _released.set((*[each for each in known if each.tie.held.ended is None], self))

    def removed(self) -> None:
        """Forget the handles of a lease that was removed from this context."""
        if released := _released.get():
            _released.set(tuple(each for each in released if each is not self))
        if kept := _kept.get():
            _kept.set(tuple(each for each in kept if each[0] is not self and each[0].tie.held.ended is None))

    @property
    def is_released_here(self) -> bool:
        """Whether this flow has released the lease, or is about to, and something may still need it."""
        released = _released.get()
        return bool(released) and self in released

    @property
    def is_left(self) -> bool:
        """Whether this is a copy of the owner's context, and the owner has released the lease, as all others have."""
        return self.is_over and not self.tie.handles and not self.is_released_here


@contextmanager
def apart() -> Iterator[None]:
    """Hide the leases of this context in the block, a request: code inside neither joins nor ends them.

    Handles that code inside drops are kept, so that `release_forgotten` can be called at the end.
    """
    token, kept = leases_of_context.set(()), _kept.set(())
    try:
        yield
    finally:
        leases_of_context.reset(token)
        _kept.reset(kept)


def _current_task() -> ref[asyncio.Task[Any]] | None:
    """Return the only weak reference to the task that runs now; None in a thread."""
    task = asyncio.current_task() if in_task() else None
    return None if task is None else ref(task)
