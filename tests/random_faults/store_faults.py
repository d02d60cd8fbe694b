"""Faults of the stores' servers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import redis

from tests.random_faults.schedule import Fault
from tests.random_faults.world import World
from tests.redis_sentinel import HASTY, PATIENT
from tests.servers import Server


@contextmanager
def stop_server(world: World, fault: Fault) -> Iterator[None]:
    """SIGSTOP: the connections stay, but the server does not reply."""
    server = world.servers[fault.target]
    server.pause()
    yield
    server.resume()


@contextmanager
def restart(world: World, fault: Fault) -> Iterator[None]:
    """SIGKILL: the server comes back with the data that it had written to disk."""
    server = world.servers[fault.target]
    server.kill()
    yield
    server.start()


@contextmanager
def restart_empty(world: World, fault: Fault) -> Iterator[None]:
    """SIGKILL: the server comes back without its data."""
    server = world.servers[fault.target]
    server.kill()
    yield
    server.restart(keep_data=False)


@contextmanager
def flush(world: World, fault: Fault) -> Iterator[None]:
    _ask(world.servers[fault.target], "FLUSHALL")
    yield


@contextmanager
def kill_clients(world: World, fault: Fault) -> Iterator[None]:
    _ask(world.servers[fault.target], "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    yield


@contextmanager
def pause_clients(world: World, fault: Fault) -> Iterator[None]:
    _ask(world.servers[fault.target], "CLIENT", "PAUSE", int(fault.seconds * 1000), "ALL")
    yield


@contextmanager
def evict(world: World, fault: Fault) -> Iterator[None]:
    """No memory is left: keys are evicted at random, and writes are refused."""
    server = world.servers[fault.target]
    _ask(server, "CONFIG", "SET", "maxmemory-policy", "allkeys-random", "maxmemory", "1")
    yield
    _ask(server, "CONFIG", "SET", "maxmemory", "0", "maxmemory-policy", "noeviction")


@contextmanager
def clock(world: World, fault: Fault) -> Iterator[None]:
    """The clock of one server is stepped, and stepped back at the end."""
    file = world.clocks.get(fault.target)
    if file is not None:
        file.write_text(str(fault.step))
    yield
    if file is not None:
        file.write_text("0")


@contextmanager
def stop_master(world: World, fault: Fault) -> Iterator[None]:
    if fault.target == "sentinel":
        assert world.sentinel is not None
        master = world.sentinel.master()
    else:
        assert world.cluster is not None
        master = world.cluster.masters()[0]
    master.pause()
    yield
    master.resume()


@contextmanager
def fail_over(world: World, fault: Fault) -> Iterator[None]:
    yield from _fail_over(world, fault, loses_writes=False)


@contextmanager
def fail_over_losing_writes(world: World, fault: Fault) -> Iterator[None]:
    """The replica falls behind, and the master dies: its latest grants are forgotten."""
    yield from _fail_over(world, fault, loses_writes=True)


def _fail_over(world: World, fault: Fault, *, loses_writes: bool) -> Iterator[None]:
    steps = _in_sentinel if fault.target == "sentinel" else _in_cluster
    return steps(world, loses_writes=loses_writes)


def _in_sentinel(world: World, *, loses_writes: bool) -> Iterator[None]:
    group = world.sentinel
    assert group is not None
    old, [replica] = group.master(), group.replicas()
    if loses_writes:
        _fall_behind(old, replica)
    yield
    old.kill()
    replica.resume()
    group.be(HASTY)
    new = group.moved(old)
    group.be(PATIENT)
    before = list(old.command[: old.command.index("--replicaof")] if "--replicaof" in old.command else old.command)
    old.command = [*before, "--replicaof", "127.0.0.1", str(new.port)]
    old.start()
    group.settle()


def _in_cluster(world: World, *, loses_writes: bool) -> Iterator[None]:
    cluster = world.cluster
    assert cluster is not None
    master = cluster.masters()[0]
    replica = cluster.replica_of(master)
    if loses_writes:
        _fall_behind(master, replica)
    yield
    cluster.be(500) if not loses_writes else None
    master.kill()
    replica.resume()
    cluster.be(500)
    cluster.heal()


def _fall_behind(master: Server, replica: Server) -> None:
    replica.pause()
    _ask(master, "CLIENT", "KILL", "TYPE", "replica")


def _ask(server: Server, *command: object) -> None:
    with redis.Redis.from_url(server.url, socket_timeout=10) as client:
        client.execute_command(*command)  # type: ignore[no-untyped-call]


FAULTS: Final[dict[str, Callable[[World, Fault], object]]] = {
    "stop server": stop_server, "restart": restart, "restart empty": restart_empty, "flush": flush,
    "kill clients": kill_clients, "pause clients": pause_clients, "evict": evict, "clock": clock,
    "stop master": stop_master, "fail over": fail_over, "fail over losing writes": fail_over_losing_writes,
}  # fmt: skip
FORGETS: Final = ("flush", "restart empty", "evict", "fail over", "fail over losing writes")
"""Faults after which a store may have forgotten a grant."""
