"""Slots move and masters fail while locks are held and waited for: leases are kept or reported as lost."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.cluster import ClusterNode as AsyncioNode
from redis.cluster import ClusterNode

from dlock_core import Lock, connect
from dlock_core.backend import Backend, Released, Renewal, RenewalFailure
from dlock_core.backends.redis.cluster import ClusterBackend
from dlock_core.backends.redis.protocol import load_script
from dlock_core.errors import AcquireTimeout, BackendUnavailable, LeaseLost
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.testing.contract.harness import Harness, Tasks, Threads
from tests import processes, servers
from tests.conftest import give_up
from tests.faults.history import overlaps, read, repeated_tokens, work
from tests.faults.looking import holders, insist
from tests.proxy import Proxy
from tests.redis_cluster import HASTY, HOST, Cluster, Move, cluster
from tests.servers import Server, ServerMissing
from tests.waiting import until

WAIT = 60.0
LIMIT = 0.5
RIGHTS = (
    "+eval +evalsha +blpop +blmove +time +exists +get +getrange +mget +set +del +pttl +pexpire +hget +hset +hdel +rpush +lrange +lrem "
    "+sadd +srem +smembers +sscan +zadd +zrem +zrange +zrangebyscore +zscore +cluster|slots +asking"
)
"""The rights that docs/howto/operations.md and docs/stores.md give to dlock's user."""
ACQUIRE, RELEASE = (load_script(name).sha.encode() for name in ("acquire", "release"))


@pytest.fixture(scope="module")
def six(servers_directory: Path) -> Iterator[Cluster]:
    try:
        with cluster(servers_directory / "cluster-faults") as six:
            yield six
    except ServerMissing as missing:
        give_up(str(missing))


@pytest.fixture
def nodes(six: Cluster) -> Iterator[Cluster]:
    """Yield six nodes, all of which work again after each test."""
    yield six
    six.heal()


@pytest.fixture
def backend(nodes: Cluster, prefix: str) -> Iterator[Backend]:
    yield from store(nodes.url, prefix)


@pytest.fixture
def direct(nodes: Cluster, prefix: str) -> Iterator[ClusterBackend]:
    """Yield the same store, for looking at it."""
    yield from store(nodes.url, prefix)


def store(url: Any, prefix: str, **options: Any) -> Iterator[Any]:
    backend = connect(url, prefix=prefix, **options)
    yield backend
    backend.close()


@pytest.fixture
def copied(harness: Harness, nodes: Cluster, prefix: str) -> Iterator[Harness]:
    """Yield a harness whose grants wait for a replica, so that a failover cannot forget them."""
    for backend in store(nodes.url, prefix, replicas=1):
        copied = type(harness)(backend)
        yield copied
        copied.close()


@pytest.fixture
def key(direct: ClusterBackend) -> str:
    """Return the key of the lock "a"."""
    return direct.lock_key("a")


@pytest.fixture
def move(nodes: Cluster, key: str) -> Iterator[Callable[[], Move]]:
    """Begin to move the slot of the lock "a" to another master; the move ends with the test at the latest."""
    begun: list[Move] = []

    def move() -> Move:
        begun.append(nodes.begin_to_move(key, nodes.other_than(nodes.master_of(key))))
        return begun[0]

    yield move
    for one in begun:
        one.finish()


threads = pytest.mark.parametrize("harness", [Threads], indirect=True)
tasks = pytest.mark.parametrize("harness", [Tasks], indirect=True)


def refusals(nodes: Cluster, kind: str) -> int:
    """Return how many requests all nodes together have refused with this error."""
    stats = [nodes.ask(node, "INFO", "errorstats") for node in nodes.running]
    return sum(each.get(f"errorstat_{kind}", {"count": 0})["count"] for each in stats)


def scripts(nodes: Cluster, node: Server) -> int:
    """Return how many scripts a node was asked to run."""
    stats = nodes.ask(node, "INFO", "commandstats")
    return sum(each["calls"] for name, each in stats.items() if name.startswith("cmdstat_eval"))


def elsewhere(nodes: Cluster, direct: ClusterBackend, master: Server) -> str:
    """Return a name whose lock is on another master."""
    names = (f"b:{number}" for number in range(1000))
    return next(name for name in names if nodes.master_of(direct.lock_key(name)) is not master)


def test_all_keys_of_a_name_are_in_one_slot(harness: Harness, nodes: Cluster, prefix: str) -> None:
    lease = harness.acquire("a", shared=True)
    pending = harness.queue_up("a")
    harness.acquire("a:b", ttl=60, shared=True)
    found = nodes.keys(prefix)
    assert len({nodes.slot(key) for key in found if "{a}" in key}) == 1
    slots = {nodes.slot(key) for key in found if key.endswith(("}token", "}locks"))}
    assert {nodes.slot(key) for key in found} == slots
    harness.do(lease.release)
    harness.do(pending.result(WAIT).release)


@threads
def test_names_that_differ_by_a_companions_ending_are_apart(harness: Harness) -> None:
    """The queue of "a", for example, is not a lock named "a:q"."""
    leases = [harness.acquire(name) for name in ("a", "a:q", "a:wake", "token", "locks", "never")]
    assert len({lease.token for lease in leases}) == 6
    assert all(harness.try_acquire(lease.name) is None for lease in leases)


STAGES: dict[str, Callable[[Move, str], None]] = {
    "begun": lambda move, key: None,
    "lock first": lambda move, key: move.carry(key),
    "lock last": lambda move, key: move.carry(*_others(move, key)),
    "all keys there": lambda move, key: move.carry(),
    "arrived": lambda move, key: move.finish(),
}


def _others(move: Move, key: str) -> list[str]:
    found = move.cluster.ask(move.source, "CLUSTER", "GETKEYSINSLOT", move.slot, 1000)
    return [one for one in found if one != key]


@pytest.mark.parametrize("stage", STAGES)
def test_lease_is_held_renewed_and_released_while_its_slot_moves(
    harness: Harness, key: str, move: Callable[[], Move], stage: str
) -> None:
    lease = harness.acquire("a", ttl=WAIT, renew=False)
    on_the_way = move()
    STAGES[stage](on_the_way, key)
    until_ = lease._held.until
    harness.do(lease.renew)
    assert lease._held.until > until_
    assert stands_in_the_way(harness)
    assert harness.do(lease.release) is Released.RELEASED
    on_the_way.finish()
    assert harness.acquire("a").token > lease.token


def stands_in_the_way(harness: Harness) -> bool:
    """Return whether a new request is refused, because the lock is held or its slot is moving."""
    try:
        return harness.try_acquire("a") is None
    except BackendUnavailable as error:
        return "TryAgain" in error.reason


@pytest.mark.parametrize("stage", STAGES)
def test_grant_is_undone_while_its_slot_moves(
    direct: ClusterBackend, key: str, move: Callable[[], Move], stage: str
) -> None:
    lease = Lock(direct, "a", ttl=WAIT, renew=False).acquire()
    on_the_way = move()
    STAGES[stage](on_the_way, key)
    run(direct.abandon(BLOCKING, lease._held.request))
    on_the_way.finish()
    assert lease.release() is Released.EXPIRED
    assert holders(direct, "a") == []  # type: ignore[arg-type]


@tasks
@pytest.mark.parametrize("stage", STAGES)
def test_shared_lease_outlives_the_move_of_its_slot(
    harness: Harness, key: str, move: Callable[[], Move], stage: str
) -> None:
    """It is stored in several keys, which may be on different nodes for a while: that must not count as its loss."""
    lease = harness.acquire("a", ttl=WAIT, renew=False, shared=True)
    on_the_way = move()
    STAGES[stage](on_the_way, key)
    if stage != "arrived":
        with pytest.raises(BackendUnavailable, match="TryAgain"):
            harness.do(lease.renew)
    assert not lease.lost
    assert stands_in_the_way(harness)
    on_the_way.finish()
    harness.do(lease.renew)
    assert harness.do(lease.release) is Released.RELEASED


@pytest.mark.parametrize("released", ["before the move", "while keys move", "after the move"])
def test_waiters_get_the_lock_whose_slot_moves_while_they_wait(
    harness: Harness, move: Callable[[], Move], key: str, released: str
) -> None:
    lease = harness.acquire("a", ttl=WAIT)
    line = [harness.queue_up("a", wait=WAIT) for _ in range(3)]
    on_the_way = move()
    if released == "before the move":
        assert harness.do(lease.release) is Released.RELEASED
    on_the_way.carry(key)
    if released == "while keys move":
        assert harness.do(lease.release) is Released.RELEASED
    on_the_way.finish()
    if released == "after the move":
        assert harness.do(lease.release) is Released.RELEASED
    tokens = [lease.token]
    for pending in line:
        tokens.append(pending.result(WAIT).token)
        harness.do(pending.result().release)
    assert tokens == sorted(set(tokens))


def test_free_lock_is_had_when_its_slot_has_arrived(harness: Harness, move: Callable[[], Move]) -> None:
    harness.do(harness.acquire("a").release)
    on_the_way = move()
    on_the_way.carry()
    with pytest.raises(BackendUnavailable, match="TryAgain"):
        harness.acquire("a", wait=0)
    pending = harness.start(harness.lock("a", wait=WAIT).acquire)
    harness.observed.until(lambda _: len(harness.calls_of("try_acquire", "a")) >= 4)
    assert not pending.done()
    on_the_way.finish()
    assert harness.keep(pending.result(WAIT)).token > 0


def test_slot_that_has_moved_is_looked_for_once(harness: Harness, nodes: Cluster, move: Callable[[], Move]) -> None:
    harness.do(harness.acquire("a").release)
    move().finish()
    harness.do(harness.acquire("a", wait=0).release)
    before = refusals(nodes, "MOVED")
    assert before > 0
    for _ in range(5):
        harness.do(harness.acquire("a", wait=0).release)
    assert refusals(nodes, "MOVED") < before + 5  # late requests of earlier tests may count, too


def test_lease_on_its_way_is_asked_for_where_it_goes(
    harness: Harness, nodes: Cluster, move: Callable[[], Move]
) -> None:
    lease = harness.acquire("a", ttl=WAIT, renew=False)
    move().carry()
    before = refusals(nodes, "ASK")
    harness.do(lease.renew)
    assert refusals(nodes, "ASK") > before
    assert harness.do(lease.release) is Released.RELEASED


def test_lease_and_waiter_survive_the_death_of_the_master(
    harness: Harness, copied: Harness, nodes: Cluster, key: str
) -> None:
    lease = copied.acquire("a", ttl=WAIT, renew=False)
    pending = harness.queue_up("a", wait=None)
    nodes.fail_over(nodes.master_of(key))
    insist(lambda: copied.do(lease.renew))
    assert insist(lambda: harness.try_acquire("a")) is None
    assert copied.holders("a") == [lease.holder]
    assert insist(lambda: copied.do(lease.release)) is Released.RELEASED
    assert harness.keep(pending.result(WAIT)).token > lease.token


@threads
def test_lock_that_is_asked_for_while_there_is_no_master_is_had_from_the_next_one(
    harness: Harness, nodes: Cluster, key: str
) -> None:
    first = harness.acquire("a")
    harness.do(first.release)
    master = nodes.master_of(key)
    master.kill()
    with pytest.raises(BackendUnavailable, match=f"{HOST}:{master.port}"):
        harness.acquire("a", wait=0)
    pending = harness.start(harness.lock("a", wait=WAIT).acquire)
    nodes.be(HASTY)
    assert harness.keep(pending.result(WAIT)).token > first.token


@threads
def test_replicas_are_never_asked(harness: Harness, nodes: Cluster) -> None:
    masters = nodes.masters()
    replicas = [node for node in nodes.nodes if node not in masters]
    before = [scripts(nodes, node) for node in replicas]
    for number in range(50):
        harness.do(harness.acquire(f"a:{number}").release)
    assert [scripts(nodes, node) for node in replicas] == before
    assert all(scripts(nodes, node) > 0 for node in masters)


def test_master_that_steps_down_wakes_its_waiters_and_is_left(harness: Harness, nodes: Cluster, key: str) -> None:
    lease = harness.acquire("a", ttl=WAIT, renew=False)
    line = [harness.queue_up("a", wait=None) for _ in range(2)]
    old = nodes.master_of(key)
    nodes.switch(old)
    harness.do(lease.renew)
    assert harness.try_acquire("a") is None
    assert harness.do(lease.release) is Released.RELEASED
    tokens = [lease.token]
    for pending in line:
        tokens.append(pending.result(WAIT).token)
        harness.do(pending.result().release)
    assert tokens == sorted(set(tokens))


@tasks
def test_lease_that_a_failover_forgot_is_told_as_lost(harness: Harness, nodes: Cluster, key: str) -> None:
    """The replica had not received it; tokens grow nevertheless."""
    told: list[bool] = []
    master = nodes.master_of(key)
    nodes.replica_of(master).pause()
    nodes.ask(master, "CLIENT", "KILL", "TYPE", "replica")
    lease = harness.acquire("a", ttl=WAIT, renew=False, on_lost=lambda: told.append(True))
    master.kill()
    for node in nodes.running:
        node.resume()
    nodes.be(HASTY)
    other = harness.acquire("a", wait=WAIT)
    assert other.token > lease.token
    with pytest.raises(LeaseLost, match="another holder, or lost it"):
        harness.do(lease.renew)
    until(lambda: told)
    assert told == [True]
    assert harness.do(lease.release) is not Released.RELEASED
    assert harness.holders("a") == [other.holder]


@threads
def test_master_that_stands_still_is_unavailable_in_time(
    harness: Harness, nodes: Cluster, key: str, prefix: str
) -> None:
    for backend in store(nodes.url, prefix, timeout=LIMIT):
        hasty = type(harness)(backend)
        hasty.do(hasty.acquire("a").release)
        nodes.master_of(key).pause()
        began = clock()
        for wait in (0, 0.3):
            with pytest.raises(BackendUnavailable):
                hasty.acquire("a", wait=wait)
        assert clock() - began < 0.3 + 2 * 4 * LIMIT + 10
        hasty.close()


@threads
def test_holders_and_waiters_elsewhere_do_not_mind_a_master_that_is_gone(
    harness: Harness, nodes: Cluster, direct: ClusterBackend, key: str
) -> None:
    """Leases of all masters are renewed together, and only those of the dead master are lost."""
    told = threading.Event()
    master = nodes.master_of(key)
    name = elsewhere(nodes, direct, master)
    lost, kept = harness.acquire("a", ttl=3, on_lost=told.set), harness.acquire(name, ttl=3)
    pending = harness.queue_up(name, wait=None)
    master.kill()
    both = [Renewal(lease._held.request, lease._held.granted) for lease in (lost, kept)]
    assert harness.call_store("renew", both) == [RenewalFailure.UNKNOWN, 3.0], (
        "of the one nothing is known, which is no loss"
    )
    assert told.wait(WAIT)
    assert lost.lost
    assert not kept.lost
    harness.do(kept.renew)
    assert harness.do(kept.release) is Released.RELEASED
    harness.do(pending.result(WAIT).release)
    with pytest.raises(BackendUnavailable, match=f"{HOST}:{master.port}"):
        harness.call_store("inspect")
    with pytest.raises(BackendUnavailable):
        harness.do(lost.release)


@tasks
def test_cluster_that_is_down_is_unavailable_and_had_again(harness: Harness, nodes: Cluster, key: str) -> None:
    harness.do(harness.acquire("a").release)
    master = nodes.master_of(key)
    replica = nodes.replica_of(master)
    for node in (master, replica):
        node.kill()
    nodes.be(HASTY)
    until(lambda: "cluster_state:fail" in nodes.ask(nodes.running[0], "CLUSTER", "INFO"))
    with pytest.raises(BackendUnavailable):
        harness.acquire("a", wait=0.3)
    with pytest.raises(BackendUnavailable, match=r"ClusterDown|Connection"):
        harness.acquire("b", wait=0)
    pending = harness.start(harness.lock("a", wait=WAIT).acquire)
    master.start()
    replica.start()
    assert harness.keep(pending.result(WAIT)).token > 0


def test_cluster_of_which_no_node_answers_is_named_without_the_password(harness: Harness, prefix: str) -> None:
    ports = [servers.free_port() for _ in range(3)]
    hosts = ",".join(f"{HOST}:{port}" for port in ports)
    for backend in store(f"redis+cluster://shop:hunter2@{hosts}", prefix, timeout=LIMIT):
        began = clock()
        for wait in (0, 0.3):
            with pytest.raises(BackendUnavailable, match="no node of the cluster") as caught:
                harness.do(type(harness)(backend).lock("a", wait=wait).acquire)
            assert all(f"{HOST}:{port}: " in str(caught.value) for port in ports)
            assert "hunter2" not in f"{caught.value}{caught.value.__cause__!r}"
            assert not caught.value.refused
        assert clock() - began < 20


@tasks
def test_nodes_that_are_all_silent_hold_up_nobody_for_long(harness: Harness, nodes: Cluster, prefix: str) -> None:
    for node in nodes.nodes:
        node.pause()
    for backend in store(nodes.url, prefix, timeout=LIMIT):
        began = clock()
        with pytest.raises(BackendUnavailable, match="no node of the cluster"):
            harness.do(type(harness)(backend).lock("a", wait=0.3).acquire)
        assert clock() - began < 0.3 + 4 * LIMIT + 10


def test_server_that_is_no_cluster_is_told_at_once(harness: Harness, redis_server: Server) -> None:
    for backend in store(f"redis+cluster://{HOST}:{redis_server.port}", "p:"):
        with pytest.raises(BackendUnavailable, match="cluster support disabled") as caught:
            harness.do(type(harness)(backend).lock("a", wait=None).acquire)
        assert caught.value.refused


@pytest.mark.parametrize(
    ("login", "lets_in"), [("shop:wr0ng@", False), ("nobody:wr0ng@", False), ("shop:s3c%2Fret@", True)]
)
def test_password_opens_every_node_and_is_never_told(
    nodes: Cluster, prefix: str, login: str, lets_in: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for node in nodes.nodes:
        nodes.ask(node, "ACL", "SETUSER", "shop", "on", ">s3c/ret", f"~{prefix}*", *RIGHTS.split())
    for backend in store(nodes.url.replace("://", f"://{login}"), prefix):
        if lets_in:
            for number in range(10):
                Lock(backend, f"a:{number}").acquire().release()
            continue
        with pytest.raises(BackendUnavailable, match="refused our credentials") as caught:
            Lock(backend, "a", wait=None).acquire()
        assert caught.value.refused
        assert "wr0ng" not in f"{caught.value}{caplog.text}"


CLIENTS: dict[str, Callable[[int, Any], Any]] = {
    "threads": lambda port, remap: redis.RedisCluster(
        startup_nodes=[ClusterNode(HOST, port)], decode_responses=True, address_remap=remap
    ),
    "URL": lambda port, remap: redis.RedisCluster.from_url(f"redis://{HOST}:{port}", protocol=3, address_remap=remap),
    "asyncio": lambda port, remap: redis.asyncio.RedisCluster(
        startup_nodes=[AsyncioNode(HOST, port)], address_remap=remap
    ),
}


@pytest.fixture
def proxies(nodes: Cluster) -> Iterator[dict[int, Proxy]]:
    """Yield a proxy for each node, by the node's port, whose network can be broken."""
    with ExitStack() as stack:
        yield {node.port: stack.enter_context(Proxy(node.port)) for node in nodes.nodes}


@pytest.fixture(params=["threads"])
def through(
    request: pytest.FixtureRequest, harness: Harness, nodes: Cluster, proxies: dict[int, Proxy], prefix: str
) -> Iterator[Harness]:
    """Yield a harness whose redis-py client reaches the nodes through the proxies, at addresses they do not know."""
    remap = {(HOST, port): (HOST, proxy.port) for port, proxy in proxies.items()}
    client = CLIENTS[request.param](nodes.nodes[0].port, lambda address: remap.get(address, address))
    for behind in store(client, prefix, timeout=LIMIT):
        through = type(harness)(behind)
        yield through
        through.close()
    if request.param != "asyncio":
        client.close()


@pytest.mark.parametrize("through", CLIENTS, indirect=True)
def test_client_of_redis_py_is_a_store(through: Harness, proxies: dict[int, Proxy]) -> None:
    before = sum(proxy.requests for proxy in proxies.values())
    for number in range(10):
        lease = through.acquire(f"a:{number}")
        through.do(lease.renew)
        assert through.do(lease.release) is Released.RELEASED
    assert sum(proxy.requests for proxy in proxies.values()) >= before + 30


@pytest.mark.parametrize("fault", ["drop_reply", "cut_reply", "cut_request"])
def test_acquire_whose_reply_was_lost_is_one_grant(
    through: Harness, nodes: Cluster, proxies: dict[int, Proxy], direct: ClusterBackend, key: str, fault: str
) -> None:
    through.do(through.acquire("warm-up").release)
    broken = getattr(proxies[nodes.master_of(key).port], fault)(matching=ACQUIRE)
    lease = through.acquire("a", wait=WAIT)
    assert broken.happened
    assert holders(direct, "a") == [lease.holder]  # type: ignore[arg-type]
    assert through.do(lease.release) is Released.RELEASED


@pytest.mark.parametrize("fault", ["cut_reply", "cut_request"])
def test_release_whose_reply_was_lost_has_released(
    through: Harness, nodes: Cluster, proxies: dict[int, Proxy], direct: ClusterBackend, key: str, fault: str
) -> None:
    lease = through.acquire("a", ttl=WAIT)
    broken = getattr(proxies[nodes.master_of(key).port], fault)(matching=RELEASE)
    assert through.do(lease.release) is Released.RELEASED
    assert broken.happened
    assert holders(direct, "a") == []  # type: ignore[arg-type]


def test_leases_of_a_node_are_renewed_in_one_request(through: Harness, proxies: dict[int, Proxy]) -> None:
    for number in range(100):
        through.acquire(f"a:{number}", ttl=WAIT, renew=False)
    asked = [Renewal(lease._held.request, lease._held.granted) for lease in through._leases]
    through.call_store("renew", asked)  # so that the nodes know the script
    before = sum(proxy.requests for proxy in proxies.values())
    assert through.call_store("renew", asked) == [WAIT] * 100
    assert sum(proxy.requests for proxy in proxies.values()) <= before + 3


@pytest.mark.filterwarnings("ignore:.*cluster_error_retry_attempts:DeprecationWarning")  # redis-py 6.0 warns of itself
def test_thousand_leases_among_many_other_keys_are_listed_without_a_scan(
    nodes: Cluster, direct: ClusterBackend, prefix: str
) -> None:
    with redis.RedisCluster(host=HOST, port=nodes.nodes[0].port) as client:
        for number in range(20):
            client.mset_nonatomic({f"{prefix}other:{number}:{each}": "x" for each in range(500)})
    leases = [Lock(direct, f"a:{number}", ttl=WAIT, renew=False).acquire() for number in range(1000)]
    for node in nodes.masters():
        nodes.ask(node, "CONFIG", "RESETSTAT")
    states = run(direct.inspect(BLOCKING))
    assert [state.name for state in states] == sorted(lease.name for lease in leases)
    assert {state.holders[0].holder for state in states} == {lease.holder for lease in leases}
    asked = "".join(str(nodes.ask(node, "INFO", "commandstats")) for node in nodes.masters())
    assert "cmdstat_scan" not in asked
    assert "cmdstat_keys" not in asked
    assert all(lease.release() is Released.RELEASED for lease in leases)
    assert run(direct.inspect(BLOCKING)) == []


def test_counters_and_lists_are_no_more_than_the_tags(nodes: Cluster, direct: ClusterBackend, prefix: str) -> None:
    """Names leave no keys behind: only the counters of the tags stay."""
    for number in range(1000):
        Lock(direct, f"a:{number}").acquire().release()
    found = nodes.keys(prefix)
    assert all(key.endswith("}token") for key in found)
    assert len(found) <= 256


def test_processes_stay_apart_while_their_slot_moves_and_their_master_changes(
    nodes: Cluster, prefix: str, key: str, tmp_path: Path
) -> None:
    path = tmp_path / "history"
    with ExitStack() as stack:
        arguments = (nodes.url, prefix, str(path), 100_000, {"ttl": WAIT}, 0.002)
        workers = [stack.enter_context(processes.worker(work, *arguments)) for _ in range(3)]

        def go_on(sections: int = 20) -> None:
            before = len(path.read_text().splitlines()) if path.exists() else 0
            until(lambda: path.exists() and len(path.read_text().splitlines()) >= before + sections)

        go_on()
        for _ in range(2):
            on_the_way = nodes.begin_to_move(key, nodes.other_than(nodes.master_of(key)))
            on_the_way.carry()
            on_the_way.finish()
            go_on()
            nodes.switch(nodes.master_of(key))
            go_on()
            nodes.heal()
        for one in workers:
            one.kill()
    history = read(path)
    assert overlaps(history) == []
    assert repeated_tokens(history) == []


def test_node_that_is_taken_for_a_server_alone_says_what_to_use(nodes: Cluster) -> None:
    for backend in store(f"redis://{HOST}:{nodes.masters()[0].port}", ""):
        with pytest.raises(BackendUnavailable, match=r"use redis\+cluster://") as caught:
            Lock(backend, "a", wait=None).acquire()
        assert caught.value.refused


@tasks
def test_waiting_is_no_storm_of_questions(harness: Harness) -> None:
    harness.acquire("a", ttl=WAIT)
    with pytest.raises(AcquireTimeout):
        harness.acquire("a", wait=0.5)
    assert len(harness.calls_of("try_acquire", "a")) <= 4
