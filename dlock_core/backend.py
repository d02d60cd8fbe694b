"""The interface between the engine and the stores: the requests to a store, and its possible answers.

No absolute time crosses this interface, only durations; the engine alone decides what is still valid. Answers are yes,
no, or BackendUnavailable, which means unknown. Every method may be called from any thread or task, and waits only
through the runtime that is passed to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Protocol, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.runtime import Runtime

__all__ = [
    "AcquireRequest",
    "Backend",
    "Busy",
    "Capabilities",
    "Granted",
    "Holder",
    "LockState",
    "Released",
    "Renewal",
    "RenewalFailure",
    "RenewalResult",
    "SupportsMany",
    "Waiter",
    "refuse_to_pickle",
    "supports_many",
]


class Released(Enum):
    """What a release found."""

    RELEASED = "released"
    """Our grant, which has ended now."""
    EXPIRED = "expired"
    """No grant: ours had run out."""
    STOLEN = "stolen"
    """Another holder's grant: ours had run out, and the lock was taken since."""


class AcquireRequest(NamedTuple):
    """A request for one lock; repeated unchanged in every attempt."""

    name: str
    holder: str
    """128 random bits in hex, fresh for every acquire: an attempt that finds its own holder is granted."""
    ttl: float
    shared: bool = False
    queue: bool = True
    """Queue for the lock when it is taken (False for a single try)."""
    fair: bool = True
    """False: a free lock may be granted although other waiters are queued for it (barging)."""
    owner: str = ""
    floor: int = 0
    """The token must be greater than this; a grant that is already ours is given a greater token."""
    transaction: Any = None
    """The caller's open transaction, for a store that locks inside it (`expiry` is "transaction")."""


class Granted(NamedTuple):
    """The lock is granted: `token` only grows, `valid_for` is in seconds from when the store handled the request."""

    token: int
    valid_for: float
    handle: Any = None
    """Private to the backend: a node path, a lease id, a connection."""
    age: float | None = None
    """Seconds since the granted request was sent, if it was not sent by the caller (`Backend.wait`)."""


class Busy(NamedTuple):
    """Another holder has the lock: try again after at most `retry_after` seconds.

    `owner` is the holder's metadata, if known. `ticket` is private to the backend, for its `wait`. `is_late` means the
    same as in BackendUnavailable.
    """

    retry_after: float
    owner: str = ""
    ticket: Any = None
    is_late: bool = False


class Renewal(NamedTuple):
    """One lease whose expiry is to be extended to `request.ttl` from now."""

    request: AcquireRequest
    granted: Granted


class RenewalFailure(Enum):
    """Why a lease was not renewed."""

    LOST = "lost"
    """The store granted the lock to another holder, or lost the lease: this is final."""
    UNKNOWN = "unknown"
    """The outcome for this lease is unknown, while it is known for others: the lease may have been renewed."""


RenewalResult = float | RenewalFailure
"""The validity of a renewed lease, in seconds from when the store handled the request, or why it was not renewed."""


class Holder(NamedTuple):
    """A holder as an operator sees it; times in seconds, None if the store does not know them."""

    holder: str
    token: int
    shared: bool
    owner: str
    expires_in: float | None
    held_for: float | None = None


class Waiter(NamedTuple):
    """A waiter as an operator sees it; the waiters of a lock are listed in the order of their arrival."""

    holder: str
    shared: bool
    owner: str
    waited_for: float | None = None


class LockState(NamedTuple):
    """The holders and the waiters of a lock: a snapshot for people, never a basis for decisions."""

    name: str
    holders: tuple[Holder, ...] = ()
    waiters: tuple[Waiter, ...] = ()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do; read before any I/O, and constant for the life of the store."""

    expiry: Literal["lease", "session", "connection", "transaction"] = "lease"
    """What ends a grant whose holder has died: its ttl, its session, its connection, or its transaction.

    "connection": each grant has a connection of its own, and is renewed in a thread of its own. "transaction": the lock
    is taken inside the caller's transaction, whose end is the release; it has no ttl.
    """
    fair: bool = False
    """Waiters are served first come, first served."""
    shared: bool = False
    """Several shared holders may hold a lock together."""
    lists_waiters: bool = False
    """`inspect` lists the waiters."""
    ttl_min: float = 0.01
    """The shortest ttl, in seconds."""
    ttl_step: float = 0.001
    """The step that a ttl is rounded up to, in seconds."""
    transaction_database: Any = None
    """Where `expiry` is "transaction": the database whose transactions hold the locks, as its integration names it."""


class Backend(Protocol):
    """A store of leases: seven requests, and `close`."""

    @property
    def capabilities(self) -> Capabilities:
        """Return what this store can do."""

    async def try_acquire(
        self, runtime: Runtime, request: AcquireRequest, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        """Make one attempt; never wait for another holder.

        Idempotent by `request.holder`. `unsure`: an earlier attempt ended in BackendUnavailable and may have worked.
        """

    async def wait(
        self, runtime: Runtime, request: AcquireRequest, busy: Busy, timeout: float
    ) -> Granted | Busy | None:
        """Return when it makes sense to try again, after `timeout` seconds at the latest; may return early.

        A store that makes the next attempt together with the wake-up returns its answer; other stores return None.
        """

    async def abandon(self, runtime: Runtime, request: AcquireRequest, ticket: Any = None) -> None:
        """Leave the queue and undo a grant that may have happened. Idempotent."""

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        """Extend the expiry of each lease, and return one result for each, in order.

        Never re-creates a lease. Never shortens one: a renewal may arrive late, after another one that was answered.

        Raises BackendUnavailable if the outcome is unknown for all of them.
        """

    async def release(self, runtime: Runtime, request: AcquireRequest, granted: Granted) -> Released:
        """End our grant, hand the lock over to the first live waiter, and return what was found.

        Never ends another holder's grant.
        """

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        """Return the state of one lock, or of every lock that is held or waited for."""

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        """End the grant with this token, and no newer one; return False if it does not exist."""

    def close(self) -> None:
        """Close idle connections; leases are not released."""


class SupportsMany(Backend, Protocol):
    """A store that takes several locks in one request, all or none, and releases them in one."""

    async def try_acquire_many(self, runtime: Runtime, requests: Sequence[AcquireRequest]) -> list[Granted] | None:
        """Take several free locks exclusively, or none of them (None)."""

    async def release_many(self, runtime: Runtime, requests: Sequence[AcquireRequest]) -> list[Released]:
        """Release several grants at once, and return what was found for each."""


def supports_many(backend: object) -> TypeGuard[SupportsMany]:
    """Return whether a store takes several locks in one request; a wrapper may pass the two methods on."""
    return hasattr(backend, "try_acquire_many")


def refuse_to_pickle(backend: Backend) -> NoReturn:
    """Raise TypeError; as the `__reduce__` of a store, whose connections and password stay in its process."""
    raise TypeError(
        f"a store ({type(backend).__name__}) cannot be pickled or copied, and neither can its locks: pass its URL, and "
        "connect in the other process"
    )
