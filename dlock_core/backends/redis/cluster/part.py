"""The locks of one slot: as on a server of their own, with a counter and a list of held locks that move with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import AskError, ClusterDownError, ResponseError, TryAgainError

from dlock_core.backends.redis import FOUND, RedisBackend, holders_and_ttls
from dlock_core.backends.redis.scripts import script
from dlock_core.backends.redis.wire import ask
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import Busy, Found, Granted, Request
    from dlock_core.backends.redis.cluster.slot import Slot
    from dlock_core.backends.redis.wire import Command
    from dlock_core.runtime import Runtime

__all__ = ["Part"]

RENEW: Final = script("renew")


class Part(RedisBackend):
    """A share of the names. While its slot moves from node to node, a script is refused as a whole (TRYAGAIN).

    That is what the key is for that never exists: without it a script would run where only some of its keys are. What
    cannot wait for the end of a move are renewals and releases; of an exclusive lease one key is enough for them.
    """

    def __init__(self, slot: Slot, prefix: str, timeout: float, replicas: int) -> None:
        self._reach(slot, slot, prefix, timeout, replicas)
        self.slot, self._never = slot, f"{prefix}never"

    def keys(self, name: str) -> tuple[str, ...]:
        return (*super().keys(name), self._never)

    async def wait(self, runtime: Runtime, request: Request, busy: Busy, timeout: float) -> Granted | Busy | None:
        try:
            return await super().wait(runtime, request, busy, timeout)
        except BackendUnavailable as error:
            if _has_moved(error.__cause__):
                return None  # woken by the move itself: ask again, wherever the lock is now
            raise

    async def withdraw(self, runtime: Runtime, request: Request, ticket: Any = None) -> None:
        try:
            await super().withdraw(runtime, request, ticket)
        except BackendUnavailable as error:
            if request.shared or not isinstance(error.__cause__, TryAgainError):
                raise
            await self._drop(runtime, request)

    async def release(self, runtime: Runtime, request: Request, granted: Granted) -> Found:
        try:
            return await super().release(runtime, request, granted)
        except BackendUnavailable as error:
            if request.shared or not isinstance(error.__cause__, TryAgainError):
                raise
            return FOUND[await self._drop(runtime, request)]

    async def renew_alone(self, runtime: Runtime, request: Request, limit: float) -> int:
        """Renew one exclusive lease, wherever its key is; raises BackendUnavailable."""
        keys, args = (self.lock_key(request.name),), holders_and_ttls([request])
        (ours,) = await ask(self.slot, runtime, request.name, RENEW, keys, args, limit)
        return int(ours)

    def renewal(self, requests: Sequence[Request], *, shared: bool) -> Command:
        """Give the command that renews these leases; shared ones are kept in several keys."""
        before = (self._never, self.held) if shared else (self.held,)
        keys = (*before, *[self.lock_key(request.name) for request in requests])
        return ("EVALSHA", RENEW.sha, len(keys), *keys, *holders_and_ttls(requests))

    @property
    def held(self) -> str:
        """The list of held locks."""
        return self._globals[1]

    async def _drop(self, runtime: Runtime, request: Request) -> int:
        """End an exclusive lease; who waits for it asks again by himself, once the slot has arrived."""
        found: int = await self._ask(runtime, request.name, "drop", (self.lock_key(request.name),), (request.holder,))
        return found


def _has_moved(error: BaseException | None) -> bool:
    return isinstance(error, AskError | TryAgainError | ClusterDownError) or (
        isinstance(error, ResponseError) and str(error).startswith("UNBLOCKED")
    )
