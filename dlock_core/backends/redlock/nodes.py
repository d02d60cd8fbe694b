"""The nodes of a Redlock: their addresses, one request to all of them, and their answers as one.

An answer is a value, or BackendUnavailable, or LATE if it did not arrive in time, or None for a node without a request.
A node that was too slow is skipped for a while, unless it is needed for a majority.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import NoScriptError, RedisError

from dlock_core.backend import Holder, LockState, Waiter
from dlock_core.backends.redis.addresses import PORT, pool_from_url, split_hosts, title
from dlock_core.backends.redis.protocol import load_script
from dlock_core.backends.redis.transport import unavailable
from dlock_core.backends.redlock import broadcast
from dlock_core.backends.redlock.broadcast import LATE, Broadcast, RedlockNode, idle_connections
from dlock_core.backends.redlock.quorum import majority
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import Asyncio, clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backends.redis.protocol import Command
    from dlock_core.backends.redlock.broadcast import Enough
    from dlock_core.runtime import Runtime

__all__ = ["NodeSet", "all_of", "merge_states", "pools_from_url"]

PROPER_ANSWERS: Final = (int, list)
"""The types of a proper answer; any other answer is the reason why there is none."""
ANSWERS: Final = (*PROPER_ANSWERS, NoScriptError)
"""Those, and the answer of a node that does not know the script, and is sent its text next."""


class NodeSet:
    """The masters, in the order of their URL."""

    def __init__(self, clients: Sequence[Any], prefix: str, timeout: float) -> None:
        check_nodes([title(client) for client in clients])
        self.all = tuple(RedlockNode(client, prefix, timeout) for client in clients)
        self.needed, self.timeout, self.keyspace = majority(len(self.all)), timeout, self.all[0].backend.keyspace
        self._indexes, self._connections = range(len(self.all)), idle_connections()

    def request(
        self,
        name: str,
        script: str,
        keys: Command,
        args: Command,
        enough: Enough | None = None,
        *,
        must_arrive: bool = False,
        undo: Command | None = None,
    ) -> Broadcast:
        """Return the request that runs a script at all nodes; by default the answers of a majority are enough."""
        known = load_script(script)
        command = known.by_digest(keys, args)
        return Broadcast(name, command, self.timeout, enough or self.have_answered, must_arrive, None, known, undo)

    def have_answered(self, answers: Sequence[Any]) -> bool:
        """Return whether a majority has given proper answers, or will when it is sent the text of the script."""
        return self._may_be_enough(answers) and sum(isinstance(each, ANSWERS) for each in answers) >= self.needed

    def have_decided(self, answers: Sequence[Any]) -> bool:
        """Return whether a majority has granted, or so many have refused that no majority can grant.

        Also if a majority has answered, and some of it does not know the script: these are sent its text next.
        """
        if not self._may_be_enough(answers):
            return False
        yes = sum(isinstance(answer, int) for answer in answers)
        no = sum(isinstance(answer, list) for answer in answers)
        if yes >= self.needed or no > len(answers) - self.needed:
            return True
        return bool(_without_script(answers)) and self.have_answered(answers)  # They decide when they have its text.

    def _may_be_enough(self, answers: Sequence[Any]) -> bool:
        return len(answers) - answers.count(None) >= self.needed

    def of_majority(self, name: str, answers: Sequence[Any], kind: type = int) -> list[Any]:
        """Return the proper answers; raises BackendUnavailable when they are not those of a majority."""
        proper = [answer for answer in answers if isinstance(answer, int | kind)]
        if len(proper) < self.needed:
            raise self.unavailable(name, answers)
        return proper

    async def ask(self, runtime: Runtime, request: Broadcast) -> list[Any]:
        """Return an answer for each node, in order; a node that does not know the script is sent its text."""
        answers = await self._send(runtime, request)
        if not any(isinstance(answer, RedisError) for answer in answers):
            return answers
        if request.script is not None and (new := _without_script(answers)):
            text = ("EVAL", request.script.text, *request.command[2:])
            taught = await self._send(runtime, request._replace(command=text, among=new))
            answers = [taught[index] if index in new else answer for index, answer in enumerate(answers)]
        return [_checked(request.name, answer) for answer in answers]

    def unavailable(self, name: str, answers: Sequence[Any]) -> BackendUnavailable:
        """Return the error that gives the reason for each node why there is no majority."""
        failures = {index: each for index, each in enumerate(answers) if isinstance(each, BackendUnavailable)}
        reasons = {index: "no answer in time" for index, each in enumerate(answers) if each in (None, LATE)}
        reasons |= {index: failure.reason for index, failure in failures.items()}
        text = "; ".join(f"{self.all[index].title}: {reason}" for index, reason in sorted(reasons.items()))
        refused = sum(failure.refused for failure in failures.values())
        return BackendUnavailable(
            name,
            reason=f"no majority of {len(self.all)} nodes ({text or 'the second round was too slow'})",
            broken=any(failure.broken for failure in failures.values()),
            refused=len(self.all) - refused < self.needed,
        )

    def close(self) -> None:
        """Close the idle connections."""
        self._connections.clear()
        for node in self.all:
            node.backend.close()

    async def _send(self, runtime: Runtime, request: Broadcast) -> list[Any]:
        asked = self._asked(request)
        if isinstance(runtime, Asyncio):
            return await broadcast.broadcast_async(runtime, self.all, asked, request)
        answers: list[Any] = await runtime.call(
            broadcast.broadcast_blocking, self.all, self._connections, asked, request
        )
        return answers

    def _asked(self, request: Broadcast) -> Sequence[int]:
        """Return the indexes of the nodes to send to: without the suspended ones, if the others can be a majority."""
        among = self._indexes if request.among is None else sorted(request.among)
        if request.must_arrive:
            return among
        now = clock()
        active = [index for index in among if self.all[index].is_healthy or now >= self.all[index].suspended_until]
        return among if len(active) < min(self.needed, len(among)) else active


def all_of(indexes: frozenset[int]) -> Enough:
    """Return the condition that each of these nodes has answered."""
    return lambda answers: all(answers[index] is not None for index in indexes)


def _without_script(answers: Sequence[Any]) -> frozenset[int]:
    return frozenset(index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError))


def _checked(name: str, answer: Any) -> Any:
    return unavailable(name, answer, reused=False) if isinstance(answer, RedisError) else answer


def merge_states(name: str, states: Sequence[LockState]) -> LockState:
    """Return the holders that a majority of these nodes has, and the waiters at any of them, in order of arrival."""
    needed, seen, queued = majority(len(states)), dict[str, list[Holder]](), dict[str, Waiter]()
    for state in states:
        for holder in state.holders:
            seen.setdefault(holder.holder, []).append(holder)
        for waiter in state.waiters:
            queued.setdefault(waiter.holder, waiter)
    holders = [_merge_holder(entries, needed) for entries in seen.values() if len(entries) >= needed]
    inside = {holder.holder for holder in holders}
    waiters = sorted(queued.values(), key=lambda waiter: waiter.waited_for or 0.0, reverse=True)
    return LockState(name, tuple(holders), tuple(waiter for waiter in waiters if waiter.holder not in inside))


def _merge_holder(entries: Sequence[Holder], needed: int) -> Holder:
    """Return a holder with the token that most nodes have; it lasts for as long as a majority keeps it."""
    tokens = [entry.token for entry in entries]
    lasting = sorted((entry.expires_in for entry in entries if entry.expires_in is not None), reverse=True)
    expires_in = lasting[needed - 1] if len(lasting) >= needed else None
    return entries[0]._replace(token=max(tokens, key=tokens.count), expires_in=expires_in)


_BAD_URL: Final = (
    "bad Redlock URL: expected redlock://[user:password@]host:port,host:port,host:port/db, one user and password for "
    "all nodes, with every : / ? # @ , of them percent-encoded"
)


def pools_from_url(url: str, *, tls: bool) -> list[Any]:
    """Return a connection pool for each node of a URL; raises ValueError, without the password."""
    user, nodes, database, options = split_hosts(url, port=PORT, path=r"(?:/\d*)?", bad=_BAD_URL)
    scheme = "rediss" if tls else "redis"
    return [pool_from_url(f"{scheme}://{user}{node}{database}{options}") for node in nodes]


def check_nodes(titles: Sequence[str]) -> None:
    """Raise ValueError unless these nodes can decide by majority."""
    if len(set(titles)) < len(titles):
        repeated = next(one for one in titles if titles.count(one) > 1)
        raise ValueError(f"Redlock needs independent nodes, but {repeated} is named twice")
    if len(titles) < 3 or len(titles) % 2 == 0:
        raise ValueError(
            f"Redlock needs an odd number of nodes, at least 3, not {len(titles)}: an even number survives no more "
            "failures than one node less"
        )
