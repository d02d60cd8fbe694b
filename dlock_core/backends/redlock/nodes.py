"""The nodes of a Redlock: their addresses, one request to all of them, and their answers as one.

An answer is a value, or BackendUnavailable, or None when it did not come in time. The moment a majority has decided,
the others get only a short time more. A node that was too slow is left alone for a while, unless it is needed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import NoScriptError, RedisError

from dlock_core.backend import Holder, LockState, Waiter
from dlock_core.backends.redis.addresses import PORT, of_url, split, title
from dlock_core.backends.redis.scripts import script
from dlock_core.backends.redis.transport import unavailable
from dlock_core.backends.redlock import broadcast
from dlock_core.backends.redlock.broadcast import Circles
from dlock_core.backends.redlock.node import Node, Question
from dlock_core.backends.redlock.quorum import majority
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import Asyncio, clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backends.redis.transport import Command
    from dlock_core.backends.redlock.node import Enough
    from dlock_core.runtime import Runtime

__all__ = ["Nodes", "all_of"]

PROPER: Final = (int, list)
"""An answer is one of these; anything else tells why there is none."""


class Nodes:
    """The masters, in the order of their URL."""

    def __init__(self, clients: Sequence[Any], prefix: str, timeout: float) -> None:
        check([title(client) for client in clients])
        self.all = tuple(Node(client, prefix, timeout) for client in clients)
        self.needed, self.timeout = majority(len(self.all)), timeout
        self._places, self._circles = range(len(self.all)), Circles(self.all)
        self.any = self.all[0].backend
        """For keys, arguments and answers of questions, which are the same at all nodes."""

    def question(
        self,
        name: str,
        which: str,
        keys: Command,
        args: Command,
        enough: Enough | None = None,
        *,
        insists: bool = False,
        undo: Command | None = None,
    ) -> Question:
        """Ask by a script; a majority's answers are enough where nothing else is said."""
        known = script(which)
        command = ("EVALSHA", known.sha, str(len(keys)), *keys, *args)
        return Question(name, command, self.timeout, enough or self.have_answered, insists, None, known, undo)

    def have_answered(self, answers: Sequence[Any]) -> bool:
        """Tell whether a majority has given proper answers."""
        return self._may_be_enough(answers) and sum(isinstance(each, PROPER) for each in answers) >= self.needed

    def have_decided(self, answers: Sequence[Any]) -> bool:
        """Tell whether a majority has granted, or so many have not that none can."""
        if not self._may_be_enough(answers):
            return False
        yes = sum(isinstance(answer, int) for answer in answers)
        no = sum(isinstance(answer, list) for answer in answers)
        return yes >= self.needed or no > len(answers) - self.needed

    def _may_be_enough(self, answers: Sequence[Any]) -> bool:
        return len(answers) - answers.count(None) >= self.needed

    def majority(self, name: str, answers: Sequence[Any], kind: type = int) -> list[Any]:
        """Give the proper answers; raises BackendUnavailable when they are not those of a majority."""
        proper = [answer for answer in answers if isinstance(answer, int | kind)]
        if len(proper) < self.needed:
            raise self.unavailable(name, answers)
        return proper

    async def ask(self, runtime: Runtime, question: Question) -> list[Any]:
        """Give an answer for each node, in order."""
        answers = await self._put(runtime, question)
        if not any(isinstance(answer, RedisError) for answer in answers):
            return answers
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
            reason=f"no majority of {len(self.all)} nodes ({reasons or 'the second round was too slow'})",
            broken=any(failure.broken for failure in failures.values()),
            refused=len(self.all) - refused < self.needed,
        )

    def close(self) -> None:
        self._circles.clear()
        for node in self.all:
            node.backend.close()

    async def _put(self, runtime: Runtime, question: Question) -> list[Any]:
        asked = self._asked(question)
        if isinstance(runtime, Asyncio):
            return await broadcast.put_from_tasks(runtime, self.all, asked, question)
        answers: list[Any] = await runtime.call(broadcast.put_from_threads, self.all, self._circles, asked, question)
        return answers

    def _asked(self, question: Question) -> Sequence[int]:
        among = self._places if question.among is None else sorted(question.among)
        if question.insists:
            return among
        now = clock()
        awake = [place for place in among if self.all[place].is_well or now >= self.all[place].rests_until]
        return among if len(awake) < min(self.needed, len(among)) else awake


def all_of(places: frozenset[int]) -> Enough:
    """Wait for the answers of these nodes."""
    return lambda answers: all(answers[place] is not None for place in places)


def _ignorant(answers: Sequence[Any]) -> frozenset[int]:
    return frozenset(place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError))


def _proper(name: str, answer: Any) -> Any:
    return unavailable(name, answer, reused=False) if isinstance(answer, RedisError) else answer


def merged(name: str, states: Sequence[LockState]) -> LockState:
    """Show whom a majority of those that answered know as a holder, and whoever waits at any of them."""
    needed, seen, line = majority(len(states)), dict[str, list[Holder]](), dict[str, Waiter]()
    for state in states:
        for holder in state.holders:
            seen.setdefault(holder.holder, []).append(holder)
        for waiter in state.waiters:
            line.setdefault(waiter.holder, waiter)
    holders = [_holder(entries, needed) for entries in seen.values() if len(entries) >= needed]
    inside = {holder.holder for holder in holders}
    waiters = sorted(line.values(), key=lambda waiter: waiter.waited_for or 0.0, reverse=True)
    return LockState(name, tuple(holders), tuple(waiter for waiter in waiters if waiter.holder not in inside))


def _holder(entries: Sequence[Holder], needed: int) -> Holder:
    """Take the token that most know; it lasts as long as a majority keeps it."""
    tokens = [entry.token for entry in entries]
    lasting = sorted((entry.expires_in for entry in entries if entry.expires_in is not None), reverse=True)
    expires_in = lasting[needed - 1] if len(lasting) >= needed else None
    return replace(entries[0], token=max(tokens, key=tokens.count), expires_in=expires_in)


_BAD: Final = (
    "bad Redlock URL: expected redlock://[user:password@]host:port,host:port,host:port/db, one user and password for "
    "all nodes, with every : / ? # @ , of them percent-encoded"
)


def read(url: str, *, tls: bool) -> list[Any]:
    """Take a URL apart; raises ValueError."""
    user, nodes, database, options = split(url, port=PORT, path=r"(?:/\d*)?", bad=_BAD)
    scheme = "rediss" if tls else "redis"
    return [of_url(f"{scheme}://{user}{node}{database}{options}") for node in nodes]


def check(titles: Sequence[str]) -> None:
    """Raise ValueError unless these nodes can decide by majority."""
    if len(set(titles)) < len(titles):
        twice = next(one for one in titles if titles.count(one) > 1)
        raise ValueError(f"Redlock needs independent nodes, but {twice} is named twice")
    if len(titles) < 3 or len(titles) % 2 == 0:
        raise ValueError(
            f"Redlock needs an odd number of nodes, at least 3, not {len(titles)}: an even number survives no more "
            "failures than one node less"
        )
