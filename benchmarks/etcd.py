"""Compare locks in etcd, free and contended: ours, etcd3gw, tooz and aetcd, against the gateway on a bare socket.

    python -m benchmarks.etcd --rounds 9 --count 60 --seconds 3

The floor puts a key on an existing lease, and deletes it: two writes, which no lock can do without. etcd3gw's lock
cannot wait, so it is polled every 10 ms; contended, its throughput counts as 1. With --directory the servers keep their
data there: on a disk every write waits for the disk, in memory only work counts.
"""

import asyncio
import contextlib
import json
import shutil
import socket
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import etcd3gw
from tooz import coordination

from benchmarks import measure
from benchmarks.floors import Names
from benchmarks.sections import Pair, tables
from dlock_core import AsyncLock, Lock
from dlock_core.backends.etcd.backend import EtcdBackend
from tests import etcd_servers
from tests.etcd_servers import Cluster

FLOOR: Final = "floor: put and delete on a bare socket"
POLLED: Final = "etcd3gw Lock, polled"
HOST: Final = "127.0.0.1"


class Raw:
    """The gateway without a client library."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.lease = json.loads(self.ask("lease/grant", {"TTL": 3600}))["ID"]

    def ask(self, path: str, body: dict[str, Any]) -> bytes:
        data = json.dumps(body).encode()
        head = f"POST /v3/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        self._socket.sendall(head.encode() + data)
        reply = b""
        while b"\r\n\r\n" not in reply or not _is_whole(reply):
            reply += self._socket.recv(65536)
        return reply.partition(b"\r\n\r\n")[2]


def _is_whole(reply: bytes) -> bool:
    head, _, body = reply.partition(b"\r\n\r\n")
    return len(body) == int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])


def floor(port: int) -> measure.Operation:
    raw, name = Raw(port), Names("floor").next

    def operation() -> None:
        key = b64encode(name().encode()).decode()
        compare = {"key": key, "target": "CREATE", "create_revision": "0"}
        put = {"request_put": {"key": key, "value": key, "lease": raw.lease}}
        assert b'"succeeded":true' in raw.ask("kv/txn", {"compare": [compare], "success": [put]})
        assert b'"deleted":"1"' in raw.ask("kv/deleterange", {"key": key})

    return operation


def ours(port: int) -> measure.Operation:
    backend, name = EtcdBackend(f"etcd://{HOST}:{port}"), Names("dlock").next
    return lambda: Lock(backend, name(), ttl=30).acquire().release()


def ours_for_tasks(port: int) -> measure.Operation:
    backend, name, loop = EtcdBackend(f"etcd://{HOST}:{port}"), Names("dlock-async").next, asyncio.new_event_loop()

    async def once() -> None:
        await (await AsyncLock(backend, name(), ttl=30).acquire()).release()

    return lambda: loop.run_until_complete(once())


def etcd3gw_lock(port: int) -> measure.Operation:
    client, name = etcd3gw.client(host=HOST, port=port, api_path="/v3/"), Names("etcd3gw").next

    def operation() -> None:
        lock = client.lock(name(), ttl=30)
        assert lock.acquire()
        lock.release()

    return operation


def tooz_lock(port: int) -> measure.Operation:
    coordinator, name = tooz_coordinator(port), Names("tooz").next

    def operation() -> None:
        lock = coordinator.get_lock(name().encode())
        assert lock.acquire()
        lock.release()

    return operation


def tooz_coordinator(port: int) -> Any:
    coordinator = coordination.get_coordinator(f"etcd3+http://{HOST}:{port}?api_version=v3", b"bench")
    coordinator.start()
    return coordinator


def aetcd_lock(port: int) -> measure.Operation:
    import aetcd  # not above: its gRPC does not survive a fork

    loop, name = asyncio.new_event_loop(), Names("aetcd").next
    client = loop.run_until_complete(_opened(aetcd.Client, port))

    async def once() -> None:
        lock = client.lock(name().encode(), ttl=30)
        assert await lock.acquire()
        await lock.release()

    return lambda: loop.run_until_complete(once())


async def _opened(client: Callable[..., Any], port: int) -> Any:
    return client(host=HOST, port=port)


UNCONTENDED: Final[dict[str, Callable[[int], measure.Operation]]] = {
    FLOOR: floor,
    "dlock": ours,
    "dlock, asyncio": ours_for_tasks,
    "etcd3gw Lock": etcd3gw_lock,
    "tooz, etcd3gw driver": tooz_lock,
    "aetcd Lock (gRPC), asyncio": aetcd_lock,
}


def ours_waiting(port: int) -> Pair:
    backend = EtcdBackend(f"etcd://{HOST}:{port}")
    return lambda: Lock(backend, "ours", ttl=30, wait=None).acquire(), lambda lease: lease.release()


def etcd3gw_polled(port: int) -> Pair:
    client = etcd3gw.client(host=HOST, port=port, api_path="/v3/")

    def acquire() -> Any:
        lock = client.lock("etcd3gw", ttl=30)
        while not lock.acquire():
            time.sleep(0.01)
        return lock

    return acquire, lambda lock: lock.release()


def tooz_waiting(port: int) -> Pair:
    coordinator = tooz_coordinator(port)

    def acquire() -> Any:
        lock = coordinator.get_lock(b"tooz")
        lock.acquire()
        return lock

    return acquire, lambda lock: lock.release()


def aetcd_waiting(port: int) -> Pair:
    import aetcd

    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(_opened(aetcd.Client, port))

    def acquire() -> Any:
        lock = client.lock(b"aetcd", ttl=30)
        loop.run_until_complete(lock.acquire(timeout=None))
        return lock

    return acquire, lambda lock: loop.run_until_complete(lock.release())


CONTENDED: Final[dict[str, Callable[[int], Pair]]] = {
    POLLED: etcd3gw_polled,
    "dlock": ours_waiting,
    "tooz, etcd3gw driver": tooz_waiting,
    "aetcd Lock (gRPC)": aetcd_waiting,
}


@contextlib.contextmanager
def etcd_server(directory: str) -> Iterator[Cluster]:
    """Run an etcd with one member."""
    with contextlib.ExitStack() as stack:
        if directory:
            place = Path(tempfile.mkdtemp(dir=directory))
            stack.callback(shutil.rmtree, place)
        else:
            place = stack.enter_context(measure.scratch())
        yield stack.enter_context(etcd_servers.cluster(place))


def main() -> None:
    options = measure.arguments(
        __doc__, rounds=9, count=60, repeat=3, seconds=3.0, processes="2,8,32", think="0,5", directory=""
    )
    report = measure.Report(options.format)
    with etcd_server(options.directory) as etcd:
        (member,) = etcd.members
        assert member.process is not None
        # before gRPC is imported, which does not survive a fork
        waiting = {name: partial(make, member.port) for name, make in CONTENDED.items()}
        tables(report, "etcd", POLLED, waiting, options, [member.process.pid])
        every = {name: make(member.port) for name, make in measure.chosen(UNCONTENDED, options.only, FLOOR).items()}
        for layout in measure.LAYOUTS:
            measure.pin(layout, member.process.pid)
            runs = measure.interleave(every, FLOOR, options.rounds, options.count, [member.process.pid])
            rows = [{"contestant": name, **runs[name].row(), "requests": sent(every[name])} for name in every]
            report.add(f"etcd, uncontended acquire and release, {layout} CPU", rows)
    report.end()


def sent(operation: measure.Operation) -> float:
    """Return how often one operation writes to Python's sockets; the writes of gRPC are not seen."""
    with measure.counted_sends() as writes:
        for _ in range(20):
            operation()
    return round(writes[0] / 20, 2)


if __name__ == "__main__":
    main()
