"""Which flow a lease belongs to, a task or a call in a thread, and whether that flow has released it.

Work that is started under a lease, in threads and tasks, gets a copy of its owner's context, and the lease with it. If
it is still at work when the owner releases the lease, it must not begin another transaction, which nothing would fence;
the owner itself goes on. Nothing tells a copy of a context from its original. So a lease is removed from the context of
the flow that releases it, and every other context that still has it is a copy.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import ref

from django_dlock.tracker import leases_of_context
from dlock_core.flow import flow_variable
from dlock_core.owner import in_task

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextvars import ContextVar

    from dlock_core.transactions.tie import Tie
    from dlock_core.transactions.tied_lease import TiedLease

__all__ = ["Ownership", "apart", "begin_call", "flow_kept", "is_called"]

_call: Final[ContextVar[object]] = flow_variable("dlock_call", None)
"""The call by asgiref in which this flow runs: a weak reference to the task that it has begun, or any object."""

_joined: Final[ContextVar[tuple[tuple[Ownership, ref[TiedLease]], ...]]] = flow_variable("dlock_joined", ())
"""The handles that have joined a lease in this context, or in a function that has handed its own back."""

_kept: Final[ContextVar[tuple[tuple[Ownership, TiedLease], ...] | None]] = flow_variable("dlock_kept_leases", None)
"""Handles without a block and without a transaction: a request keeps them to its end, even if the caller does not.

None outside of a request, where nothing would release them: a handle that its caller drops lets its lease run out."""

_released: Final[ContextVar[tuple[_Departure, ...]]] = flow_variable("dlock_released", ())
"""What this flow, or a function that has returned to it, has released although something may still need it."""


@dataclass(frozen=True, eq=False, slots=True)
class _Departure:
    """A release by a flow, known in its context and in those that are copied from it afterwards."""

    ownership: Ownership
    transactions: frozenset[object]
    """The transactions of this flow that were open then: until they end, the lease still counts as held here."""


class Ownership:
    """The handles of a lease, as far as it matters who has them, and whether the lease's owner has released its own.

    The owner is the flow that has acquired the lease, or to which the function that did has returned.
    """

    def __init__(self, tie: Tie) -> None:
        self.tie = tie
        self._owner = _current_flow()
        self._first: ref[TiedLease] | None = None
        """The handle that was returned by the acquire."""
        self._asked: frozenset[ref[TiedLease]] = frozenset()
        """The handles whose release the owner has asked for: another task may carry it out."""
        self.is_over = False
        """Whether the owner has released its handles."""
        self._departure: _Departure | None = None
        """The last one; contexts that know only of an earlier one are copies that were made in between."""

    def acquired(self, handle: TiedLease) -> None:
        """Record the first handle."""
        self._first = ref(handle)
        hash(self._first)  # The reference caches the hash, so it can be looked up even after the handle has gone.

    def joined(self, handle: TiedLease) -> None:
        """Record that this flow has joined the lease."""
        others = [(each, known) for each, known in _joined.get() if known in each.tie.handles]
        own = ref(handle)
        hash(own)
        _joined.set((*others, (self, own)))
        if self._owner == _current_flow():
            self._departure = None

    def keep(self, handle: TiedLease) -> None:
        """Keep a handle without a block as long as its transaction, or otherwise this request."""
        kept = _kept.get()
        if kept is not None and not self.tie.is_bound:
            _kept.set((*[each for each in kept if each[0].tie.held.ended is None], (self, handle)))

    def handed_back(self) -> None:
        """Record that a function has returned to this flow, together with the lease that it has acquired."""
        self._owner = _current_flow()

    def asks(self, handle: TiedLease) -> None:
        """Record that this flow asks for the release of a handle."""
        if self._owner != _current_flow():
            return
        here = {each.ownership for each in leases_of_context.get()}
        if any(each.ownership not in here for each in _released.get()):
            _released.set(tuple(each for each in _released.get() if each.ownership in here))
        self._asked = self._asked & self.tie.handles | {ref(handle)}
        if self.releases(handle):
            self.depart()

    def releases(self, handle: TiedLease | None) -> bool:
        """Return whether this flow needs the lease no more, apart from this handle; record it if this is the owner.

        A function that asgiref has called cannot tell whether its caller is the owner: that is known, and recorded,
        when it returns.

        Args:
            handle: What this flow releases; None if a function has done so that has returned to it.
        """
        handles, own = self.tie.handles, None if handle is None else ref(handle)
        if self._first in handles and self._first != own and self._first not in self._asked:
            return False
        others = handles - {own} - self._asked if handles else handles
        if others and not others.isdisjoint(self._joined_here()):
            return False
        if self._owner != _current_flow():
            is_own = own is not None and (own == self._first or own in self._joined_here())
            return is_own and not self.is_over and is_called()
        self.is_over = True
        if own in handles:  # Work that is started after the release has copies of the last departure.
            self._departure = None
        return True

    def _joined_here(self) -> set[ref[TiedLease]]:
        return {known for each, known in _joined.get() if each is self}

    def end_flow(self) -> bool:
        """Detach the handles of this flow, which ends; return whether the lease has to be released now."""
        self.is_over, is_due = True, False
        for each in (self._first, *self._joined_here()):
            if each is not None and (handle := each()) is not None:
                is_due = self.tie.detach(handle) or is_due
        return is_due

    def depart(self, transactions: Iterable[object] = ()) -> None:
        """Record that this flow has released the lease, so that it may go on afterwards.

        Args:
            transactions: Those of this flow that are open, and under the lease until they end.
        """
        self._departure = _Departure(self, frozenset(transactions))
        _released.set((*[each for each in _released.get() if each.ownership is not self], self._departure))

    def forget_departure(self) -> None:
        """Forget that this flow has released the lease."""
        if released := _released.get():
            _released.set(tuple(each for each in released if each.ownership is not self))

    def removed(self) -> None:
        """Forget the handles of a lease that was removed from this context."""
        if self.is_over:  # Otherwise this is a function, and its caller is to know.
            self.forget_departure()
        if kept := _kept.get():
            _kept.set(tuple(each for each in kept if each[0] is not self and each[0].tie.held.ended is None))

    @property
    def has_handle(self) -> bool:
        """Whether a handle of this flow needs the lease."""
        handles = self.tie.handles
        return self._first in handles or not handles.isdisjoint(self._joined_here())

    @property
    def has_departed(self) -> bool:
        """Whether this flow has released the lease, which is still in its context."""
        return self._departure is not None and self._departure in _released.get()

    @property
    def is_apart(self) -> bool:
        """Whether this flow has released its handles, and only blocks and transactions of others need the lease."""
        departure = self._departure
        if departure is None or not self.has_departed or self.has_handle:
            return False
        return departure.transactions.isdisjoint(self.tie.open)

    @property
    def is_left(self) -> bool:
        """Whether this is a copy of the owner's context, and the owner has released the lease, as all others have."""
        return self.is_over and not self.tie.handles and not self.has_departed


@contextmanager
def flow_kept() -> Iterator[None]:
    """Keep what this flow has released, and its call, although the block sets the context to that of another flow.

    asgiref copies the context of a caller before it calls `lease.arelease()`.
    """
    own, call = _released.get(), _call.get()
    yield
    _call.set(call)
    if own:
        here, known = {each.ownership for each in leases_of_context.get()}, _released.get()
        _released.set((*known, *[each for each in own if each not in known and each.ownership in here]))


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


def is_called() -> bool:
    """Return whether this flow may be a call, which hands its context back to its caller: asgiref's, or a thread's."""
    return not in_task() or _call.get() == _current_flow()


def begin_call() -> None:
    """Record that asgiref has begun a call in this flow, the step of a thread or a task."""
    _call.set(_current_flow() if in_task() else object())


def _current_flow() -> object:
    """Return the only weak reference to the task that runs now; in a thread, its number and the call in it.

    A thread that waits in `async_to_sync` runs the steps of other tasks meanwhile.
    """
    task = asyncio.current_task() if in_task() else None
    return (threading.get_ident(), _call.get()) if task is None else ref(task)
