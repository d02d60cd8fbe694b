"""The seam between the engine and the stores: what a store is asked, and what it may answer.

No absolute time crosses this border, only durations; the engine alone decides what is still valid. Answers are
yes, no, or BackendUnavailable, which means unknown. Every method may be called from any thread or task and waits
only through the runtime it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.runtime import Runtime

__all__ = ["Backend", "Busy", "Found", "Granted", "Holder", "LockState", "Renewal", "Request", "Waiter"]

Found = Literal["released", "absent", "other"]
"""What a release found: our grant, nothing, or another's."""


class Request(NamedTuple):
    """One caller's wish for one lock; repeated unchanged in every attempt."""

    name: str
    holder: str
    """128 random bits in hex, fresh for every acquire: an attempt that finds its own holder is granted."""
    ttl: float
    shared: bool = False
    queue: bool = True
    """Take a place in the queue when the lock is taken (False for a single try)."""
    fair: bool = True
    """False: a free lock may be taken although others wait for it (barging)."""
    owner: str = ""
    floor: int = 0
    """The token must be greater than this; a grant that is already ours is given a greater token."""
    transaction: Any = None
    """The caller's open transaction, for a store that locks inside it (`expiry` is "transaction")."""


class Granted(NamedTuple):
    """The lock is ours: `token` only grows, `valid_for` is in seconds from when the store handled the request."""

    token: int
    valid_for: float
    handle: Any = None
    """Private to the backend: a node path, a lease id, a connection."""


class Busy(NamedTuple):
    """Somebody else has it: ask again after at most `retry_after` seconds; `ticket` is our place in the queue."""

    retry_after: float
    owner: str = ""
    ticket: Any = None


class Renewal(NamedTuple):
    """One lease whose expiry is to be pushed to `request.ttl` from now."""

    request: Request
    granted: Granted


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder as an operator sees it; times in seconds, None when the store does not know."""

    holder: str
    token: int
    shared: bool
    owner: str
    expires_in: float | None
    held_for: float | None = None


@dataclass(frozen=True, slots=True)
class Waiter:
    """A place in the queue, first come first."""

    holder: str
    shared: bool
    owner: str
    waited_for: float | None = None


@dataclass(frozen=True, slots=True)
class LockState:
    """Who holds a lock and who waits for it: a snapshot for people, never a basis for decisions."""

    name: str
    holders: tuple[Holder, ...] = ()
    waiters: tuple[Waiter, ...] = field(default=())


class Backend(Protocol):
    """A store of leases."""

    token_order: ClassVar[Literal["strict", "clock"]]
    """strict: a later token is greater as long as the store keeps its data; clock: also after it lost them, if its
    clock did not step back."""

    @property
    def expiry(self) -> Literal["lease", "session", "connection", "transaction"]:
        """What ends a grant whose holder died: its own ttl, its session, its connection, or its transaction.

        transaction: it is taken inside the caller's transaction, whose end is the release; it has no ttl.
        """

    supports_fair: ClassVar[bool]
    """Waiters are served first come, first served."""
    supports_shared: ClassVar[bool]
    """Several shared holders may be in together."""
    lists_waiters: ClassVar[bool]
    """`inspect` tells who waits."""
    supports_many: ClassVar[bool]
    """Several locks are taken in one request, all or none, and released in one."""
    ttl_min: ClassVar[float]
    ttl_step: ClassVar[float]
    """The shortest ttl and the step it is rounded up to, in seconds."""

    async def try_acquire(
        self, runtime: Runtime, request: Request, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        """Make one attempt; never wait for another holder.

        Idempotent by `request.holder`. `unsure`: an earlier attempt ended in BackendUnavailable and may have worked.
        """

    async def wait(self, runtime: Runtime, request: Request, busy: Busy, timeout: float) -> Granted | Busy | None:
        """Return when it makes sense to ask again, after `timeout` seconds at the latest; may return early.

        A store that sends its answer along with the wake-up gives that answer: the next attempt is then made already.
        """

    async def withdraw(self, runtime: Runtime, request: Request, ticket: Any = None) -> None:
        """Leave the queue and undo a grant that may have happened. Idempotent."""

    async def renew_many(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[float | None]:
        """Push the expiry of each; the validity in seconds, or None where the lease is gone. Never re-creates one.

        0.0 where nothing could be learned, while others were; BackendUnavailable when nothing was learned at all.
        """

    async def release(self, runtime: Runtime, request: Request, granted: Granted) -> Found:
        """End our grant, hand over to the first live waiter, and say what was found. Never touches another's."""

    async def try_acquire_many(self, runtime: Runtime, requests: Sequence[Request]) -> list[Granted] | None:
        """Take several free locks exclusively, or none (None); asked only where `supports_many`."""

    async def release_many(self, runtime: Runtime, requests: Sequence[Request]) -> list[Found]:
        """Release several grants at once; asked only where `supports_many`."""

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        """Show the state of one lock, or of every lock that is held or waited for."""

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        """End the grant with this token, and no newer one; False when it is not there."""

    def close(self) -> None:
        """Close idle connections; leases are not released."""
