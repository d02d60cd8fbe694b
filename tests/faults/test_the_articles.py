"""The failure stories from articles about distributed locks, each played on real servers."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from tests.faults.turned_clocks import Turned
from tests.processes import worker
from tests.redlock_nodes import masters, url_of
from tests.servers import Server
from tests.waiting import until

ADD = text("UPDATE counter SET n = n + 1")
READ = text("SELECT n FROM counter")
STATE = text("SELECT state FROM orders")
CHANGE = text("UPDATE orders SET state = :state")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path}/shop.sqlite3")
    fencing.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE counter (n INTEGER)"))
        connection.execute(text("INSERT INTO counter VALUES (0)"))
        connection.execute(text("CREATE TABLE orders (state TEXT)"))
        connection.execute(text("INSERT INTO orders VALUES ('paid')"))
    yield engine
    engine.dispose()


@pytest.fixture
def clients(redis_server: Server, prefix: str) -> Iterator[list[RedisBackend]]:
    """Yield A, B and C: clients of the same Redis, as in three processes."""
    clients = [RedisBackend.from_url(redis_server.url, prefix=prefix) for _ in range(3)]
    yield clients
    for client in clients:
        client.close()


def test_wrong_release_a_whose_lock_ran_out_does_not_release_the_one_of_b_and_c_stays_out(
    clients: list[RedisBackend],
) -> None:
    a, b, c = (Lock(client, "a", ttl=0.2 if number == 0 else 30, renew=False) for number, client in enumerate(clients))
    of_a = a.acquire()
    of_b = b.acquire()  # waits until A's ttl is over
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


def test_network_delay_the_client_whose_majority_fell_silent_is_refused_at_commit(
    tmp_path: Path, database: Engine
) -> None:
    with masters(tmp_path / "redlock", 3) as nodes:
        store = RedlockBackend.from_url(url_of(nodes))
        with Session(database) as session, pytest.raises(LeaseLost), lock(session, "a", store=store, ttl=1.5) as lease:
            session.execute(ADD)
            for node in nodes[:2]:
                node.pause()
            until(lambda: lease.lost)
            session.commit()
        for node in nodes[:2]:
            node.resume()
        store.close()
    with database.connect() as connection:
        assert connection.execute(READ).scalar_one() == 0


@pytest.mark.parametrize("alone", [True, False], ids=["one Redis", "node C of Redlock"])
def test_clock_jump_on_node_c_lets_two_in_and_only_the_newer_one_commits(
    start: Callable[[], Turned], database: Engine, alone: bool
) -> None:
    """Client 1 holds a majority, A, B and C; C's clock jumps; client 2 gets a majority, C, D and E."""
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
    """Return whether client 1's request, delivered after the node's pause, has been undone."""
    backend = RedisBackend.from_url(node.url)
    try:
        return not holders(backend, "order:42")
    finally:
        backend.close()


def test_failover_before_replication_both_hold_and_only_the_newer_one_commits(
    clients: list[RedisBackend], database: Engine
) -> None:
    """The master dies before any replica has received the lock, so the next master does not know of it."""
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
        lease.renew()  # this also restores the lease at the node that forgot it
        nodes[1].restart(keep_data=False)
        assert Lock(theirs, "a").try_acquire() is None
        assert not lease.lost
        assert lease.release() is Released.RELEASED
        mine.close()
        theirs.close()


def test_transfer_deadlock_two_accounts_in_both_directions_are_locked_in_one_order(
    clients: list[RedisBackend], database: Engine
) -> None:
    """Each names its accounts in its own order: locked one by one in that order, they would deadlock."""
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


def change(session: Session, state: str) -> bool:
    """Ship or cancel the order if it is still paid."""
    is_paid = session.execute(STATE).scalar_one() == "paid"
    if is_paid:
        session.execute(CHANGE, {"state": state})
    session.commit()
    return is_paid


def test_cancel_against_ship_both_succeed_without_a_lock(database: Engine) -> None:
    with Session(database) as buyer, Session(database) as seller:
        seen = [session.execute(STATE).scalar_one() for session in (buyer, seller)]
        for session, state in ((buyer, "cancelled"), (seller, "shipped")):
            session.rollback()  # each has decided from its own read, and now writes its decision
            session.execute(CHANGE, {"state": state})
            session.commit()
    assert seen == ["paid", "paid"]


def test_cancel_against_ship_under_a_lock_one_succeeds_and_the_other_finds_it_done(
    clients: list[RedisBackend], database: Engine
) -> None:
    begin = threading.Barrier(2)

    def act(client: RedisBackend, state: str) -> bool:
        with Session(database) as session:
            begin.wait()
            with lock(session, "order", 42, store=client):
                return change(session, state)

    with ThreadPoolExecutor() as threads:
        done = [*threads.map(act, clients, ["cancelled", "shipped"])]
    assert sorted(done) == [False, True]
    with database.connect() as connection:
        assert connection.execute(STATE).scalar_one() == ["cancelled", "shipped"][done.index(True)]
