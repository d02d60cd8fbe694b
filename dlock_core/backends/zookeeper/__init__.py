"""Leases in ZooKeeper (3.5 or newer): ephemeral nodes in the order of their creation, each watching the one before.

A node ends with the session of its process, so that is what frees the locks of a process that died or was cut off:
`session` seconds after its last sign of life, whatever its ttl was. In a process that lives, we end by ourselves what
nobody renews. The token is the czxid, the number of the transaction that made the node: it grows over all locks,
leaders and restarts. (Idea of the queue: the recipes page of the ZooKeeper documentation.)
"""

from __future__ import annotations

import math
import os
import time
import weakref
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

try:
    from kazoo.exceptions import NodeExistsError, NoNodeError
    from kazoo.protocol.serialization import Create, Create2, Delete, Exists, GetChildren, GetData, SetData, Sync
    from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE
except ModuleNotFoundError as error:
    raise ImportError("the ZooKeeper store needs the package 'kazoo': pip install 'dlock-orm[zookeeper]'") from error

from dlock_core.backend import Busy, Granted, Holder, LockState, Waiter
from dlock_core.backends.zookeeper.address import Address, of_url
from dlock_core.backends.zookeeper.line import Line, Node, component, line, mark, name_of, prefix
from dlock_core.backends.zookeeper.places import Place, Places
from dlock_core.backends.zookeeper.session import CreateContainer, Session, good

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import Found, Renewal, Request
    from dlock_core.runtime import Runtime

__all__ = ["ZooKeeperBackend"]

SLICE: Final = 5.0
"""The longest wait in seconds before a waiter looks again: a server that fell silent is noticed by it."""
ALIVE: Final = 3.0
"""Seconds after its last question in which a waiter keeps its place."""
CONTAINER, QUEUED = 4, 3  # flags of ZooKeeper's create: removed when empty; ephemeral and sequential
KNOWN: Final = 10_000
"""Locks whose node is believed to exist; being wrong costs one more round trip."""
LISTED: Final = 200
"""Locks read by one inspection round trip."""
EACH: Final = 0.002
"""Seconds that each request of a batch adds to its time limit."""


class ZooKeeperBackend:
    """An ensemble of ZooKeeper servers, through one session for all leases of this process.

    `timeout` bounds each request, in seconds. `session` is the session's length in seconds; the servers may grant less
    or more. A lease surely holds for two thirds of it and no longer, unless it is renewed. `prefix` is the node below
    the URL's chroot under which the locks are. `fair=False` makes no difference: here everybody queues.
    """

    token_order: ClassVar[Literal["strict", "clock"]] = "strict"
    expiry: ClassVar[Literal["lease", "session", "connection"]] = "session"
    supports_fair: ClassVar[bool] = True
    supports_shared: ClassVar[bool] = True
    lists_waiters: ClassVar[bool] = True
    supports_many: ClassVar[bool] = False
    ttl_min: ClassVar[float] = 0.1
    ttl_step: ClassVar[float] = 0.001

    def __init__(self, address: Address, *, prefix: str = "dlock", timeout: float = 2.0, session: float = 15.0) -> None:
        for what, value in (("timeout", timeout), ("session", session)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{what} is in seconds, greater than 0, not {value!r}")
        if not prefix or "/" in prefix or prefix in {".", ".."}:
            raise ValueError(f"prefix is the name of one node, not {prefix!r}")
        self._address, self._timeout, self._length = address, timeout, session
        self._parents = tuple(accumulate(("", *address.chroot, prefix), lambda path, part: f"{path}/{part}"))[1:]
        self._acl = CREATOR_ALL_ACL if address.credential else OPEN_ACL_UNSAFE
        self._begin()
        _backends.add(self)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> ZooKeeperBackend:
        """Reach the servers at zookeeper://[user:password@]host:port,host:port/chroot."""
        return cls(of_url(url), **options)

    def _begin(self) -> None:
        self._session = Session(self._address, self._timeout, self._length)
        self._places = Places(self._remove)
        self._known: dict[str, None] = {}

    def after_fork(self) -> None:
        """Begin anew in a forked child: session and leases are its parent's."""
        self._session.abandon()
        self._begin()

    async def try_acquire(
        self, runtime: Runtime, request: Request, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        sent, place = runtime.now(), self._places.get(request.holder)
        if place is None and not request.queue and (busy := await self._taken(runtime, request)):
            return busy
        queue = await self._stay(runtime, place) if place is not None else None
        if place is None or queue is None:
            place, queue = await self._enter(runtime, request, place)
        node = queue.find(place.node)
        if node is None:  # removed the moment it was made, by somebody who is not us
            return Busy(0.0)
        ahead = queue.ahead(node, shared=request.shared)
        if ahead is None:
            return await self._granted(runtime, place, queue, request, sent)
        if not request.queue:
            await self.withdraw(runtime, request)
            return Busy(SLICE, await self._owner(runtime, request.name, queue))
        return await self._watch(runtime, place, queue, ahead)

    async def wait(self, runtime: Runtime, request: Request, busy: Busy, timeout: float) -> Granted | None:
        """Sleep until the one before us has gone; the queue is looked at along with the wake-up."""
        place, sent = self._places.get(request.holder), runtime.now()
        if place is None:
            return None
        self._places.keep(place, timeout + ALIVE)
        signal = place.listen(runtime.signal())
        if place.wakes == place.seen:
            await runtime.wait(signal, min(timeout, SLICE))
        children = place.answer()
        if not isinstance(children, list) or place.session != self._session.id or self._is_unproven(sent):
            return None
        queue = line(children)
        node = queue.find(place.node)
        if node is None or queue.ahead(node, shared=request.shared) is not None:
            return None
        return await self._granted(runtime, place, queue, request, sent)

    async def withdraw(self, runtime: Runtime, request: Request, ticket: Any = None) -> None:
        place = self._places.get(request.holder)
        if place is not None:
            self._places.end(place, self._timeout)  # it will be removed, whatever becomes of us
            await self._remove(runtime, place)

    async def release(self, runtime: Runtime, request: Request, granted: Granted) -> Found:
        place = self._places.get(request.holder)
        if place is not None:
            self._places.end(place, self._timeout)
        (gone,) = await self._session.ask(runtime, request.name, [Delete(granted.handle, -1)])
        if place is not None:
            self._gone(place)
        if not isinstance(gone, NoNodeError):
            good(request.name, gone)
            return "released"
        return "other" if (await self._look(runtime, request.name)).nodes else "absent"

    async def renew_many(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[float | None]:
        """Write to one node, which a quorum must see, and read the others after it: it is one session."""
        name, sent = renewals[0].request.name, runtime.now()
        first, *others = [renewal.granted.handle for renewal in renewals]
        owner = renewals[0].request.owner.encode()
        questions = [SetData(first, owner, -1), *[Exists(path, None) for path in others]]
        limit = min(self._timeout, *[renewal.request.ttl / 3 for renewal in renewals]) + EACH * len(renewals)
        answers = await self._session.ask(runtime, name, questions, limit)
        return [self._renewed(one, answer, sent) for one, answer in zip(renewals, answers, strict=True)]

    async def try_acquire_many(self, runtime: Runtime, requests: Sequence[Request]) -> list[Granted] | None:
        raise NotImplementedError

    async def release_many(self, runtime: Runtime, requests: Sequence[Request]) -> list[Found]:
        raise NotImplementedError

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        if name is not None:
            return await self._states(runtime, [name])
        root = self._parents[-1]
        _, parts = await self._session.ask(runtime, "", [Sync(root), GetChildren(root, None)])
        names = [] if isinstance(parts, NoNodeError) else sorted(map(name_of, good("", parts)))
        chunks = [names[start : start + LISTED] for start in range(0, len(names), LISTED)]
        states = [state for chunk in chunks for state in await self._states(runtime, chunk)]
        return [state for state in states if state.holders or state.waiters]

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        queue = await self._look(runtime, name)
        for node in queue.holders():
            path = f"{self._directory(name)}/{node.name}"
            (stat,) = await self._session.ask(runtime, name, [Exists(path, None)])
            if good(name, stat) is not None and token in {stat.czxid, stat.czxid + queue.offset}:
                (gone,) = await self._session.ask(runtime, name, [Delete(path, -1)])
                return not isinstance(gone, NoNodeError) and bool(good(name, gone))
        return False

    def close(self) -> None:
        """End the session, unless a lease still needs it: leases stay as they are."""
        if not len(self._places):
            self._session.close()
            self._places.clear()

    def _directory(self, name: str) -> str:
        return f"{self._parents[-1]}/{component(name)}"

    async def _taken(self, runtime: Runtime, request: Request) -> Busy | None:
        """Look before a single try takes a place, which would cost two writes."""
        queue = await self._look(runtime, request.name)
        if queue.ahead(None, shared=request.shared) is None:
            return None
        return Busy(SLICE, await self._owner(runtime, request.name, queue))

    async def _look(self, runtime: Runtime, name: str) -> Line:
        """Read the queue as it is now, from whatever server."""
        path = self._directory(name)
        _, children = await self._session.ask(runtime, name, [Sync(path), GetChildren(path, None)])
        return line([] if isinstance(children, NoNodeError) else good(name, children))

    async def _owner(self, runtime: Runtime, name: str, queue: Line) -> str:
        path = f"{self._directory(name)}/{queue.nodes[0].name}"
        (found,) = await self._session.ask(runtime, name, [GetData(path, None)])
        return "" if isinstance(found, NoNodeError) else _text(good(name, found)[0])

    async def _stay(self, runtime: Runtime, place: Place) -> Line | None:
        """Read the queue again; None when our node is not in it, or may be another session's.

        What a server that is cut off tells is old, so a session that has not written for long proves that it lives.
        """
        if not place.path or place.session != self._session.id:
            return None
        name, directory = place.request.name, self._directory(place.request.name)
        self._places.keep(place, self._timeout + ALIVE)
        questions: list[Any] = [GetChildren(directory, None)]
        if self._is_unproven(runtime.now()):
            questions.insert(0, SetData(place.path, place.request.owner.encode(), -1))
        *_, children = await self._session.ask(runtime, name, questions)
        queue = line([] if isinstance(children, NoNodeError) else good(name, children))
        return queue if queue.find(place.node) else None

    def _is_unproven(self, sent: float) -> bool:
        return sent - self._session.proven > self._session.valid_for / 2

    async def _enter(self, runtime: Runtime, request: Request, old: Place | None) -> tuple[Place, Line]:
        """Make our node, or find the one that an attempt of unknown outcome has made."""
        if old is not None and (queue := await self._find(runtime, old)):
            return old, queue
        place = old or Place(request)
        owed, place.path, place.looks = place.looks, "", 2
        self._places.keep(place, self._timeout + ALIVE)
        directory = self._directory(request.name)
        created, children = await self._create(runtime, request, parents=directory not in self._known)
        if isinstance(created, NoNodeError):
            self._known.clear()
            created, children = await self._create(runtime, request, parents=True)
        place.path, stat = good(request.name, created)
        place.zxid, place.session, place.looks = stat.czxid, stat.ephemeralOwner, owed
        self._remember(directory)
        return place, line(good(request.name, children))

    async def _create(self, runtime: Runtime, request: Request, *, parents: bool) -> list[Any]:
        """Make our node and read the queue, in one round trip, also where there is nothing yet."""
        directory = self._directory(request.name)
        path = f"{directory}/{prefix(request.holder, shared=request.shared)}"
        questions: list[Any] = [
            Create2(path, request.owner.encode(), self._acl, QUEUED),
            GetChildren(directory, None),
        ]
        if parents:
            above = [Create(path, b"", self._acl, 0) for path in self._parents] if not self._known else []
            questions = [*above, CreateContainer(directory, b"", self._acl, CONTAINER), *questions]
        return (await self._session.ask(runtime, request.name, questions))[-2:]

    def _remember(self, directory: str) -> None:
        if len(self._known) >= KNOWN:
            self._known.pop(next(iter(self._known)), None)
        self._known[directory] = None

    async def _find(self, runtime: Runtime, place: Place) -> Line | None:
        """Search the queue for our own nodes: keep one that is this session's, remove the others."""
        name = place.request.name
        queue = await self._look(runtime, name)
        paths = [f"{self._directory(name)}/{node.name}" for node in queue.of(place.request.holder)]
        stats = await self._session.ask(runtime, name, [Exists(path, None) for path in paths]) if paths else []
        ours = [(path, stat) for path, stat in zip(paths, stats, strict=True) if good(name, stat) is not None]
        kept = next(((path, stat) for path, stat in ours if stat.ephemeralOwner == self._session.id), None)
        others = [Delete(path, -1) for path, _ in ours if kept is None or path != kept[0]]
        if others:
            await self._session.ask(runtime, name, others)
        if kept is None:
            return None
        place.path, place.zxid, place.session = kept[0], kept[1].czxid, kept[1].ephemeralOwner
        self._places.keep(place, self._timeout + ALIVE)
        return await self._stay(runtime, place)

    async def _granted(self, runtime: Runtime, place: Place, queue: Line, request: Request, sent: float) -> Granted:
        """Say what we hold, and for how long it is sure: only what a quorum has seen proves that our session lives."""
        offset = queue.offset
        if place.zxid + offset <= request.floor:
            offset = await self._raise(runtime, request, queue, request.floor + 1 - place.zxid)
        valid_for = min(request.ttl, self._session.proven + self._session.valid_for - sent)
        self._places.keep(place, valid_for)
        return Granted(place.zxid + offset, valid_for, place.path)

    async def _raise(self, runtime: Runtime, request: Request, queue: Line, offset: int) -> int:
        """Mark the lock, for good, so that all its tokens are greater from now on."""
        directory = self._directory(request.name)
        older = [Delete(f"{directory}/{mark(each)}", -1) for each in queue.marks]
        made, *_ = await self._session.ask(
            runtime, request.name, [Create(f"{directory}/{mark(offset)}", b"", self._acl, 0), *older]
        )
        if not isinstance(made, NodeExistsError):
            good(request.name, made)
        return offset

    async def _watch(self, runtime: Runtime, place: Place, queue: Line, ahead: Node) -> Busy:
        """Have the end of the one before us wake us, and learn who holds the lock."""
        directory, first = self._directory(place.request.name), queue.nodes[0].name
        if (place.watched, place.first[0], place.seen) != (ahead.name, first, place.wakes):
            place.seen, place.watched = place.wakes, ""
            questions = [GetData(f"{directory}/{ahead.name}", place.wake), GetData(f"{directory}/{first}", None)]
            place.look = lambda signal: self._session.post(GetChildren(directory, None), signal)
            before, holder = await self._session.ask(runtime, place.request.name, questions)
            if isinstance(before, NoNodeError):
                place.wake()
            else:
                good(place.request.name, before)
            owner = "" if isinstance(holder, NoNodeError) else _text(good(place.request.name, holder)[0])
            place.watched, place.first = ahead.name, (first, owner)
        self._places.keep(place, ALIVE)
        return Busy(SLICE, place.first[1])

    async def _remove(self, runtime: Runtime, place: Place) -> None:
        """Take a place that is at its end out of the queue."""
        name = place.request.name
        if place.path:
            (gone,) = await self._session.ask(runtime, name, [Delete(place.path, -1)])
            if not isinstance(gone, NoNodeError):
                good(name, gone)
            place.path = ""
        if place.looks:
            nodes = (await self._look(runtime, name)).of(place.request.holder)
            questions = [Delete(f"{self._directory(name)}/{node.name}", -1) for node in nodes]
            if questions:
                await self._session.ask(runtime, name, questions)
            place.looks -= 1
        self._gone(place)

    def _gone(self, place: Place) -> None:
        """Forget it, but look again after a session's length if a request of ours may still be on its way."""
        if place.looks:
            place.path = ""
            self._places.end(place, 1.5 * self._session.valid_for)
        else:
            self._places.forget(place)

    def _renewed(self, renewal: Renewal, answer: Any, sent: float) -> float | None:
        """Judge one renewal by what the server says of its node, which must be this session's."""
        place = self._places.get(renewal.request.holder)
        if answer is None or isinstance(answer, NoNodeError) or place is None:
            return None
        if good(renewal.request.name, answer).ephemeralOwner != self._session.id:
            return None
        valid_for = min(renewal.request.ttl, self._session.proven + self._session.valid_for - sent)
        self._places.keep(place, valid_for)
        return valid_for if valid_for > 0 else None

    async def _states(self, runtime: Runtime, names: Sequence[str]) -> list[LockState]:
        directories = [self._directory(name) for name in names]
        looks = [GetChildren(path, None) for path in directories]
        _, *children = await self._session.ask(runtime, "", [Sync(self._parents[-1]), *looks], self._limit(looks))
        queues = [line([] if isinstance(each, NoNodeError) else good("", each)) for each in children]
        reads = [
            GetData(f"{path}/{node.name}", None)
            for path, queue in zip(directories, queues, strict=True)
            for node in queue.nodes
        ]
        found = iter(await self._session.ask(runtime, "", reads, self._limit(reads)) if reads else [])
        return [
            _state(name, queue, [next(found) for _ in queue.nodes]) for name, queue in zip(names, queues, strict=True)
        ]

    def _limit(self, questions: Sequence[Any]) -> float:
        return self._timeout + EACH * len(questions)


def _state(name: str, queue: Line, found: Sequence[Any]) -> LockState:
    read = [
        (node, *good(name, one))
        for node, one in zip(queue.nodes, found, strict=True)
        if not isinstance(one, NoNodeError)
    ]
    inside = set(queue.holders())
    holders = [
        Holder(node.holder, stat.czxid + queue.offset, node.shared, _text(data), None)
        for node, data, stat in read
        if node in inside
    ]
    waiters = [
        Waiter(node.holder, node.shared, _text(data), max(0.0, time.time() - stat.ctime / 1000))
        for node, data, stat in read
        if node not in inside
    ]
    return LockState(name, tuple(holders), tuple(waiters))


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


_backends: weakref.WeakSet[ZooKeeperBackend] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for backend in list(_backends):
        backend.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
