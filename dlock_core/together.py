"""Several locks as one, all or none, of any stores and databases: `lock(lock(...), lock(...))` of the integrations.

Everybody takes them in the order of their stores' aliases and their names, so overlapping groups cannot deadlock
(ordered resources: Havender, "Avoiding deadlock in multitasking systems", 1968). Those of one store come in one request
where the store can and all of them are free.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, ExitStack
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from dlock_core import attempt, many
from dlock_core.deadline import Seconds, deadline, wait_seconds
from dlock_core.holding import Blocks
from dlock_core.runtime import clock
from dlock_core.tie import LETTING_RUN_OUT, Tie
from dlock_core.tied import TiedLock, Turn, give_back, let_go

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from types import EllipsisType

    from dlock_core.runtime import Runtime
    from dlock_core.store import Store
    from dlock_core.tied import TiedLease

__all__ = ["Leases", "TiedLocks", "leaving", "leaving_async"]

L = TypeVar("L", bound="TiedLease")


class Leases(tuple[L, ...]):
    """Leases that are held together, in the order in which their locks were named."""

    __slots__ = ()

    @property
    def lost(self) -> bool:
        """One of them is lost, and so are all."""
        return any(lease.lost for lease in self)

    def remaining(self) -> float:
        """Give the seconds for which all of them surely hold."""
        return min(lease.remaining() for lease in self)

    def ensure_held(self) -> None:
        """Raise LeaseLost unless all of them surely hold."""
        for lease in self:
            lease.ensure_held()


class TiedLocks:
    """Locks that are held all or none; `wait` bounds the whole acquire (left out: the wait of each, from its start)."""

    def __init__(
        self, locks: Sequence[Any], kind: type[TiedLock], *, wait: Seconds | EllipsisType | None = ...
    ) -> None:
        for each in locks:
            if not isinstance(each, kind):
                raise TypeError(f"every part must be a lock, or none: {each!r} is not")
        self.locks = tuple(locks)
        self.wait = wait if wait is ... else wait_seconds(wait)
        self._blocks = Blocks()

    def __repr__(self) -> str:
        return f"<locks {', '.join(repr(each.name) for each in self.locks)}>"

    async def take(
        self,
        runtime: Runtime,
        grant: Callable[[Any, Turn], Awaitable[Any]],
        take_up: Callable[[Any, Any, Turn], Awaitable[L]],
    ) -> Leases[L]:
        """Acquire all of them, and only then tie them to their transactions, whose snapshots may begin with that."""
        turns = _Turns(runtime, self)
        try:
            for store, places in groupby(turns.order, key=turns.store_at):
                await turns.grant(store, list(places), grant)
            for place in turns.order:
                turns.leases[place] = await take_up(self.locks[place], turns.ties[place], turns.turns[place])
            for tie in turns.ties.values():
                tie.check()
        except BaseException as error:
            turns.leave()
            await attempt.undo(runtime, turns.give_back(), error, turns.until)
            raise
        return Leases(turns.leases[place] for place in range(len(self.locks)))


class _Turns:
    """One acquire of a group, from its first request to its end."""

    def __init__(self, runtime: Runtime, group: TiedLocks) -> None:
        self.runtime, self.locks = runtime, group.locks
        self.stores: list[Store] = [each.place() for each in self.locks]
        self.order = sorted(range(len(self.locks)), key=self._rank)
        for _, places in groupby(self.order, key=lambda place: self._rank(place)[:2]):
            self._refuse_impossible(*places)
        since = clock()
        self.turns = [Turn(wait=group.wait, since=since) for _ in self.locks]
        waits = map(TiedLock.seconds, self.locks, self.stores, self.turns)
        self.until = max(deadline(since, wait) for wait in waits)
        """When the longest of the waits is over."""
        self.ties: dict[int, Any] = {}
        self.leases: dict[int, Any] = {}

    def _rank(self, place: int) -> tuple[str, str, bool]:
        each = self.locks[place]
        return self.stores[place].alias, each.name, each.shared  # exclusive first: a shared one can join it

    def _refuse_impossible(self, first: int, *others: int) -> None:
        """Raise ValueError for locks of one name that have no order among them, or cannot be held together."""
        name, alias, shared = self.locks[first].name, self.stores[first].alias, self.locks[first].shared
        if any(self.stores[place].backend is not self.stores[first].backend for place in others):
            raise ValueError(
                f"the lock {name!r} is asked for in two stores that both go by {alias!r}, and so in no order that "
                "everybody keeps: configure the stores under names of their own, and ask for them by these"
            )
        if not shared and any(self._wish(place) != self._wish(first) for place in others):
            raise ValueError(f"two sessions cannot hold the lock {name!r} together, unless it is shared: ask for one")

    def _wish(self, place: int) -> tuple[str, int]:
        return self.locks[place].name, id(self.locks[place].whose())

    def store_at(self, place: int) -> Store:
        return self.stores[place]

    async def grant(self, store: Store, places: list[int], grant: Callable[[Any, Turn], Awaitable[Any]]) -> None:
        firsts = {self._wish(place): place for place in reversed(places)}
        await self._ask_for_all(store, list(firsts.values())[::-1])
        for place in places:
            first = firsts[self._wish(place)]
            again = self.ties.get(first)
            self.ties[place] = await grant(self.locks[place], self.turns[place]) if again is None else again

    async def _ask_for_all(self, store: Store, places: list[int]) -> None:
        """Take what is free in one request, if nothing stands against it."""
        if len(places) > 1 and all(self.locks[place]._joined(store, self.runtime) is None for place in places):
            requests = [self.locks[place].request(store, self.turns[place]) for place in places]
            for place, request in zip(places, requests, strict=True):
                self.turns[place].request = request
            taken = await many.at_once(self.runtime, store.backend, requests, self.until)
            for place, held in zip(places, taken, strict=False):
                self.locks[place].watch(held)
                self.turns[place].held = held

    def leave(self) -> None:
        """Need nothing of it any more."""
        for place, tie in self.ties.items():
            if self.turns[place].is_new:
                let_go(tie)
            elif place in self.leases:
                self.leases[place]._leave()

    async def give_back(self) -> None:
        """Leave nothing in the stores: neither what was taken up, nor what was granted and had no turn."""
        for place, tie in reversed(self.ties.items()):
            if self.turns[place].is_new:
                await give_back(self.runtime, tie)
        for store, turn in zip(self.stores, self.turns, strict=True):
            if turn.held is not None:
                await give_back(self.runtime, Tie(turn.held))
            elif turn.request is not None:
                with LETTING_RUN_OUT:
                    await store.backend.withdraw(self.runtime, turn.request)


def leaving(leases: Iterable[Any]) -> ExitStack:
    """Leave the blocks of leases, last in, first out, whatever one of them raises."""
    stack = ExitStack()
    for lease in leases:
        stack.push(lease._exit)
    return stack


def leaving_async(leases: Iterable[Any]) -> AsyncExitStack:
    """See `leaving`."""
    stack = AsyncExitStack()
    for lease in leases:
        stack.push_async_exit(lease._aexit)
    return stack
