"""etcd's HTTP under faults that a client may handle wrongly: silence, dripping replies, cancellations, ended loops."""

import asyncio
import contextlib
import random
import socket
import ssl
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dlock_core import AsyncLock, Lock
from dlock_core.backend import Busy, Granted, Renewal
from dlock_core.backends.etcd.backend import EtcdBackend
from dlock_core.backends.etcd.connections import MAX_IDLE_CONNECTIONS
from dlock_core.backends.etcd.keys import NOTHING, LockView, StoredKey
from dlock_core.backends.etcd.steps import HeldKey, QueueEntry, ServerLease
from dlock_core.errors import AcquireTimeout, BackendUnavailable
from dlock_core.leases.acquisition import new_request
from dlock_core.options import LockOptions
from dlock_core.runtime import ASYNCIO, BLOCKING, Runtime, clock, run
from tests.etcd_servers import Cluster
from tests.faults.etcd.conftest import TIMEOUT_S
from tests.faults.looking import is_untouched, until
from tests.garbage import collect_garbage
from tests.proxy import Proxy
from tests.servers import free_port

SLACK_S = 4.0
"""Seconds that a busy machine may need beyond the promised time."""
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@contextlib.contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Run a server that calls `serve` for every connection, each in its own thread; yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()

        def talk(connected: socket.socket) -> None:
            with connected, contextlib.suppress(OSError):
                serve(connected)

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def stay_silent(connected: socket.socket) -> None:
    while connected.recv(65536):
        pass


def drip(connected: socket.socket) -> None:
    """Send the reply byte by byte, so that no single read times out."""
    connected.recv(65536)
    for byte in ANSWER * 100:
        connected.sendall(bytes([byte]))
        threading.Event().wait(TIMEOUT_S / 10)


def babble(connected: socket.socket) -> None:
    connected.recv(65536)
    connected.sendall(b"-ERR unknown command\r\n" * 10)
    stay_silent(connected)


def endless_head(connected: socket.socket) -> None:
    connected.recv(65536)
    while True:
        connected.sendall(b"HTTP/1.1 200 OK\r\n" + b"X-Filler: " + b"x" * 60000)


def seconds_until_unavailable(url: str, **options: ssl.SSLContext) -> float:
    store = EtcdBackend(url, timeout=TIMEOUT_S, **options)
    began = clock()
    with pytest.raises(BackendUnavailable):
        Lock(store, "a", wait=0).acquire()
    threads = clock() - began

    async def main() -> float:
        began = clock()
        with pytest.raises(BackendUnavailable):
            await AsyncLock(store, "a", wait=0).acquire()
        return clock() - began

    return max(threads, asyncio.run(main()))


@pytest.mark.parametrize("serve", [stay_silent, drip, babble, endless_head])
def test_server_that_answers_late_or_nonsense_is_given_up_in_time(serve: Callable[[socket.socket], None]) -> None:
    with server(serve) as port:
        assert seconds_until_unavailable(f"etcd://127.0.0.1:{port}") < 2 * TIMEOUT_S + SLACK_S


def test_server_that_is_silent_in_the_tls_handshake_is_given_up_in_time() -> None:
    with server(stay_silent) as port:
        url = f"etcds://localhost:{port}"
        assert seconds_until_unavailable(url, tls=ssl.create_default_context()) < 2 * TIMEOUT_S + SLACK_S


def test_server_that_takes_no_connection_is_given_up_in_time() -> None:
    """Its backlog is full: the packet that would open another connection is dropped."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(listener.getsockname())
        url = f"etcd://127.0.0.1:{listener.getsockname()[1]}"
        assert seconds_until_unavailable(url) < 2 * TIMEOUT_S + SLACK_S
        for one in waiting:
            one.close()


@pytest.mark.parametrize("serve", [stay_silent, None], ids=["silent", "refusing"])
def test_next_member_is_asked_when_the_first_is_silent_or_gone(
    one: Cluster, prefix: str, serve: Callable[[socket.socket], None] | None
) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(server(serve)) if serve else free_port()
        store = EtcdBackend(f"etcd://127.0.0.1:{first},127.0.0.1:{one.members[0].port}", prefix=prefix, timeout=1.0)
        stack.callback(store.close)
        with Lock(store, "a", wait=5):
            pass

        async def main() -> None:
            async with AsyncLock(store, "a", wait=5):
                pass

        asyncio.run(main())


def test_many_threads_share_few_connections_and_never_a_reply(backend: EtcdBackend, one: Cluster) -> None:
    """If two replies were mixed up, a token would appear twice, or a release would find another holder's lease."""
    tokens: list[int] = []

    def work(number: int) -> None:
        for turn in range(5):
            with Lock(backend, f"a:{number % 4}", wait=None) as lease:
                tokens.append(lease.token)
            with Lock(backend, f"own:{number}:{turn}") as lease:
                tokens.append(lease.token)

    with ThreadPoolExecutor(24) as threads:
        list(threads.map(work, range(24)))
    assert len(set(tokens)) == len(tokens) == 240
    assert len(backend._gateway._connections._of_threads._idle) <= MAX_IDLE_CONNECTIONS


def test_threads_go_on_while_connections_are_cut_again_and_again(
    backend: EtcdBackend, proxy: Proxy, direct: EtcdBackend
) -> None:
    stop, inside, most = threading.Event(), 0, 0
    guard = threading.Lock()

    def work(_: int) -> int:
        nonlocal inside, most
        done = 0
        while not stop.is_set():
            with contextlib.suppress(BackendUnavailable, AcquireTimeout), Lock(backend, "a", wait=2):
                with guard:
                    inside += 1
                    most = max(most, inside)
                done += 1
                with guard:
                    inside -= 1
        return done

    with ThreadPoolExecutor(6) as threads:
        working = [threads.submit(work, number) for number in range(6)]
        for _ in range(15):
            threading.Event().wait(0.1)
            proxy.cut()
        stop.set()
        assert sum(one.result() for one in working) > 0
    assert most == 1
    until(lambda: is_untouched(direct, "a"))  # type: ignore[arg-type]


def test_storm_of_cancelled_tasks_leaves_no_grant_no_place_and_no_connection(
    backend: EtcdBackend, direct: EtcdBackend
) -> None:
    chance = random.Random(7)

    async def work(number: int) -> None:
        while True:
            async with AsyncLock(backend, f"a:{number % 3}", wait=None):
                await asyncio.sleep(0)

    async def main() -> None:
        for _ in range(4):
            tasks = [asyncio.ensure_future(work(number)) for number in range(20)]
            for task in chance.sample(tasks, len(tasks)):
                await asyncio.sleep(chance.random() / 50)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert all(task.cancelled() for task in tasks)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
        collect_garbage()
    for number in range(3):
        until(lambda name=f"a:{number}": is_untouched(direct, name))  # type: ignore[misc]


def test_one_store_serves_loop_after_loop_and_keeps_no_connection_of_an_ended_one(backend: EtcdBackend) -> None:
    async def main() -> None:
        async with AsyncLock(backend, "a"):
            pass
        async with AsyncLock(backend, "b"):
            pass

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            asyncio.run(main())
            collect_garbage()
    Lock(backend, "a").acquire().release()


def test_reply_in_the_body_of_which_the_server_goes_is_an_error_and_not_half_an_answer() -> None:
    def serve(connected: socket.socket) -> None:
        connected.recv(65536)
        connected.sendall(ANSWER.replace(b"Length: 2", b"Length: 20"))

    with server(serve) as port, pytest.raises(BackendUnavailable, match="closed the connection"):
        Lock(EtcdBackend(f"etcd://127.0.0.1:{port}", timeout=TIMEOUT_S), "a", wait=0).acquire()


def http(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 " + status + b"\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


MALFORMED = {
    "html": b"<html>It works!</html>",
    "list": b"[]",
    "text": b'"yes"',
    "empty": b"{}",
    "no steps": b'{"header":{"revision":"7"},"succeeded":true}',
    "other steps": b'{"header":{"revision":"7"},"responses":[{}],"kvs":[{}],"TTL":"soon","result":[],"deleted":[]}',
    "lists": b'{"header":[],"responses":{},"kvs":7,"TTL":[],"result":7,"more":true}',
    "error": b'{"error":7,"code":"x","message":[]}',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("credentials", ["", "app:secret@"], ids=["open", "login"])
def test_answer_that_is_none_of_etcds_grants_nothing_and_raises_no_other_error_than_an_unavailable_store(
    body: bytes, credentials: str
) -> None:
    """For every kind of request: a proxy's page or another JSON service may answer in place of etcd."""

    def serve(connected: socket.socket) -> None:
        while asked := connected.recv(65536):
            connected.sendall(http(body) * asked.count(b"POST "))

    request = new_request("a", LockOptions(30.0, 0.0))
    lease = ServerLease(1, 30, until=clock() + 30.0, is_known=True)
    granted = Granted(1, 30.0, HeldKey(1, lease))
    entry = QueueEntry(LockView(False, True, 1, StoredKey("a", "", 1, 1), 0, 0, NOTHING, NOTHING), lease)
    steps: list[Callable[[EtcdBackend], Coroutine[Any, Any, object]]] = [
        lambda store: store.try_acquire(BLOCKING, request),
        lambda store: store.try_acquire(BLOCKING, request, entry),
        lambda store: store.wait(BLOCKING, request, Busy(1.0, "", entry), 0.2),
        lambda store: store.abandon(BLOCKING, request),
        lambda store: store.renew(BLOCKING, [Renewal(request, granted)]),
        lambda store: store.release(BLOCKING, request, granted),
        lambda store: store.inspect(BLOCKING),
        lambda store: store.inspect(BLOCKING, "a"),
        lambda store: store.force_release(BLOCKING, "a", 1),
        lambda store: store.diagnose(BLOCKING),
    ]
    with (
        server(serve) as port,
        contextlib.closing(EtcdBackend(f"etcd://{credentials}127.0.0.1:{port}", timeout=TIMEOUT_S)) as store,
    ):
        for step in steps:
            with contextlib.suppress(BackendUnavailable):  # Any other error fails the test.
                assert not isinstance(run(step(store)), Granted)


@pytest.mark.parametrize("is_read", [True, False], ids=["after the reply", "with the reply"])
@pytest.mark.parametrize("kind", [Lock, AsyncLock])
def test_idle_connection_on_which_something_came_unasked_is_not_used_again(
    kind: Any, is_read: bool, one: Cluster
) -> None:
    """The stray reply would be taken for the reply to the next request."""
    accepted: list[int] = []

    def serve(connected: socket.socket) -> None:
        accepted.append(1)
        with socket.create_connection(("127.0.0.1", one.members[0].port)) as etcd:
            while asked := connected.recv(65536):
                etcd.sendall(asked)
                connected.sendall(etcd.recv(65536) + (b"" if is_read else http(b"{}")))
                if is_read:
                    connected.sendall(http(b"{}"))

    async def ask(store: EtcdBackend, runtime: Runtime) -> None:
        for _ in range(3):
            with contextlib.suppress(BackendUnavailable):
                await store.inspect(runtime, "a")
            await runtime.sleep(0.05)

    with server(serve) as port, contextlib.closing(EtcdBackend(f"etcd://127.0.0.1:{port}")) as store:
        if kind is Lock:
            run(ask(store, BLOCKING))
        else:
            asyncio.run(ask(store, ASYNCIO))
    assert len(accepted) >= 3
