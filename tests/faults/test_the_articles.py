"""The stories that articles about distributed locks tell, each played on real servers. (The clock jump: test_clocks.)"""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from dlock_core import Lock
from dlock_core.backend import Released
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.backends.redlock.backend import RedlockBackend
from dlock_core.errors import LeaseLost, StaleToken
from sqla_dlock import fencing, lock
from tests.faults.holders import hold
from tests.faults.looking import holders
from tests.processes import worker
from tests.redlock_nodes import masters, url_of
from tests.servers import Server

ADD = text("UPDATE counter SET n = n + 1")
READ = text("SELECT n FROM counter")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path}/shop.sqlite3")
    fencing.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE counter (n INTEGER)"))
        connection.execute(text("INSERT INTO counter VALUES (0)"))
    yield engine
    engine.dispose()


@pytest.fixture
def clients(redis_server: Server, prefix: str) -> Iterator[list[RedisBackend]]:
    """A, B and C: the same Redis, as three processes see it."""
    clients = [RedisBackend.from_url(redis_server.url, prefix=prefix) for _ in range(3)]
    yield clients
    for client in clients:
        client.close()


def test_wrong_release_a_whose_lock_ran_out_does_not_release_the_one_of_b_and_c_stays_out(
    clients: list[RedisBackend],
) -> None:
    a, b, c = (Lock(client, "a", ttl=0.2 if number == 0 else 30, renew=False) for number, client in enumerate(clients))
    of_a = a.acquire()
    of_b = b.acquire()  # when A's ttl is over
    assert of_a.release() is Released.STOLEN
    assert c.try_acquire() is None
    assert holders(clients[2], "a") == [of_b.holder]
    assert of_b.release() is Released.RELEASED


def test_process_pause_the_client_that_slept_knows_at_once_that_another_has_the_lock(
    redis_server: Server, clients: list[RedisBackend], prefix: str
) -> None:
    with worker(hold, redis_server.url, prefix, {"ttl": 0.5}) as sleeper:
        token = sleeper.hear()
        sleeper.pause()
        other = Lock(clients[1], "a", wait=None).acquire()
        assert other.token > token
        sleeper.say("look")
        sleeper.resume()
        assert sleeper.hear() == (True, 0.0)
        sleeper.say("release")
        assert sleeper.hear() == "stolen"
    assert other.release() is Released.RELEASED


def test_failover_before_replication_both_hold_and_only_the_newer_one_commits(
    clients: list[RedisBackend], database: Engine
) -> None:
    """The master dies with the lock that no replica has heard of: the next one knows nothing of it."""
    with (
        Session(database) as one,
        Session(database) as two,
        lock(one, "order", 42, store=clients[0], fence="lease", renew=False) as first,
    ):
        key = clients[0].lock_key("order:42")
        forget(clients[2], key)
        with lock(two, "order", 42, store=clients[1], fence="lease", renew=False) as second:
            assert first.remaining() > 0
            assert second.token > first.token
            two.execute(ADD)
            two.commit()
        one.execute(ADD)
        with pytest.raises((StaleToken, LeaseLost)):
            one.commit()
        one.rollback()
    with database.connect() as connection:
        assert connection.execute(READ).scalar_one() == 1


def forget(backend: RedisBackend, key: str) -> None:
    connection = backend.transport(None).checkout()  # type: ignore[arg-type]
    connection.connect()
    connection.send_command("DEL", key)
    assert connection.read_response() == 1
    backend.transport(None).checkin(connection)  # type: ignore[arg-type]


def test_node_that_comes_back_without_memory_gives_nobody_else_a_majority(tmp_path: Path) -> None:
    with masters(tmp_path / "redlock", 3) as nodes:
        mine, theirs = (RedlockBackend.from_url(url_of(nodes)) for _ in range(2))
        lease = Lock(mine, "a").acquire()
        nodes[0].restart(keep_data=False)
        assert Lock(theirs, "a").try_acquire() is None
        lease.renew()  # which also tells the lease to the node that forgot it
        nodes[1].restart(keep_data=False)
        assert Lock(theirs, "a").try_acquire() is None
        assert not lease.lost
        assert lease.release() is Released.RELEASED
        mine.close()
        theirs.close()


def test_transfer_deadlock_two_accounts_in_both_directions_are_locked_in_one_order(
    clients: list[RedisBackend], database: Engine
) -> None:
    """Each names its accounts in its own order; taken one after the other by hand, both would wait for ever."""
    done: list[tuple[int, int]] = []

    def transfer(client: RedisBackend, source: int, target: int) -> None:
        for _ in range(20):
            with Session(database) as session:
                wish = [lock(session, "account", number, store=client, fence=False) for number in (source, target)]
                with lock(*wish):
                    done.append((source, target))

    threads = [
        threading.Thread(target=transfer, args=(client, *pair))
        for client, pair in zip(clients, [(1, 2), (2, 1), (1, 2)], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 60
