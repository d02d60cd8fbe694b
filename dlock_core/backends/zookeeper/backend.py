"""Leases in ZooKeeper (3.5 or newer): ephemeral nodes in the order of their creation, each watching the one before.

A node ends with the session of its process, so the end of the session frees the locks of a process that died or was cut
off: `session` seconds after its last sign of life, whatever the ttl. While the process lives, it removes nodes that are
not renewed. The token is the czxid, the number of the transaction that created the node: it grows across all locks,
leaders and restarts. (Idea of the queue: the recipes page of the ZooKeeper documentation.)
"""

from __future__ import annotations

import select
import weakref
from typing import TYPE_CHECKING, Any

from dlock_core.backend import Busy, Capabilities, Granted, Released, RenewalFailure, refuse_to_pickle
from dlock_core.backends.zookeeper.nodes import EXTRA_S_PER_REQUEST, LockNodes, parse_queue
from dlock_core.backends.zookeeper.own_nodes import MAX_WAIT_S, WAITER_GRACE_S, QueueClient
from dlock_core.backends.zookeeper.session import EnsembleAddress, ZooKeeperSession, checked, read_url
from dlock_core.errors import NotSupported
from dlock_core.extras import needed_by
from dlock_core.options import check_seconds, checked_prefix
from dlock_core.runtime import clock
from dlock_core.scheduler import after_fork_in_child, call_in_background

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backend import AcquireRequest, LockState, Renewal, RenewalResult
    from dlock_core.backends.zookeeper.nodes import Queue
    from dlock_core.backends.zookeeper.own_nodes import OwnNode, OwnNodes
    from dlock_core.doctor.finding import Finding
    from dlock_core.runtime import Runtime

__all__ = ["ZooKeeperBackend"]

with needed_by("the ZooKeeper store"):
    from kazoo.exceptions import NoNodeError
    from kazoo.protocol.serialization import Exists, SetData


class ZooKeeperBackend:
    """An ensemble of ZooKeeper servers, through one session for all leases of this process.

    `timeout` is the limit of each request in seconds. `session` is the session's length in seconds; the servers may
    grant less or more. A lease certainly holds for two thirds of it and no longer, unless it is renewed. `prefix` is
    the node below the URL's chroot that contains the locks. `fair=False` makes no difference, because every request
    queues.
    """

    capabilities = Capabilities(expiry="session", fair=True, shared=True, lists_waiters=True, ttl_min=0.1)

    __reduce__ = refuse_to_pickle

    def __init__(
        self, address: EnsembleAddress, *, prefix: str = "dlock", timeout: float = 2.0, session: float = 15.0
    ) -> None:
        if not hasattr(select, "poll"):
            raise NotSupported("zookeeper:// needs select.poll, which Windows lacks and eventlet removes")
        check_seconds("timeout", timeout)
        check_seconds("session", session)
        prefix = checked_prefix(prefix)
        if not prefix or "/" in prefix or prefix in {".", ".."}:
            raise ValueError(f"prefix is the name of one node, not {prefix!r}")
        self._address, self._prefix, self._timeout, self._length = address, prefix, timeout, session
        self._begin()
        after_fork_in_child(self._after_fork)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> ZooKeeperBackend:
        """Return the store of the servers at zookeeper://[user:password@]host:port,host:port/chroot."""
        return cls(read_url(url), **options)

    def _begin(self) -> None:
        self._session = ZooKeeperSession(self._address, self._timeout, self._length)
        self._nodes = LockNodes(self._session, self._address, self._prefix)
        self._queue_client = QueueClient(self._session, self._nodes, self._timeout)
        self._own_nodes = self._queue_client.own_nodes
        # kazoo's threads keep the session until it is ended, which takes too long for a finalizer.
        self._when_forgotten = weakref.finalize(self, call_in_background, _close, self._own_nodes, self._session)
        self._when_forgotten.atexit = False

    def _after_fork(self) -> None:
        """Reset in a forked child: session and leases belong to its parent."""
        self._when_forgotten.detach()
        self._session.abandon()
        self._begin()

    async def try_acquire(
        self, runtime: Runtime, request: AcquireRequest, ticket: Any = None, *, unsure: bool = False
    ) -> Granted | Busy:
        sent, own_node = runtime.now(), self._own_nodes.get(request.holder)
        if own_node is None and not request.queue and (busy := await self._taken(runtime, request)):
            return busy
        queue = await self._queue_client.stay(runtime, own_node) if own_node is not None else None
        if own_node is None or queue is None:
            own_node, queue = await self._queue_client.enter(runtime, request, own_node)
        node = queue.find(own_node.node)
        if node is None:  # Another process removed it as soon as it was created.
            return Busy(0.0)
        ahead = queue.ahead(node, shared=request.shared)
        if ahead is None:
            return await self._granted(runtime, own_node, queue, request, sent)
        if not request.queue:
            await self.abandon(runtime, request)
            return Busy(MAX_WAIT_S, await self._nodes.owner(runtime, request.name, queue.nodes[0]))
        return await self._queue_client.watch(runtime, own_node, queue, ahead)

    async def wait(
        self, runtime: Runtime, request: AcquireRequest, busy: Busy, timeout: float
    ) -> Granted | Busy | None:
        """Sleep until the node ahead of ours is gone; the queue is read together with the wake-up."""
        sent, own_node = runtime.now(), self._own_nodes.get(request.holder)
        if own_node is None or not self._own_nodes.keep(own_node, timeout + WAITER_GRACE_S):
            return None
        signal = own_node.listen(runtime.signal())
        try:
            if own_node.wakes == own_node.seen:
                await runtime.wait(signal, min(timeout, MAX_WAIT_S))
        finally:  # Otherwise the queue would be read for a waiter that has gone.
            children = own_node.answer()
        if not isinstance(children, list) or own_node.session != self._session.id or self._session.is_doubtful(sent):
            return None
        queue = parse_queue(children)
        node = queue.find(own_node.node)
        if node is None or queue.ahead(node, shared=request.shared) is not None:
            return None
        return await self._granted(runtime, own_node, queue, request, sent)

    async def abandon(self, runtime: Runtime, request: AcquireRequest, ticket: Any = None) -> None:
        """Leave the queue; without a connection a thread retries this until it is done."""
        own_node = self._own_nodes.get(request.holder)
        if own_node is not None:
            self._own_nodes.end(own_node, self._timeout if self._session.is_connected else 0.0)
            if self._session.is_connected:
                await self._queue_client.remove(runtime, own_node)

    async def release(self, runtime: Runtime, request: AcquireRequest, granted: Granted) -> Released:
        own_node = self._own_nodes.get(request.holder)
        if own_node is not None:
            self._own_nodes.end(own_node, self._timeout)  # The thread removes it even if this call fails.
        found = await self._nodes.delete(runtime, request.name, granted.handle)
        if own_node is not None:
            self._own_nodes.forget(own_node)
        if found:
            return Released.RELEASED
        return Released.STOLEN if (await self._nodes.look(runtime, request.name)).nodes else Released.EXPIRED

    async def renew(self, runtime: Runtime, renewals: Sequence[Renewal]) -> list[RenewalResult]:
        """Write to one node, which needs a quorum, and then read the others: they belong to one session."""
        sent = runtime.now()
        first, *others = [renewal.granted.handle for renewal in renewals]
        request = renewals[0].request
        questions = [SetData(first, request.owner.encode(), -1), *[Exists(path, None) for path in others]]
        within, more = min(renewal.request.ttl / 3 for renewal in renewals), EXTRA_S_PER_REQUEST * len(renewals)
        answers = await self._session.ask(runtime, request.name, questions, within=within, more=more)
        return [self._renewed(one.request, answer, sent) for one, answer in zip(renewals, answers, strict=True)]

    async def inspect(self, runtime: Runtime, name: str | None = None) -> list[LockState]:
        if name is not None:
            return await self._nodes.states(runtime, [name])
        states = await self._nodes.states(runtime, await self._nodes.names(runtime))
        return [state for state in states if state.holders or state.waiters]

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        queue = await self._nodes.look(runtime, name)
        paths = [f"{self._nodes.directory(name)}/{node.name}" for node in queue.holders()]
        stats = await self._session.ask(runtime, name, [Exists(path, None) for path in paths]) if paths else []
        for path, stat in zip(paths, stats, strict=True):
            if checked(name, stat) is not None and token in {stat.czxid, stat.czxid + queue.offset}:
                return await self._nodes.delete(runtime, name, path)
        return False

    async def diagnose(self, runtime: Runtime) -> list[Finding]:
        """Examine the session and every server, from a thread; raises BackendUnavailable."""
        from dlock_core.backends.zookeeper import health

        return await health.diagnose(self._session, self._address.hosts, runtime)

    def close(self) -> None:
        """End the session, unless a lease still needs it: leases stay as they are."""
        if not len(self._own_nodes):
            self._session.close()
            self._own_nodes.clear()

    async def _taken(self, runtime: Runtime, request: AcquireRequest) -> Busy | None:
        """Check before a single try creates a node, which would cost two writes."""
        queue = await self._nodes.look(runtime, request.name)
        if queue.ahead(None, shared=request.shared) is None:
            return None
        return Busy(MAX_WAIT_S, await self._nodes.owner(runtime, request.name, queue.nodes[0]))

    async def _granted(
        self, runtime: Runtime, own_node: OwnNode, queue: Queue, request: AcquireRequest, sent: float
    ) -> Granted | Busy:
        offset = queue.offset
        if own_node.zxid + offset <= request.floor:
            offset = request.floor + 1 - own_node.zxid
            await self._nodes.raise_tokens(runtime, request.name, queue, offset)
        valid_for = self._session.surely(request.ttl, sent)
        if not self._own_nodes.keep(own_node, valid_for):  # silent for too long: the node is being removed
            return Busy(0.0)
        return Granted(own_node.zxid + offset, valid_for, own_node.path)

    def _renewed(self, request: AcquireRequest, answer: Any, sent: float) -> RenewalResult:
        """Return the result of one renewal by the stat of its node, which must belong to this session."""
        own_node = self._own_nodes.get(request.holder)
        if answer is None or isinstance(answer, NoNodeError) or own_node is None:
            return RenewalFailure.LOST
        if checked(request.name, answer).ephemeralOwner != self._session.id:
            return RenewalFailure.LOST
        valid_for = self._session.surely(request.ttl, sent)
        kept_for = max(valid_for, own_node.due - clock())  # Another thread's renewal may have been for longer.
        return valid_for if valid_for > 0 and self._own_nodes.keep(own_node, kept_for) else RenewalFailure.LOST


def _close(own_nodes: OwnNodes, session: ZooKeeperSession) -> None:
    own_nodes.clear()
    session.close()
