"""A signal handler that takes locks of the same store hangs nowhere, wherever it interrupts another call."""

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from dlock_core import AcquireTimeout, AlreadyHeld, BackendUnavailable, Lease, Lock, Released, connect
from dlock_core.backend import Backend
from dlock_core.backends.memory import MemoryBackend
from dlock_core.backends.zookeeper.session import ZooKeeperSession
from tests import advisory_stores, etcd_servers, redlock_nodes, table_stores, zookeeper_servers
from tests.servers import Server

OURS = ("/dlock_core/", "/django_dlock/", "/sqla_dlock/")
WITHIN_S = 30.0
"""A call that takes longer than this hangs: even with its handler it sends only a few requests."""


@pytest.fixture(
    params=["memory", "redis", "redlock", "etcd", "zookeeper", "sqlite", "psycopg", "asyncpg", "in memory", "session"]
)
def backend(request: pytest.FixtureRequest, servers_directory: Path, prefix: str) -> Iterator[Backend]:
    """Yield a store of each kind."""
    with ExitStack() as stack:
        match request.param:
            case "redis":
                found = connect(request.getfixturevalue("redis_server").url, prefix=prefix)
            case "redlock":
                nodes = stack.enter_context(redlock_nodes.masters(servers_directory / "redlock-handlers", 3))
                found = connect(redlock_nodes.url_of(nodes), prefix=prefix)
            case "etcd":
                found = connect(stack.enter_context(etcd_servers.cluster(servers_directory / "etcd-handlers")).url)
            case "zookeeper":
                server = zookeeper_servers.zookeeper(servers_directory / "zookeeper-handlers")
                found = connect(stack.enter_context(running(server)).url)
            case "sqlite" | "psycopg" | "asyncpg":
                found = table_stores.table(request, request.param)
            case "in memory":
                found = connect("database+sqlite://")
            case "session":
                found = advisory_stores.sessions(request, "psycopg")
            case _:
                found = connect("memory://")
        yield stack.enter_context(closing(found))


@contextmanager
def running(server: Server) -> Iterator[Server]:
    server.start()
    yield server
    server.stop()


class Places:
    """Calls a handler at each new line of our code that a call reaches, at three lines per round."""

    PER_ROUND = 3

    def __init__(self, handler: Callable[[], object]) -> None:
        self._handler = handler
        self.known: set[tuple[CodeType, int]] = set()
        self.visited: list[tuple[str, int]] = []
        """Where the handler was called in this round."""

    def visit(self, function: Callable[[], object]) -> None:
        self.visited = []
        sys.settrace(self._call)
        try:
            function()
        finally:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if any(part in frame.f_code.co_filename for part in OURS) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        place = frame.f_code, frame.f_lineno
        if event == "line" and place not in self.known and len(self.visited) < self.PER_ROUND:
            self.known.add(place)
            self.visited.append((frame.f_code.co_filename, frame.f_lineno))
            self._handler()  # Python does not trace the handler.
        return self._line

    def rounds(self, function: Callable[[], object]) -> Iterator[None]:
        """Yield before each round, until a round reaches no new line."""
        while True:
            yield
            try:
                in_a_thread(partial(self.visit, function))
            except BaseException as error:
                raise AssertionError(f"the handler came at {self.visited}") from error
            if not self.visited:
                break
        assert len(self.known) > 50


def in_a_thread(function: Callable[[], None]) -> None:
    """Call a function in its own thread, and fail if it hangs."""
    done: Future[None] = Future()

    def settle() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=settle, daemon=True).start()
    done.result(WITHIN_S)


@pytest.fixture
def one() -> str:
    """Return the name of the lock that the interrupted code requests."""
    return secrets.token_hex(4)


@pytest.mark.timeout(300)
def test_signal_handler_that_takes_locks_in_the_middle_hangs_nowhere_and_is_not_let_in(
    backend: Backend, one: str
) -> None:
    other, is_inside = secrets.token_hex(4), False
    is_memory = isinstance(backend, MemoryBackend)

    def handler() -> None:
        try:
            with Lock(backend, other, wait=0 if is_memory else 20):
                pass
            lease = Lock(backend, one, wait=0).acquire()
        except (AcquireTimeout, AlreadyHeld):
            return
        except BackendUnavailable:
            assert is_memory, "only the store in memory may refuse it, in a method of its own"
            return
        assert not is_inside
        lease.release()

    def work() -> None:
        nonlocal is_inside
        with Lock(backend, one, wait=20) as lease:
            is_inside = True
            lease.renew()
            is_inside = False

    for _ in Places(handler).rounds(work):
        pass
    Lock(backend, one, wait=0).acquire().release()


def test_signal_handler_that_takes_a_lock_while_the_session_is_started_shares_it(
    servers_directory: Path, one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = zookeeper_servers.zookeeper(servers_directory / "zookeeper-first-session")
    start_session, is_first = ZooKeeperSession._start, True

    def interrupted(session: ZooKeeperSession) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            leases.append(Lock(backend, one, wait=20).acquire())
        return start_session(session)

    monkeypatch.setattr(ZooKeeperSession, "_start", interrupted)
    leases: list[Lease] = []
    with running(server), closing(connect(server.url)) as backend:
        in_a_thread(lambda: leases.append(Lock(backend, f"{one}:2", wait=20).acquire()))
        assert {lease.release() for lease in leases} == {Released.RELEASED}


FORKS_IN_A_WAIT = """
import os, signal, sys, threading
from dlock_core import Lock, NotHeld, connect

parent, forked = os.getpid(), threading.Event()
holder = Lock(connect(sys.argv[1]), "fork", ttl=60).acquire()

def fork(*_):
    os.fork()
    forked.set()

threading.Thread(target=lambda: (forked.wait(), holder.release())).start()
signal.signal(signal.SIGALRM, fork)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    lease = Lock(connect(sys.argv[1]), "fork", ttl=60, wait=30).acquire()
except NotHeld:
    os._exit(3 if os.getpid() == parent else 0)
if os.getpid() != parent:
    os._exit(1)
assert lease.release().value == "released"
assert os.wait()[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_lock_belongs_to_the_parent_if_a_handler_forks_during_the_wait_for_it(redis_server: Any) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS_IN_A_WAIT, redis_server.url]
    ended = subprocess.run(command, timeout=WITHIN_S * 3, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
