"""A Redis Cluster for tests: three masters, a replica for each, slots that move, masters that die."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import redis
from redis.exceptions import RedisError, ResponseError

from tests import servers
from tests.servers import Server
from tests.waiting import WITHIN, until

HOST: Final = "127.0.0.1"
SLOTS: Final = 16384
MASTERS: Final = 3
PATIENT, CALM, HASTY = 60_000, 1000, 500
"""Milliseconds after which a silent node counts as dead: normally, where masters vote, and where a master has to die.

Within twice that time, masters do not vote again for a replica of the same master.
"""


class Cluster:
    """Six servers, three of which are masters at a time."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.nodes = [_server(directory.with_name(f"{directory.name}{place}"), options) for place in range(2 * MASTERS)]
        self._clients = {
            node.port: redis.Redis(host=HOST, port=node.port, decode_responses=True, socket_timeout=WITHIN)
            for node in self.nodes
        }

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes)

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        for place, node in enumerate(self.nodes):
            self.ask(node, "CLUSTER", "SET-CONFIG-EPOCH", place + 1)
        for node in self.nodes[1:]:
            self.ask(self.nodes[0], "CLUSTER", "MEET", HOST, node.port, _bus(node))
        for place, node in enumerate(self.nodes[:MASTERS]):
            first, end = (SLOTS * part // MASTERS for part in (place, place + 1))
            self.ask(node, "CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        until(lambda: all(self._knows_all(node) for node in self.nodes))
        for master, replica in zip(self.nodes[:MASTERS], self.nodes[MASTERS:], strict=True):
            self.ask(replica, "CLUSTER", "REPLICATE", self.id_of(master))
        self.heal()

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()
            self._clients[node.port].close()

    def ask(self, node: Server, *command: Any) -> Any:
        return self._clients[node.port].execute_command(*command)

    def heal(self) -> None:
        """Start or resume every node, and wait until every slot is served and none moves, and replicas are in sync.

        A replica learns where a slot has moved to a moment after the masters, and may be the node that tests ask.
        """
        for node in self.nodes:
            node.resume()
            if node.process is None or node.process.poll() is not None:
                node.start()
        until(lambda: all(self._is_well(node) for node in self.nodes) and len(set(map(self._slots, self.nodes))) == 1)
        self.be(PATIENT)

    def be(self, milliseconds: int) -> None:
        """Set, on the running nodes, after how many milliseconds a silent node counts as dead."""
        for node in self.running:
            self.ask(node, "CONFIG", "SET", "cluster-node-timeout", milliseconds)

    @property
    def running(self) -> list[Server]:
        return [node for node in self.nodes if node.process is not None and node.process.poll() is None]

    def id_of(self, node: Server) -> str:
        return str(self.ask(node, "CLUSTER", "MYID"))

    def masters(self) -> list[Server]:
        return [node for node in self.running if self.ask(node, "ROLE")[0] == "master"]

    def master_of(self, key: str) -> Server:
        """Return the master that has the slot of a key, as the first running node sees it."""
        slot = self.slot(key)
        (owner,) = {port for first, last, port in self._slots(self.running[0]) if first <= slot <= last}
        return self.at(owner)

    def replica_of(self, master: Server) -> Server:
        return self.at(int(self.ask(master, "ROLE")[2][0][1]))

    def other_than(self, master: Server) -> Server:
        """Return another master."""
        return next(node for node in self.masters() if node is not master)

    def at(self, port: int) -> Server:
        return next(node for node in self.nodes if node.port == port)

    def slot(self, key: str) -> int:
        return int(self.ask(self.running[0], "CLUSTER", "KEYSLOT", key))

    def keys(self, prefix: str) -> set[str]:
        """Return every key with this prefix, on any master."""
        return {key for node in self.masters() for key in self.ask(node, "KEYS", f"{prefix}*")}

    def left_over(self, prefix: str) -> list[str]:
        """Return the keys that outlive all leases and waiters, but for the counters and the lists that renewals clean up."""
        found = {key for key in self.keys(prefix) if not key.endswith(("}token", "}locks"))}
        moments = {key: 5000 if key.endswith(":alive") else 2000 for key in found}
        return sorted(key for key in found if not 0 <= self._life(key) <= moments[key])

    def begin_to_move(self, key: str, target: Server) -> "Move":
        """Begin to move the slot of a key to another master; no key moves yet."""
        return Move(self, self.slot(key), self.master_of(key), target)

    def fail_over(self, master: Server) -> Server:
        """Kill a master, wait until its replica has taken over, and return the replica."""
        replica = self.replica_of(master)
        self.be(HASTY)
        master.kill()
        until(lambda: self.ask(replica, "ROLE")[0] == "master" and self._serves(replica))
        return replica

    def switch(self, master: Server) -> Server:
        """Let a replica take over from its master in good order, and return the replica."""
        replica = self.replica_of(master)
        self.be(CALM)

        def has_switched() -> bool:
            return bool(self.ask(replica, "ROLE")[0] == "master" and self.ask(master, "ROLE")[0] == "slave")

        for _ in range(int(WITHIN)):
            with suppress(ResponseError):  # It may have become the master since the last look.
                self.ask(replica, "CLUSTER", "FAILOVER")
            if comes(has_switched, CALM / 1000):
                break
        self.be(PATIENT)
        return replica

    def _slots(self, node: Server) -> frozenset[tuple[int, int, int]]:
        """Return the first and last slot of each range, and the port of its master, as a node sees them."""
        return frozenset((first, last, masters[0][1]) for first, last, *masters in self.ask(node, "CLUSTER", "SLOTS"))

    def _life(self, key: str) -> int:
        left = int(self.ask(self.master_of(key), "PTTL", key))
        return 0 if left == -2 else left

    def _serves(self, node: Server) -> bool:
        return "cluster_state:ok" in self.ask(node, "CLUSTER", "INFO")

    def _knows_all(self, node: Server) -> bool:
        return len(self.ask(node, "CLUSTER", "NODES").splitlines()) == len(self.nodes)

    def _is_well(self, node: Server) -> bool:
        """Return whether it sees no node failing and no slot moving, and has a link to its replica or master."""
        try:
            seen, role = self.ask(node, "CLUSTER", "NODES"), self.ask(node, "ROLE")
        except RedisError:
            return False
        in_step = role[2] if role[0] == "master" else role[3] == "connected"
        return bool(in_step) and self._serves(node) and not re.search(r"fail|handshake|noaddr|->-|-<-", seen)


class Move:
    """A slot on its way from one master to another, as `redis-cli --cluster reshard` moves it."""

    def __init__(self, cluster: Cluster, slot: int, source: Server, target: Server) -> None:
        self.cluster, self.slot, self.source, self.target = cluster, slot, source, target
        ask = cluster.ask
        ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.id_of(source))
        ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id_of(target))

    def carry(self, *keys: str) -> None:
        """Move these keys, or all that are still at the source."""
        if found := keys or self.cluster.ask(self.source, "CLUSTER", "GETKEYSINSLOT", self.slot, 10_000):
            self.cluster.ask(self.source, "MIGRATE", HOST, self.target.port, "", 0, 5000, "KEYS", *found)

    def finish(self) -> None:
        """Move the rest, and assign the slot to the target."""
        self.carry()
        owner = self.cluster.id_of(self.target)
        for node in (self.target, self.source, *self.cluster.masters()):
            self.cluster.ask(node, "CLUSTER", "SETSLOT", self.slot, "NODE", owner)


@contextmanager
def cluster(directory: Path, *options: str) -> Iterator[Cluster]:
    cluster = _started(directory, options)
    try:
        yield cluster
    finally:
        cluster.stop()


def _started(directory: Path, options: tuple[str, ...], attempt: int = 1) -> Cluster:
    """Start a cluster; if another server has meanwhile taken one of its twelve ports, try others."""
    cluster = Cluster(directory.with_name(f"{directory.name}-{attempt}-"), *options)
    try:
        cluster.start()
    except BaseException as error:
        cluster.stop()
        if attempt == 3 or not isinstance(error, RuntimeError):
            raise
        return _started(directory, options, attempt + 1)
    return cluster


def comes(condition: Callable[[], object], within: float) -> bool:
    """Wait a while for what may not happen, and return whether it has."""
    for _ in range(int(within * 50)):
        if condition():
            return True
        threading.Event().wait(0.02)
    return False


def _server(directory: Path, options: tuple[str, ...]) -> Server:
    enabled = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--appendonly", "no"]
    bus = ["--cluster-port", str(servers.free_port()), "--cluster-node-timeout", str(PATIENT)]
    soon = ["--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0"]
    return servers.redis(directory, *enabled, *bus, *soon, *options)


def _bus(node: Server) -> int:
    return int(node.command[node.command.index("--cluster-port") + 1])
