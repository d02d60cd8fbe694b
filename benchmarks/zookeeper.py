"""Compare locks in ZooKeeper, free and contended: ours, kazoo's own Lock, and tooz, which wraps it.

    python -m benchmarks.zookeeper --rounds 9 --count 100 --processes 2,8,32

There is one server, in memory. The floor of the free lock is the wire itself: create and list in one write, then
delete, on a bare socket. The contended lock has no such floor; there kazoo's Lock counts as 1.
"""

import itertools
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from kazoo.client import KazooClient
from kazoo.protocol.serialization import Connect, Create, Create2, Delete, GetChildren
from kazoo.security import OPEN_ACL_UNSAFE

from benchmarks import measure
from benchmarks.floors import Names
from benchmarks.sections import Make, Pair, tables
from dlock_core import Lock
from dlock_core.backends.zookeeper.backend import ZooKeeperBackend
from tests.servers import Server
from tests.zookeeper_servers import zookeeper

logging.getLogger("kazoo").setLevel(logging.ERROR)  # it logs every connection that the end of the server breaks

FLOOR: Final = "floor: create + list, delete on a bare socket"
PEER: Final = "kazoo Lock"


class RawZooKeeper:
    """One session on one socket: pack, send, read."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.xids = itertools.count(1)
        self.frames = self.read()
        self.send(Connect(0, 0, 60_000, 0, b"\0" * 16, False).serialize())
        next(self.frames)
        self.call(Create("/floor", b"", OPEN_ACL_UNSAFE, 0))

    def call(self, *requests: Any) -> list[bytes]:
        self.send(*[struct.pack("!ii", next(self.xids), one.type) + one.serialize() for one in requests])
        return [next(self.frames) for _ in requests]

    def send(self, *bodies: bytes) -> None:
        self.socket.sendall(b"".join(struct.pack("!i", len(body)) + body for body in bodies))

    def read(self) -> Iterator[bytes]:
        buffer = b""
        while True:
            while len(buffer) < 4 or len(buffer) < 4 + int.from_bytes(buffer[:4], "big"):
                buffer += self.socket.recv(65536)
            end = 4 + int.from_bytes(buffer[:4], "big")
            yield buffer[4:end]
            buffer = buffer[end:]


def floor(port: int) -> measure.Operation:
    raw, name, holder = RawZooKeeper(port), Names("floor").next, secrets.token_hex(16)
    for _ in range(1000):
        raw.call(Create(f"/floor/{name()}", b"", OPEN_ACL_UNSAFE, 0))

    def operation() -> None:
        lock = f"/floor/{name()}"
        node = Create2(f"{lock}/x-{holder}-", b"", OPEN_ACL_UNSAFE, 3)
        created, _ = raw.call(node, GetChildren(lock, None))
        raw.call(Delete(Create2.deserialize(created, 16)[0], -1))

    return operation


def ours(port: int, *, renew: bool) -> measure.Operation:
    backend, name = ZooKeeperBackend.from_url(f"zookeeper://127.0.0.1:{port}"), Names("dlock").next

    def operation() -> None:
        Lock(backend, name(), ttl=30, renew=renew).acquire().release()

    return operation


def kazoo_client(port: int) -> KazooClient:
    client = KazooClient(f"127.0.0.1:{port}")
    client.start()
    return client


def kazoo_lock(port: int) -> measure.Operation:
    client, name = kazoo_client(port), Names("kazoo").next

    def operation() -> None:
        lock = client.Lock(f"/kazoo/{name()}", "benchmark")
        lock.acquire()
        lock.release()

    return operation


def kept_kazoo_lock(port: int) -> measure.Operation:
    """Measure the best case of kazoo: one lock object is used again, and knows that the lock's node exists."""
    lock = kazoo_client(port).Lock("/kazoo/kept", "benchmark")

    def operation() -> None:
        lock.acquire()
        lock.release()

    return operation


def coordinator(port: int) -> Any:
    from tooz import coordination

    one = coordination.get_coordinator(f"zookeeper://127.0.0.1:{port}", secrets.token_hex(8).encode())
    one.start()
    return one


def tooz_lock(port: int) -> measure.Operation:
    one, name = coordinator(port), Names("tooz").next

    def operation() -> None:
        lock = one.get_lock(name().encode())
        lock.acquire()
        lock.release()

    return operation


def free(port: int) -> dict[str, measure.Operation]:
    every = {
        FLOOR: floor(port),
        "dlock": ours(port, renew=False),
        "dlock, renewed by the watchdog": ours(port, renew=True),
        PEER: kazoo_lock(port),
        "kazoo Lock, one object for one name": kept_kazoo_lock(port),
    }
    with_tooz(lambda: every.update({"tooz": tooz_lock(port)}))
    return every


def with_tooz(step: Callable[[], None]) -> None:
    try:
        step()
    except ImportError:
        print("tooz is missing: pip install tooz")


def contended_ours(port: int) -> Pair:
    backend = ZooKeeperBackend.from_url(f"zookeeper://127.0.0.1:{port}")
    return lambda: Lock(backend, "ours", ttl=30, wait=None).acquire(), lambda lease: lease.release()


def contended_kazoo(port: int) -> Pair:
    client = kazoo_client(port)

    def acquire() -> Any:
        lock = client.Lock("/kazoo/contended", "benchmark")
        lock.acquire()
        return lock

    return acquire, lambda lock: lock.release()


def contended_tooz(port: int) -> Pair:
    one = coordinator(port)

    def acquire() -> Any:
        lock = one.get_lock(b"contended")
        lock.acquire()
        return lock

    return acquire, lambda lock: lock.release()


def contended(port: int) -> dict[str, Make]:
    every: dict[str, Make] = {PEER: partial(contended_kazoo, port), "dlock": partial(contended_ours, port)}

    def add() -> None:
        import tooz.drivers.zookeeper  # before the fork: every worker would import it, and be late

        every[tooz.__name__] = partial(contended_tooz, port)

    with_tooz(add)
    return every


@contextmanager
def server() -> Iterator[Server]:
    with measure.scratch() as directory:
        one = zookeeper(directory / "zookeeper", "-Dznode.container.checkIntervalMs=60000", "-Xmx256m")
        one.start()
        try:
            yield one
        finally:
            one.stop()


def main() -> None:
    options = measure.arguments(__doc__, rounds=9, count=100, repeat=3, seconds=2.0, processes="2,8,32", think="0,5")
    report = measure.Report(options.format)
    with server() as one:
        assert one.process is not None
        tables(report, "ZooKeeper", PEER, contended(one.port), options, [one.process.pid])
        every = measure.chosen(free(one.port), options.only, FLOOR)
        runs = measure.interleave(every, FLOOR, options.rounds, options.count, [one.process.pid])
        rows = [{"contestant": name, **runs[name].row()} for name in every]
        report.add(f"ZooKeeper, free: acquire and release ({threading.active_count()} threads)", rows)
    report.end()


if __name__ == "__main__":
    main()
