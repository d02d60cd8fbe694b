"""Clocks of servers that are really set forward and back: what the documents promise of each."""

import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from dlock_core import Lock
from dlock_core.backend import Released
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.backends.redlock.backend import RedlockBackend
from dlock_core.errors import LeaseLost, StaleToken
from sqla_dlock import fencing, lock
from tests import servers
from tests.conftest import give_up
from tests.faults.looking import holders, waiters
from tests.redlock_nodes import url_of
from tests.servers import Server
from tests.waiting import until

STEPS = [60, -60, -3600]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that turns the clock of a server into which it is loaded."""
    compiler = shutil.which("gcc")
    if compiler is None:
        give_up("gcc is missing: apt-get install gcc")
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([str(compiler), "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return library


class Turned:
    """A Redis with a clock of its own."""

    def __init__(self, shim: Path, directory: Path) -> None:
        self._file = directory.with_suffix(".clock")
        self.set(0)
        self.server = servers.redis(directory)
        variables = [f"LD_PRELOAD={shim}", f"CLOCK_FILE={self._file}"]
        self.server.command = ["env", *variables, *self.server.command]
        self.server.start()

    def set(self, seconds: int) -> None:
        """Have the clock show so many seconds more than the machine's, or less."""
        self._file.write_text(str(seconds))


@pytest.fixture
def start(shim: Path, tmp_path: Path) -> Iterator[Callable[[], Turned]]:
    with ExitStack() as stack:

        def begin() -> Turned:
            turned = Turned(shim, tmp_path / f"redis{len(list(tmp_path.iterdir()))}")
            stack.callback(turned.server.stop)
            return turned

        yield begin


@pytest.fixture
def turned(start: Callable[[], Turned]) -> Turned:
    return start()


@pytest.fixture
def backend(turned: Turned) -> Iterator[RedisBackend]:
    yield from of(turned.server)


@pytest.fixture
def other(turned: Turned) -> Iterator[RedisBackend]:
    """The same store as another process sees it."""
    yield from of(turned.server)


def of(server: Server) -> Iterator[RedisBackend]:
    backend = RedisBackend.from_url(server.url)
    yield backend
    backend.close()


def test_clock_that_is_set_forward_ends_a_lease_and_its_holder_is_told(
    turned: Turned, backend: RedisBackend, other: RedisBackend
) -> None:
    first = Lock(backend, "a", ttl=20, renew=False).acquire()
    turned.set(60)
    second = Lock(other, "a", wait=0).acquire()
    assert second.token > first.token
    with pytest.raises(LeaseLost):
        first.renew()
    assert first.lost
    assert first.release() is not Released.RELEASED
    assert holders(other, "a") == [second.holder]
    second.release()


@pytest.mark.parametrize("step", [-60, -3600])
def test_clock_that_is_set_back_ends_no_lease_and_keeps_that_of_a_dead_holder_longer(
    turned: Turned, backend: RedisBackend, other: RedisBackend, step: int
) -> None:
    first = Lock(backend, "a", ttl=20, renew=False).acquire()
    turned.set(step)
    assert Lock(other, "a").try_acquire() is None
    with redis.Redis.from_url(turned.server.url) as client:
        assert client.pttl(backend.lock_key("a")) > -step * 1000
    first.renew()
    with redis.Redis.from_url(turned.server.url) as client:
        assert client.pttl(backend.lock_key("a")) <= 20_000
    assert not first.lost
    assert first.release() is Released.RELEASED


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shared", [False, True])
def test_tokens_grow_whatever_the_clock_does(turned: Turned, backend: RedisBackend, step: int, shared: bool) -> None:
    tokens = []
    for seconds in (0, step, 0, step):
        turned.set(seconds)
        for _ in range(3):
            with Lock(backend, "a", shared=shared) as lease:
                tokens.append(lease.token)
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("step", [-60, -3600])
def test_waiters_are_served_in_the_order_in_which_they_came_when_the_clock_is_set_back(
    turned: Turned, backend: RedisBackend, step: int
) -> None:
    served: list[int] = []

    def wait(number: int) -> None:
        with Lock(backend, "a", wait=None):
            served.append(number)

    first = Lock(backend, "a").acquire()
    threads = [threading.Thread(target=wait, args=(number,)) for number in range(4)]
    for number, thread in enumerate(threads):
        if number == 2:
            turned.set(step)
        thread.start()
        until(lambda number=number: len(waiters(backend, "a")) == number + 1)  # type: ignore[misc]
    first.release()
    for thread in threads:
        thread.join()
    assert served == [0, 1, 2, 3]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path}/shop.sqlite3")
    fencing.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE counter (n INTEGER)"))
        connection.execute(text("INSERT INTO counter VALUES (0)"))
    yield engine
    engine.dispose()


ADD = text("UPDATE counter SET n = n + 1")
READ = text("SELECT n FROM counter")


@pytest.mark.parametrize("alone", [True, False], ids=["one Redis", "node C of Redlock"])
def test_jump_of_a_clock_lets_two_in_and_only_the_newer_one_commits(
    start: Callable[[], Turned], database: Engine, alone: bool
) -> None:
    """Client 1 holds a majority, A, B and C; the clock of C jumps; client 2 gets a majority, C, D and E."""
    nodes = [start() for _ in range(1 if alone else 5)]
    running = [node.server for node in nodes]
    if alone:
        mine, theirs = [RedisBackend.from_url(running[0].url) for _ in range(2)]
    else:
        mine, theirs = [RedlockBackend.from_url(url_of(running)) for _ in range(2)]  # type: ignore[misc]
    late = running[3:]
    for node in late:
        node.pause()
    with (
        Session(database) as one,
        Session(database) as two,
        lock(one, "order", 42, store=mine, fence="lease", ttl=30, renew=False) as first,
    ):
        for node in late:
            node.resume()
        for node in late:
            until(lambda node=node: is_free(node))  # type: ignore[misc]
        nodes[min(2, len(nodes) - 1)].set(60)
        with lock(two, "order", 42, store=theirs, fence="lease", ttl=30, renew=False) as second:
            assert first.remaining() > 0
            assert second.remaining() > 0
            assert second.token > first.token
            two.execute(ADD)
            two.commit()
        one.execute(ADD)
        with pytest.raises(StaleToken):
            one.commit()
        one.rollback()
    with database.connect() as connection:
        assert connection.execute(READ).scalar_one() == 1
    mine.close()
    theirs.close()


def is_free(node: Server) -> bool:
    """What client 1 had sent while the node stood still is undone."""
    for backend in of(node):
        return not holders(backend, "order:42")
    raise AssertionError
