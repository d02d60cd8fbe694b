"""One of the masters, and a question as it is put to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from dlock_core.backends.redis.addresses import title
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.runtime import ASYNCIO, BLOCKING, clock

if TYPE_CHECKING:
    from dlock_core.backends.redis.scripts import Script
    from dlock_core.backends.redis.transport import AsyncioWire, Command

__all__ = ["GRACE", "Enough", "Node", "Question"]

GRACE: Final = 0.1
"""Seconds that slower nodes get after a majority has decided."""
REST: Final = 2.0
"""Seconds for which a node that did not answer is left alone."""


class Node:
    """One master."""

    def __init__(self, client: Any, prefix: str, timeout: float) -> None:
        self.backend = RedisBackend(client, prefix=prefix, timeout=timeout)
        self.threads, self.tasks = self.backend.wire(BLOCKING), cast("AsyncioWire", self.backend.wire(ASYNCIO))
        self.title = title(client)
        self.is_well = True
        """Whether it answered when it was last asked."""
        self.rests_until = 0.0
        self.caller = 0
        """The process in which a thread tries to connect to it; one is enough while it is not well."""

    def fail(self) -> None:
        """Note that it did not answer."""
        self.is_well, self.rests_until = False, clock() + REST


Enough = Callable[[Sequence[Any]], bool]
"""Whether the answers so far are enough."""


class Question(NamedTuple):
    """What is asked, of whom, and when the answers are enough."""

    name: str
    command: Command
    limit: float
    enough: Enough
    insists: bool = False
    """It ends a grant: also for nodes that are resting, and sent to slow ones even when we have stopped to listen."""
    among: frozenset[int] | None = None
    script: Script | None = None
    undo: Command | None = None
    """What is said to slow ones behind it, over the same connection, when we stop to listen."""
