"""Stores that are wrong on purpose, so that only the fence protects."""

import os
import secrets
from collections.abc import Iterable

from dlock_core.backend import Granted, Released, RenewalFailure
from dlock_core.backends.memory import MemoryBackend


class EverybodyIn(MemoryBackend):
    """A store that grants every request at once, and every renewal; its tokens come from a list, in any order."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        super().__init__()
        self.tokens = iter(tokens)
        self.forgetful = False
        """Whether every renewal is refused, because the lease is lost."""

    async def try_acquire(self, runtime, request, ticket=None, *, unsure=False):
        return Granted(self.token(request.floor), request.ttl)

    def token(self, floor):
        return max(next(self.tokens), floor + 1)

    async def renew(self, runtime, renewals):
        return [RenewalFailure.LOST if self.forgetful else renewal.request.ttl for renewal in renewals]

    async def release(self, runtime, request, granted):
        return Released.RELEASED

    async def abandon(self, runtime, request, ticket=None):
        pass


class Dice(EverybodyIn):
    """A store whose tokens are random; no two are equal, in this process or another."""

    def token(self, floor):
        return (
            floor + (1 + secrets.randbelow(1000)) * 2**22 + os.getpid()
            if floor
            else secrets.randbits(30) * 2**22 + os.getpid()
        )
