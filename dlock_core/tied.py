"""What `lock(...)` takes in every integration, and how it asks for a lease: the part that knows no database."""

from __future__ import annotations

import math
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from dlock_core import engine, owner, watchdog
from dlock_core.deadline import Seconds, deadline, ttl_seconds, wait_seconds
from dlock_core.errors import AlreadyHeld, NotSupported
from dlock_core.holding import Blocks, LeaseView
from dlock_core.lock import new_request, supported_ttl
from dlock_core.runtime import clock
from dlock_core.tie import LETTING_RUN_OUT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from dlock_core.backend import Backend, Request
    from dlock_core.fencing import Fence
    from dlock_core.held import Held
    from dlock_core.runtime import Runtime
    from dlock_core.store import Store
    from dlock_core.tie import Tie

__all__ = ["FenceForm", "Options", "TiedLease", "TiedLock", "Turn", "give_back", "let_go"]

FenceForm = Literal["transaction", "lease", False]


class Options(TypedDict, total=False):
    """What may be said of a lock; see the integrations' `lock`."""

    ttl: Seconds | None
    wait: Seconds | EllipsisType | None
    shared: bool
    fence: bool | Fence
    snapshot: Literal["raise", "ignore"]
    reentrant: bool
    renew: bool
    fair: bool
    on_lost: Callable[[], None] | None


class Turn:
    """One acquire of a lock, alone or among others that are taken together: `wait` seconds count from `since`."""

    __slots__ = ("held", "is_new", "request", "since", "wait")

    def __init__(self, *, wait: float | EllipsisType | None = ..., since: float | None = None) -> None:
        self.wait, self.since = wait, clock() if since is None else since
        self.request: Request | None = None
        """It was sent together with others, and what came of it has not had its turn."""
        self.held: Held | None = None
        """What came of it."""
        self.is_new = False
        """The lease is of this turn, not joined."""


class TiedLock:
    """A name and options, checked before any I/O: ValueError, TypeError."""

    def __init__(
        self,
        name: str,
        *,
        ttl: Seconds | None = None,
        wait: Seconds | EllipsisType | None = ...,
        shared: bool = False,
        fence: bool | Fence = True,
        snapshot: Literal["raise", "ignore"] = "raise",
        reentrant: bool = False,
        renew: bool = True,
        fair: bool = True,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.form = name, _form(fence)
        self.ttl = None if ttl is None else ttl_seconds(ttl)
        self.wait = wait if isinstance(wait, EllipsisType) else wait_seconds(wait)
        if snapshot not in ("raise", "ignore"):
            raise ValueError(f"snapshot must be 'raise' or 'ignore', not {snapshot!r}")
        self.shared, self.snapshot = shared, snapshot
        self.reentrant, self.renew, self.fair, self.on_lost = reentrant, renew, fair, on_lost
        self._blocks = Blocks()

    def request(self, store: Store, turn: Turn) -> Request:
        """Make the request of one acquire; raises NotSupported for what the store cannot do."""
        if self.shared and not store.backend.supports_shared:
            raise NotSupported(f"the store {store.alias!r} has no shared locks", name=self.name)
        ttl = supported_ttl(store.backend, self.ttl or store.ttl)
        is_inside = store.backend.expiry == "transaction"  # whose it is the database knows
        who = "" if is_inside else owner.text(*self.sessions())
        request = new_request(self.name, ttl, self.seconds(store, turn), shared=self.shared, fair=self.fair, who=who)
        return request._replace(transaction=self.transaction(store.backend)) if is_inside else request

    def sessions(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Name the database sessions that are this thread's own, and those in whose open transaction it asks."""
        return (), ()

    def seconds(self, store: Store, turn: Turn) -> float | None:
        """Tell how long it waits, None for ever."""
        wait = self.wait if isinstance(turn.wait, EllipsisType) else turn.wait
        return store.wait if isinstance(wait, EllipsisType) else wait

    def whose(self) -> object:
        """Tell who is to hold it, where one thread or task may be several; asked twice for one, it is held once."""
        return None

    async def ask(self, runtime: Runtime, store: Store, turn: Turn) -> tuple[Held, float | None, float]:
        """Acquire the lease, renewed from now on; also tell the wait in seconds and the moment at which it is over."""
        wait = self.seconds(store, turn)
        until = deadline(turn.since, wait)
        held = turn.held
        if held is None:
            left = None if wait is None else max(0.0, until - clock())
            held = await engine.acquire(runtime, store.backend, turn.request or self.request(store, turn), left)
        turn.held = turn.request = None
        turn.is_new = True
        self.watch(held)
        held.on_lost = () if self.on_lost is None else (self.on_lost,)
        return held, wait, until

    def transaction(self, backend: Any) -> Any:
        """Give the caller's open transaction, for a store that locks inside it; None outside one."""
        raise NotImplementedError

    async def keep(self, runtime: Runtime, tie: Tie, bind: Awaitable[Any]) -> None:
        """Tie a new lease to what it protects; what `bind` raises gives it back."""
        try:
            await bind
        except BaseException:
            await runtime.shield(give_back(runtime, tie))
            raise

    def watch(self, held: Held) -> None:
        """Have it renewed, unless that is not wanted, done already, or of no use."""
        if self.renew and not held.due and held.until < math.inf:
            watchdog.watch(held)

    def joined(self, ties: Iterable[Any], backend: Backend, *, inside: bool) -> Any:
        """Find what the owner holds already, among its ties; raises AlreadyHeld where that cannot be joined.

        `inside` a transaction a lease is always joined: its end releases them together.
        """
        for tie in ties:
            if self._is(tie, backend):
                if not (inside or self.reentrant) or (tie.held.request.shared and not self.shared):
                    raise AlreadyHeld(self.name)
                return tie
        return None

    def _is(self, tie: Tie, backend: Backend) -> bool:
        return tie.held.name == self.name and tie.held.backend is backend and tie.held.remaining() > 0.0


class TiedLease(LeaseView):
    """A handle of a tie's lease; what it does to release is the integration's."""

    __slots__ = ("_left", "_tie")

    def __init__(self, tie: Any) -> None:
        super().__init__(tie.held)
        self._tie, self._left = tie, False

    def _leave(self) -> bool:
        """Leave once; True for the last handle when no transaction needs the lease: it has to be released now."""
        self._held.ensure_own_process()
        if not self._left:
            self._left = True
            self._tie.depth -= 1
        return self._tie.depth == 0 and self._tie.leave() and self._held.ended is None


def let_go(tie: Tie) -> None:
    """Need a lease no more, under which nothing was done; without I/O."""
    watchdog.unwatch(tie.held)
    tie.give_up()


async def give_back(runtime: Runtime, tie: Tie) -> None:
    """Release a lease under which nothing was done, whatever transactions it met."""
    let_go(tie)
    with LETTING_RUN_OUT:
        await engine.release(runtime, tie.held)


def _form(fence: Any) -> FenceForm:
    if fence is True or fence == "transaction":
        return "transaction"
    if fence is False or fence == "lease":
        return fence  # type: ignore[no-any-return]
    raise ValueError(f"fence must be True, 'transaction', 'lease' or False, not {fence!r}")
