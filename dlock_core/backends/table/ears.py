"""Listens to PostgreSQL's NOTIFY, on one connection for all who wait in this process; proves first that it hears.

Behind a pooler of transactions LISTEN is accepted and nothing is ever heard. So we tell ourselves something, and until
that is heard, and whenever the connection has ended, those who wait ask from time to time instead.
"""

from __future__ import annotations

import math
import secrets
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from dlock_core.backends.table.postgresql import CHANNEL, TELL
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import clock

if TYPE_CHECKING:
    from dlock_core.backends.sql import Kept, Pool, Session
    from dlock_core.backends.table.bells import Bells
    from dlock_core.runtime import Runtime

__all__ = ["Ears"]

AGAIN: Final = 30.0
"""Seconds after which ears that turned out to be deaf are tried again."""
SOON: Final = 1.0
"""Seconds after which a database that was not there is tried again."""


class Ears:
    """The listening connection; `open` it when somebody waits."""

    def __init__(self, pool: Pool, bells: Bells) -> None:
        self._pool, self._bells, self._guard = pool, bells, threading.Lock()
        self._kept: Kept | None = None
        self._proof, self._next = "", -math.inf
        self.hears = False
        """What is told is heard: it is no use to ask."""

    async def open(self, runtime: Runtime) -> None:
        """Begin to listen, unless it was done or tried a short time ago; never raises for the database."""
        with self._guard:
            if self.hears or clock() < self._next:
                return
            self._next = clock() + AGAIN
        self.close()
        try:
            await self._listen(runtime)
        except BackendUnavailable:
            self.hears, self._next = False, clock() + SOON

    def close(self) -> None:
        """Stop listening; the connection is closed by whoever reads from it."""
        kept, self._kept, self.hears, self._proof = self._kept, None, False, ""
        if kept is not None:
            kept.cut()

    def forget(self) -> None:
        """In a forked child: the connection is the parent's."""
        if self._kept is not None:
            self._kept.forget()

    async def _listen(self, runtime: Runtime) -> None:
        self._proof = f"?{secrets.token_hex(8)}"  # no lock has such a name
        self._kept = kept = await self._pool.dedicated(runtime, CHANNEL)
        await kept.step(runtime, CHANNEL, self._begin)
        await self._pool.step(runtime, CHANNEL, self._tell)

    def _begin(self, session: Session) -> None:
        session.listen(CHANNEL, self._heard, partial(self._ended, self._proof))

    def _tell(self, session: Session) -> None:
        session.execute(TELL, {"payload": self._proof})

    def _heard(self, payload: str) -> None:
        if payload == self._proof:
            self.hears = True
        self._bells.ring(payload)

    def _ended(self, proof: str) -> None:
        if proof == self._proof:  # not one that we have left already
            self.hears, self._next = False, -math.inf
            self._bells.ring_all()
