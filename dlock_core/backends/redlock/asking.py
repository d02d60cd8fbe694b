"""One question put to several nodes at once, for threads and for tasks: slow and dead ones hold up nobody.

An answer is a value, or BackendUnavailable, or None when it did not come in time. The moment a majority has decided,
the others get only a short time more. A node that was too slow is left alone for a while, unless it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.exceptions import NoScriptError, RedisError

from dlock_core.backends.redis.wire import unavailable
from dlock_core.backends.redlock import address, tasks, threads
from dlock_core.backends.redlock.node import Node
from dlock_core.errors import BackendUnavailable
from dlock_core.quorum import majority
from dlock_core.runtime import Asyncio, clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backends.redlock.node import Question
    from dlock_core.runtime import Runtime

__all__ = ["Nodes"]


class Nodes:
    """The masters, in the order of their URL."""

    def __init__(self, clients: Sequence[Any], prefix: str, timeout: float) -> None:
        address.check([address.title(client) for client in clients])
        self.all = tuple(Node(client, prefix, timeout) for client in clients)
        self.needed = majority(len(self.all))

    async def ask(self, runtime: Runtime, question: Question) -> list[Any]:
        """Give an answer for each node, in order."""
        answers = await self._put(runtime, question)
        if question.script is not None and (new := _ignorant(answers)):  # they learn the script along with the question
            text = ("EVAL", question.script.text, *question.command[2:])
            again = await self._put(runtime, question._replace(command=text, among=new))
            answers = [again[place] if place in new else answer for place, answer in enumerate(answers)]
        return [_proper(question.name, answer) for answer in answers]

    def unavailable(self, name: str, answers: Sequence[Any]) -> BackendUnavailable:
        """Say why there is no majority."""
        failures = {place: each for place, each in enumerate(answers) if isinstance(each, BackendUnavailable)}
        told = {place: "no answer in time" for place, each in enumerate(answers) if each is None}
        told |= {place: failure.reason for place, failure in failures.items()}
        reasons = "; ".join(f"{self.all[place].title}: {reason}" for place, reason in sorted(told.items()))
        refused = sum(failure.refused for failure in failures.values())
        return BackendUnavailable(
            name,
            reason=f"no majority of {len(self.all)} nodes ({reasons or 'they are too slow for the ttl'})",
            broken=any(failure.broken for failure in failures.values()),
            refused=len(self.all) - refused < self.needed,
        )

    def close(self) -> None:
        for node in self.all:
            node.backend.close()

    async def _put(self, runtime: Runtime, question: Question) -> list[Any]:
        asked = self._asked(question)
        if isinstance(runtime, Asyncio):
            return await tasks.put(runtime, self.all, asked, question)
        answers: list[Any] = await runtime.call(threads.put, self.all, asked, question)
        return answers

    def _asked(self, question: Question) -> list[int]:
        among = [place for place in range(len(self.all)) if question.among is None or place in question.among]
        now = clock()
        awake = [place for place in among if self.all[place].is_well or now >= self.all[place].rests_until]
        return among if question.insists or len(awake) < min(self.needed, len(among)) else awake


def _ignorant(answers: Sequence[Any]) -> frozenset[int]:
    return frozenset(place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError))


def _proper(name: str, answer: Any) -> Any:
    return unavailable(name, answer, reused=False) if isinstance(answer, RedisError) else answer
