"""Which flow a lease belongs to, and whether that flow has released it.

Work that is started under a lease, in threads and tasks, gets a copy of its owner's context, and the lease with it. If
it is still at work when the owner releases the lease, it must not begin another transaction, which nothing would fence;
the owner itself goes on. Nothing tells a copy of a context from its original. So a lease is removed from the context of
the flow that releases it, or the release is recorded there, and every other context that still has it is a copy.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from django_dlock.calls import acts_for, current_flow, is_called_by
from django_dlock.connections import open_in_thread
from django_dlock.tracker import leases_of_context
from dlock_core.flow import flow_variable
from dlock_core.owner import in_task

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextvars import ContextVar

    from dlock_core.transactions.tie import Tie
    from dlock_core.transactions.tied_lease import TiedLease

__all__ = ["Ownership", "apart", "changes_kept"]

_inside: Final[ContextVar[tuple[tuple[Ownership, object], ...]]] = flow_variable("dlock_inside", ())
"""The transactions under a lease that this flow has begun, its caller, or a function that has returned to it."""

_joined: Final[ContextVar[tuple[tuple[Ownership, ref[TiedLease]], ...]]] = flow_variable("dlock_joined", ())
"""The handles that have joined a lease in this context, or in a function that has handed its own back."""

_kept: Final[ContextVar[tuple[tuple[Ownership, TiedLease], ...] | None]] = flow_variable("dlock_kept_leases", None)
"""Handles without a block and without a transaction: a request keeps them to its end, even if the caller does not.

None outside of a request, where nothing would release them: a handle that its caller drops lets its lease run out."""

_changes: Final[ContextVar[tuple[_Change, ...]]] = flow_variable("dlock_changes", ())
"""What this flow has done last with each lease that it has released, if something may still need it.

A function that has returned to this flow counts as the flow itself."""

_numbers: Final = itertools.count(1)


@dataclass(eq=False, slots=True)  # Not frozen: that would take four times as long to make.
class _Change:
    """A release by a flow, or that it has joined the lease again; work that it has started since knows of it, too."""

    ownership: Ownership
    is_release: bool
    transactions: frozenset[object] = frozenset()
    """The transactions of this flow that were open at the release: until they end, the lease still counts as held."""
    number: int = field(default_factory=_numbers.__next__)
    """The greater one is the later change."""


class Ownership:
    """The handles of a lease, as far as it matters who has them, and whether the lease's owner has released its own.

    The owner is the flow that has acquired the lease, or to which the function that did has returned.
    """

    def __init__(self, tie: Tie) -> None:
        self.tie = tie
        self._owner = current_flow()
        self._first: ref[TiedLease] | None = None
        """The handle that was returned by the acquire."""
        self._asked: frozenset[ref[TiedLease]] = frozenset()
        """The handles whose release the owner has asked for: another task may carry it out."""
        self.is_over = False
        """Whether the owner has released its handles."""

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
        if self.has_departed:
            self._record(_Change(self, is_release=False))
        if self.is_of_this_flow:
            self.is_over = False

    def began(self, transaction: object) -> None:
        """Record that this flow has an open transaction that works under the lease."""
        others = [each for each in _inside.get() if each[1] in each[0].tie.open]
        _inside.set((*others, (self, transaction)))

    def keep(self, handle: TiedLease) -> None:
        """Keep a handle without a block as long as its transaction, or otherwise this request."""
        kept = _kept.get()
        if kept is not None and not self.tie.is_bound:
            _kept.set((*[each for each in kept if each[0].tie.held.ended is None], (self, handle)))

    @property
    def is_of_this_flow(self) -> bool:
        """Whether this flow is the owner, or the owner has called it and waits for it."""
        return acts_for(self._owner)

    @property
    def is_of_this_call(self) -> bool:
        """Whether this flow is the owner, or the owner has called it: then it releases for the owner, however late."""
        return is_called_by(self._owner)

    def handed_back(self) -> None:
        """Record that a function has returned to this flow, together with the lease that it has acquired."""
        self._owner = current_flow()

    def asks(self, handle: TiedLease) -> None:
        """Record that this flow asks for the release of a handle."""
        if self.is_of_this_call:
            self._asked = self._asked & self.tie.handles | {ref(handle)}
            if self.releases(handle):
                self.depart()

    def releases(self, handle: TiedLease) -> bool:
        """Return whether the owner needs the lease no more, apart from this handle, which this flow releases for it.

        A call for which the owner has stopped waiting may release the last handle, too, so that copies are refused
        afterwards. But it is one of them itself: it does not know what the owner has joined since.
        """
        handles, own = self.tie.handles, ref(handle)
        if self._first in handles and self._first != own and self._first not in self._asked:
            return False
        others = handles - {own} - self._asked if handles else handles
        if others and not others.isdisjoint(self._joined_here()):
            return False
        if self.is_of_this_call:
            self.is_over = True
        return self.is_of_this_flow

    def _joined_here(self) -> set[ref[TiedLease]]:
        return {known for each, known in _joined.get() if each is self}

    def end_flow(self) -> bool:
        """Detach the handles of this flow, which ends; return whether the lease has to be released now."""
        self.is_over, is_due = True, False
        for each in (self._first, *self._joined_here()):
            if each is not None and (handle := each()) is not None:
                is_due = self.tie.detach(handle) or is_due
        return is_due

    def depart(self) -> None:
        """Record that this flow has released the lease, so that it may go on afterwards."""
        self._record(_Change(self, is_release=True, transactions=frozenset(self.open_here)))

    def _record(self, change: _Change) -> None:
        others = [each for each in _changes.get() if each.ownership is not self]
        if others:
            here = _here()
            others = [each for each in others if each.ownership in here]
        _changes.set((*others, change))

    def removed(self) -> None:
        """Forget the handles of a lease that was removed from this context."""
        if changes := _changes.get():
            _changes.set(tuple(each for each in changes if each.ownership is not self))
        if kept := _kept.get():
            _kept.set(tuple(each for each in kept if each[0] is not self and each[0].tie.held.ended is None))

    @property
    def _last_change(self) -> _Change | None:
        """What this flow has done last with the lease, if it has released it."""
        return next((each for each in _changes.get() if each.ownership is self), None)

    @property
    def open_here(self) -> set[object]:
        """The open transactions of this flow, or of its caller, that work under the lease."""
        under = self.tie.open
        if not under:
            return set()
        own = {each for ownership, each in _inside.get() if ownership is self}
        if not under <= own and (change := self._last_change) is not None:
            own |= change.transactions
        if not under <= own and not in_task():
            own |= open_in_thread()
        return under & own

    @property
    def has_handle(self) -> bool:
        """Whether a handle of this flow needs the lease."""
        handles = self.tie.handles
        return self._first in handles or not handles.isdisjoint(self._joined_here())

    @property
    def has_departed(self) -> bool:
        """Whether this flow has released the lease, which is still in its context, and has not joined it again."""
        change = self._last_change
        return change is not None and change.is_release

    @property
    def is_apart(self) -> bool:
        """Whether this flow has released its handles, and only blocks and transactions of others need the lease."""
        change = self._last_change
        if change is None or not change.is_release or self.has_handle:
            return False
        return change.transactions.isdisjoint(self.tie.open)

    @property
    def is_left(self) -> bool:
        """Whether this is a copy of the owner's context, and the owner has released the lease, as all others have."""
        return self.is_over and not self.tie.handles and not (self.has_departed or self.is_of_this_flow)


@contextmanager
def changes_kept() -> Iterator[None]:
    """Keep what this flow has released, although the block sets the context to that of another flow.

    Of what both know, the later change counts: asgiref copies the context of a caller before it calls
    `lease.arelease()`, and the other flow may have joined the lease again.
    """
    own = _changes.get()
    yield
    if own:
        here = _here()
        both = sorted({*own, *_changes.get()}, key=lambda change: change.number)
        _changes.set(tuple({each.ownership: each for each in both if each.ownership in here}.values()))


def _here() -> set[Ownership]:
    return {each.ownership for each in leases_of_context.get()}


@contextmanager
def apart() -> Iterator[None]:
    """Hide the leases of this context in the block, a request: code inside neither joins nor ends them.

    Handles that code inside drops are kept, so that `release_forgotten` can be called at the end.
    """
    hidden: dict[ContextVar[Any], object] = {leases_of_context: (), _changes: (), _inside: (), _joined: ()}
    tokens = [(each, each.set(value)) for each, value in (hidden | {_kept: ()}).items()]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)
