"""Of five masters, a minority dies, stops, forgets or loses replies: no lock has two holders, nothing hangs."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme

from dlock_core import AsyncLock, Lease, Lock, connect
from dlock_core.backend import Released
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.backends.redis.protocol import load_script
from dlock_core.backends.redis.transport import send_commands
from dlock_core.backends.redlock import broadcast
from dlock_core.backends.redlock.backend import RedlockBackend
from dlock_core.errors import AcquireTimeout, BackendUnavailable, LeaseLost
from dlock_core.leases.engine import raise_token
from dlock_core.runtime import ASYNCIO, BLOCKING, clock, run
from dlock_core.testing.contract.harness import Harness, Tasks
from tests import processes, redlock_nodes, servers
from tests.conftest import give_up
from tests.faults.history import overlaps, read, repeated_tokens, work
from tests.faults.holders import fork, hold, wait
from tests.faults.looking import holders, insist, is_untouched, waiters
from tests.faults.test_history import inside
from tests.processes import worker
from tests.proxy import Fault, Proxy
from tests.redlock_nodes import keys, masters, url_of
from tests.servers import Server, ServerMissing
from tests.waiting import until

WITHIN = 30.0
OUTLASTS_EVERY_WAIT_S = 300.0
LIMIT = 2.0
"""The time in seconds that a store gives its nodes: a busy machine needs more than they do."""
SECRET = "s3cr3t/p:ss@w"
QUOTED = "s3cr3t%2Fp%3Ass%40w"
ACQUIRE, RELEASE, RENEW, WITHDRAW, ADOPT, RESTORE = (
    load_script(name).sha.encode() for name in ("acquire", "release", "renew", "abandon", "adopt", "restore")
)


@pytest.fixture(scope="module")
def five(servers_directory: Path) -> Iterator[list[Server]]:
    try:
        with masters(servers_directory / "redlock-faults") as five:
            yield five
    except ServerMissing as missing:
        give_up(str(missing))


@pytest.fixture
def nodes(five: list[Server]) -> Iterator[list[Server]]:
    """Yield five masters, all of which run again after each test."""
    yield five
    for node in five:
        node.resume()
        if node.process is None or node.process.poll() is not None:
            node.start()


@pytest.fixture
def backend(nodes: list[Server], prefix: str) -> Iterator[RedlockBackend]:
    """Yield the store under test."""
    yield from store(url_of(nodes), prefix)


@pytest.fixture
def direct(nodes: list[Server], prefix: str) -> Iterator[RedlockBackend]:
    """Yield the same store, for looking at it."""
    yield from store(url_of(nodes), prefix)


def store(url: str, prefix: str, timeout: float = LIMIT) -> Iterator[RedlockBackend]:
    backend = RedlockBackend.from_url(url, prefix=prefix, timeout=timeout)
    yield backend
    backend.close()


@pytest.fixture
def proxies(nodes: list[Server]) -> Iterator[list[Proxy]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy(node.port)) for node in nodes]


@pytest.fixture
def through(harness: Harness, proxies: list[Proxy], prefix: str) -> Iterator[Harness]:
    """Yield a harness that has connected to each node through a proxy."""
    yield from behind(harness, proxies, prefix, LIMIT)


@pytest.fixture
def patient(harness: Harness, proxies: list[Proxy], prefix: str) -> Iterator[Harness]:
    """Yield the same with a time limit that no request reaches: a request ends only when the network fails."""
    yield from behind(harness, proxies, prefix, WITHIN)


def behind(harness: Harness, proxies: list[Proxy], prefix: str, timeout: float) -> Iterator[Harness]:
    for backend in store(redlock_nodes.url([proxy.port for proxy in proxies]), prefix, timeout):
        through = type(harness)(backend)
        for _ in range(2):
            through.do(through.acquire("warm-up").release)
        yield through
        through.close()


def here(node: Server, prefix: str, name: str = "a") -> list[str]:
    """Return the holders of the lock at one node."""
    alone = RedisBackend.from_url(node.url, prefix=prefix)
    try:
        return holders(alone, name)
    finally:
        alone.close()


def queued(node: Server, prefix: str) -> int:
    """Return how many waiters the queue at one node has, alive or not."""
    with redis.Redis.from_url(node.url) as client:
        return client.zcard(f"{prefix}{{a}}:q")  # type: ignore[return-value]


def token_at(node: Server, prefix: str) -> int:
    """Return the token of the lock's only holder at one node."""
    alone = RedisBackend.from_url(node.url, prefix=prefix)
    try:
        ((only,),) = (state.holders for state in run(alone.inspect(BLOCKING, "a")))
        return only.token
    finally:
        alone.close()


def undone(node: Server) -> int:
    """Return how many undos a node has executed; only undos are sent as a script's text."""
    with redis.Redis.from_url(node.url) as client:
        return client.info("commandstats").get("cmdstat_eval", {"calls": 0})["calls"]


@pytest.fixture
def held(nodes: list[Server], prefix: str) -> Iterator[list[Lease]]:
    """Yield leases of other holders at three of the nodes, a majority."""
    with ExitStack() as stack:
        others = [stack.enter_context(closing(RedisBackend.from_url(node.url, prefix=prefix))) for node in nodes[:3]]
        leases = [Lock(each, "a", ttl=WITHIN, renew=False).acquire() for each in others]
        for lease in leases:
            stack.callback(lease.release)
        yield leases


def assert_refused(harness: Harness) -> None:
    """Assert that another caller does not get the lock; a busy machine may answer it too late, and then it repeats."""

    def is_refused() -> bool:
        with suppress(BackendUnavailable):
            assert harness.try_acquire("a") is None
            return True
        return False

    until(is_refused)


def let_arrive(request: Fault, node: Server) -> None:
    """Deliver a request that was held up, and wait until the node has executed its script."""
    with redis.Redis.from_url(node.url) as client:
        calls = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        request.release()
        until(lambda: client.info("commandstats")["cmdstat_evalsha"]["calls"] > calls)


def test_lease_that_is_released_while_a_node_takes_it_again_stays_nowhere(
    nodes: list[Server], proxies: list[Proxy], patient: Harness, prefix: str
) -> None:
    lease = patient.acquire("a", renew=False)
    with redis.Redis.from_url(nodes[4].url) as client:
        client.delete(*keys(nodes[4], prefix))
    restoration = proxies[4].hold_request(matching=RESTORE)
    renewal = patient.start(lease.renew)
    restoration.wait()
    assert patient.do(lease.release) is Released.RELEASED
    restoration.release()
    with suppress(LeaseLost):  # Its reply may have arrived before the release.
        renewal.result(WITHIN)
    assert [here(node, prefix) for node in nodes] == [[]] * 5


@pytest.mark.parametrize("is_contended", [False, True])
def test_undo_that_comes_late_ends_no_later_grant_of_the_same_call(
    harness: Harness, nodes: list[Server], proxies: list[Proxy], through: Harness, prefix: str, is_contended: bool
) -> None:
    """Two of five nodes are away or held by another, and one is slow: our request reaches it when we hold the lock."""
    other = [RedisBackend.from_url(node.url, prefix=prefix) for node in nodes[:2]]
    if is_contended:
        held = [Lock(each, "a", ttl=OUTLASTS_EVERY_WAIT_S, renew=False).acquire() for each in other]
    else:
        for node, proxy in zip(nodes[:2], proxies, strict=False):
            node.pause()
            proxy.refuse()
    with redis.Redis.from_url(nodes[4].url) as client:  # Then only the undo is sent as text.
        client.script_load(load_script("abandon").text)
    attempt = proxies[4].hold_request(matching=ACQUIRE)
    lease = through.acquire("a", wait=WITHIN, ttl=OUTLASTS_EVERY_WAIT_S, renew=False)
    before = undone(nodes[4])
    attempt.release()
    with suppress(TimeoutError):  # On a busy machine the undo may be lost with its connection.
        until(lambda: undone(nodes[4]) > before)
    assert [here(node, prefix) for node in nodes[2:]] == [[lease.holder]] * 3
    if is_contended:
        for each in held:
            each.release()
    else:
        for node in nodes[:2]:
            node.resume()
    assert_refused(harness)
    through.do(lease.release)
    assert [here(node, prefix) for node in nodes] == [[]] * 5
    for each in other:
        each.close()


def test_release_that_comes_after_its_connection_has_ended_ends_no_later_grant_of_the_same_call(
    nodes: list[Server], proxies: list[Proxy], through: Harness, prefix: str, held: list[Lease]
) -> None:
    """The release after a failed attempt is still in the network, which has ended the connection."""
    given_back = proxies[4].hold_request(matching=RELEASE)
    pending = through.start(through.lock("a", ttl=WITHIN, wait=WITHIN, renew=False).acquire)
    given_back.wait()
    proxies[4].hang_up()
    held[0].release()
    lease = pending.result(WITHIN)
    let_arrive(given_back, nodes[4])
    assert here(nodes[4], prefix) == [lease.holder]
    through.do(lease.release)


def test_release_that_a_node_had_refused_and_that_comes_late_when_it_is_repeated_ends_no_later_grant_of_the_same_call(
    nodes: list[Server], proxies: list[Proxy], patient: Harness, prefix: str, held: list[Lease]
) -> None:
    refused, given_back = proxies[4].hold_request(matching=RELEASE), proxies[4].hold_request(2, matching=RELEASE)
    pending = patient.start(patient.lock("a", ttl=WITHIN, wait=WITHIN, renew=False).acquire)
    refused.wait()
    with redis.Redis.from_url(nodes[4].url) as client:
        client.config_set("min-replicas-to-write", 1)
        refused.release()
        given_back.wait()
        client.config_set("min-replicas-to-write", 0)
    proxies[4].hang_up()
    held[0].release()
    lease = pending.result(WITHIN)
    let_arrive(given_back, nodes[4])
    assert here(nodes[4], prefix) == [lease.holder]
    patient.do(lease.release)


@pytest.mark.parametrize("what", ["lease", "waiter"])
def test_what_is_over_stays_at_no_node_whose_connection_has_ended(
    harness: Harness, nodes: list[Server], proxies: list[Proxy], through: Harness, prefix: str, what: str
) -> None:
    """A node restarted with its data would otherwise keep the lease for a ttl, or hand it to a waiter that is gone."""
    if what == "lease":
        lease = through.acquire("a", ttl=10 * WITHIN, renew=False)
        until(lambda: [here(node, prefix) for node in nodes] == [[lease.holder]] * 5)
        ended = proxies[4].cut_request(matching=RELEASE)
        assert through.do(lease.release) is Released.RELEASED
    else:
        lease = harness.acquire("a", ttl=10 * WITHIN, renew=False)
        pending = through.start(through.lock("a", ttl=10 * WITHIN, wait=1, renew=False).acquire)
        until(lambda: queued(nodes[4], prefix))
        ended = proxies[4].cut_request(matching=WITHDRAW)
        with pytest.raises(AcquireTimeout):
            pending.result(WITHIN)
    assert ended.happened
    assert not queued(nodes[4], prefix)
    if what == "waiter":
        harness.do(lease.release)
    assert [here(node, prefix) for node in nodes] == [[]] * 5


@pytest.mark.parametrize("is_given_up", [False, True])
def test_grant_that_is_lost_with_its_undo_keeps_the_lock_from_nobody(
    harness: Harness, nodes: list[Server], proxies: list[Proxy], patient: Harness, prefix: str, is_given_up: bool
) -> None:
    """The network fails after it has delivered the request to all nodes; the call continues with a new holder id."""
    for proxy in proxies:
        proxy.mute()
    lock = patient.lock("a", ttl=10 * WITHIN, wait=0 if is_given_up else WITHIN, renew=False)
    pending = patient.start(lock.acquire)
    until(lambda: all(here(node, prefix) for node in nodes))
    for proxy in proxies:
        proxy.refuse()
    if is_given_up:
        with pytest.raises(BackendUnavailable):
            pending.result(WITHIN)
    else:
        patient.observed.until(lambda calls: len({call.holders for call in calls if call.name == "a"}) > 1)
    for proxy in proxies:
        proxy.forward()
    if not is_given_up:
        patient.do(pending.result(WITHIN).release)
    harness.acquire("a", wait=WITHIN)


@pytest.mark.parametrize("is_granted", [False, True])
@pytest.mark.parametrize("is_raised", [False, True])
def test_undo_that_comes_after_a_renewal_has_given_the_lease_to_that_node_leaves_it_there(
    through: Harness,
    nodes: list[Server],
    proxies: list[Proxy],
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    is_granted: bool,
    is_raised: bool,
) -> None:
    """By then the node may be needed for the majority."""
    monkeypatch.setattr(broadcast, "FAILED_NODE_PAUSE_S", 0.0)
    attempt = (proxies[4].hold_reply if is_granted else proxies[4].hold_request)(matching=ACQUIRE)
    undo = proxies[4].hold_request(matching=b"abandon.lua")
    lease = through.acquire("a", ttl=WITHIN, renew=False)
    while lease._held.in_store:  # The acquire does not wait for a slow node.
        through.do(lease.renew)
    if is_raised:  # The fence needs a greater token, and the lease is granted again.
        assert run(raise_token(BLOCKING, lease._held, lease.token + 10**9))
        until(lambda: len({token_at(node, prefix) for node in nodes}) == 1)
    attempt.release()
    undo.wait()
    before = undone(nodes[4])
    undo.release()
    until(lambda: undone(nodes[4]) > before)
    assert [here(node, prefix) for node in nodes] == [[lease.holder]] * 5
    through.do(lease.release)
    assert [here(node, prefix) for node in nodes] == [[]] * 5


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_minority_that_goes_away_while_we_hold_changes_nothing(harness: Harness, nodes: list[Server], how: str) -> None:
    lease = harness.acquire("a", ttl=2 * harness.renewed_ttl)
    for node in nodes[:2]:
        getattr(node, how)()
    before = harness.renewals(lease)
    harness.observed.until(lambda _: harness.renewals(lease) >= before + 4)
    assert not lease.lost
    harness.do(lease.renew)
    assert_refused(harness)
    assert harness.holders("a") == [lease.holder]
    assert harness.do(lease.release) is Released.RELEASED
    assert harness.acquire("a").token > lease.token


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_minority_that_went_away_before_changes_nothing(harness: Harness, nodes: list[Server], how: str) -> None:
    for node in nodes[3:]:
        getattr(node, how)()
    tokens = []
    for _ in range(5):
        lease = harness.acquire("a")
        assert_refused(harness)
        tokens.append(lease.token)
        assert harness.do(lease.release) is Released.RELEASED
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_minority_that_goes_away_while_we_wait_stalls_nobody(harness: Harness, nodes: list[Server], how: str) -> None:
    first = harness.acquire("a", ttl=60)
    line = [harness.queue_up("a", wait=60) for _ in range(3)]
    for node in nodes[3:]:  # they wait at the last one
        getattr(node, how)()
    assert harness.do(first.release) is Released.RELEASED
    tokens = [first.token]
    while line:
        until(lambda: any(pending.done() for pending in line))
        pending = next(pending for pending in line if pending.done())
        line.remove(pending)
        tokens.append(pending.result().token)
        harness.do(pending.result().release)
    assert tokens == sorted(set(tokens))


def test_minority_that_forgets_changes_nothing(harness: Harness, nodes: list[Server]) -> None:
    lease = harness.acquire("a", ttl=2 * harness.renewed_ttl)
    for node in nodes[:2]:
        node.restart(keep_data=False)
    assert_refused(harness)
    before = harness.renewals(lease)
    harness.observed.until(lambda _: harness.renewals(lease) >= before + 3)
    assert_refused(harness)
    assert not lease.lost
    assert harness.holders("a") == [lease.holder]
    assert harness.do(lease.release) is Released.RELEASED


def test_lease_outlives_all_nodes_forgetting_one_after_the_other(
    harness: Harness, nodes: list[Server], prefix: str
) -> None:
    """The next renewal restores the lease at a node that has restarted empty."""
    lease = harness.acquire("a", ttl=2 * harness.renewed_ttl)
    for node in nodes:
        node.restart(keep_data=False)
        until(lambda node=node: here(node, prefix) == [lease.holder])
    assert not lease.lost
    assert_refused(harness)
    assert harness.state("a").holders[0].token == lease.token
    assert harness.do(lease.release) is Released.RELEASED
    assert harness.acquire("a").token > lease.token


def test_node_that_has_given_the_lock_to_another_keeps_it_when_we_renew(
    harness: Harness, nodes: list[Server], prefix: str
) -> None:
    """A minority forgot the lease and granted the lock to another holder."""
    lease = harness.acquire("a", ttl=60, renew=False)
    nodes[0].restart(keep_data=False)
    alone = RedisBackend.from_url(nodes[0].url, prefix=prefix)
    other = Lock(alone, "a", ttl=60).acquire()
    for _ in range(3):  # one attempt may fail on the idle connection, which has died
        harness.do(lease.renew)
    assert here(nodes[0], prefix) == [other.holder]
    assert harness.holders("a") == [lease.holder]
    other.release()
    alone.close()


def test_majority_that_forgets_is_a_loss_that_is_told(harness: Harness, nodes: list[Server]) -> None:
    told: list[bool] = []
    lease = harness.acquire("a", ttl=6, on_lost=lambda: told.append(True))
    for node in nodes[:3]:
        node.restart(keep_data=False)
    harness.until(lambda: told)
    with pytest.raises(LeaseLost, match="another holder, or lost it"):
        lease.ensure_held()


def test_tokens_grow_while_one_node_after_the_other_forgets(harness: Harness, nodes: list[Server], prefix: str) -> None:
    tokens = []
    for node in (*nodes, *nodes[:2]):
        lease = harness.acquire("a", wait=10)
        tokens.append(lease.token)
        harness.do(lease.release)
        node.restart(keep_data=False)
    assert tokens == sorted(set(tokens))
    assert [keys(node, prefix) for node in nodes] == [[]] * 5


def test_node_that_comes_back_is_asked_again(harness: Harness, nodes: list[Server], prefix: str) -> None:
    nodes[0].kill()
    harness.do(harness.acquire("a").release)
    nodes[0].start()

    def is_held_there() -> bool:
        lease = harness.acquire("a")
        found = here(nodes[0], prefix) == [lease.holder]
        harness.do(lease.release)
        return found

    until(is_held_there)


@pytest.mark.parametrize("wait", [0, 0.3])
@pytest.mark.parametrize("how", ["kill", "pause"])
def test_majority_that_is_gone_is_unavailable_in_time(
    harness: Harness, nodes: list[Server], how: str, wait: float
) -> None:
    harness.do(harness.acquire("a").release)
    for node in nodes[:3]:
        getattr(node, how)()
    began = clock()
    with pytest.raises(BackendUnavailable, match="no majority of 5 nodes") as caught:
        harness.acquire("a", wait=wait)
    assert clock() - began < wait + 3 * LIMIT + 5, "a request and a clean-up are all that may come on top of the wait"
    assert caught.value.name == "a"
    assert f"127.0.0.1:{nodes[0].port}: " in str(caught.value)


def test_attempt_without_a_majority_leaves_nothing_on_the_others(
    harness: Harness, nodes: list[Server], prefix: str
) -> None:
    for node in nodes[:3]:
        node.kill()
    with pytest.raises(BackendUnavailable):
        harness.try_acquire("a")
    assert [here(node, prefix) for node in nodes[3:]] == [[], []]


def test_lease_is_lost_in_time_when_the_majority_stands_still(harness: Harness, nodes: list[Server]) -> None:
    told: list[float] = []
    lease = harness.acquire("a", ttl=0.9, on_lost=lambda: told.append(clock()))
    until_then = clock() + lease.remaining()
    for node in nodes[:3]:
        node.pause()
    harness.until(lambda: told)
    assert told[0] >= until_then - 0.01
    with pytest.raises(LeaseLost, match="could not be renewed in time"):
        lease.ensure_held()
    with pytest.raises(BackendUnavailable):
        harness.do(lease.release)


def test_all_nodes_restarted_with_their_data_have_kept_the_lease(harness: Harness, nodes: list[Server]) -> None:
    lease = harness.acquire("a", ttl=60)
    for node in nodes:
        node.restart()
    harness.do(lease.renew)
    assert_refused(harness)
    assert harness.do(lease.release) is Released.RELEASED


def test_operator_ends_a_grant_and_looks_without_a_minority(harness: Harness, nodes: list[Server]) -> None:
    lease = harness.acquire("a", ttl=60, renew=False)
    for node in nodes[:2]:
        node.kill()
    assert [state.name for state in harness.call_store("inspect")] == ["a"]
    assert not harness.call_store("force_release", "a", lease.token + 1)
    assert harness.call_store("force_release", "a", lease.token)
    assert harness.holders("a") == []
    nodes[2].kill()
    with pytest.raises(BackendUnavailable):
        harness.call_store("force_release", "a", lease.token)


def test_silent_node_is_not_waited_for_although_the_others_do_not_know_the_script(
    patient: Harness, proxies: list[Proxy], nodes: list[Server]
) -> None:
    patient.do(patient.acquire("b").release)
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.script_flush()
    proxies[4].deaf()
    lease = patient.acquire("a", ttl=60)
    assert patient.do(lease.release) is Released.RELEASED


def test_node_to_which_no_connection_comes_about_is_suspended(
    direct: RedlockBackend, nodes: list[Server], prefix: str
) -> None:
    Lock(direct, "a").acquire().release()  # The nodes know the scripts now.
    nodes[4].pause()
    for backend in store(url_of(nodes), prefix, WITHIN):
        lease = Lock(backend, "a").acquire()
        assert [node.is_healthy for node in backend._nodes.all] == [True] * 4 + [False]
        nodes[4].resume()
        assert lease.release() is Released.RELEASED


@pytest.mark.parametrize("fault", ["drop_reply", "cut_reply", "cut_request"])
def test_acquire_whose_reply_one_node_lost_is_one_grant(
    through: Harness, proxies: list[Proxy], nodes: list[Server], prefix: str, fault: str
) -> None:
    broken = getattr(proxies[0], fault)(matching=ACQUIRE)
    lease = through.acquire("a", wait=20)
    assert broken.happened
    assert through.do(lease.release) is Released.RELEASED
    until(lambda: [keys(node, prefix) for node in nodes] == [[]] * 5)


@pytest.mark.parametrize("fault", ["drop_reply", "cut_reply"])
def test_acquire_whose_replies_a_majority_lost_is_one_grant(
    through: Harness, proxies: list[Proxy], direct: RedlockBackend, fault: str
) -> None:
    for proxy in proxies[:3]:
        getattr(proxy, fault)(matching=ACQUIRE)
    lease = through.acquire("a", wait=20)
    assert holders(direct, "a") == [lease.holder]
    assert through.do(lease.release) is Released.RELEASED
    assert is_untouched(direct, "a")


@pytest.mark.parametrize("fault", ["drop_reply", "cut_reply"])
def test_failed_attempt_is_undone_at_a_node_that_did_not_answer(
    through: Harness, proxies: list[Proxy], nodes: list[Server], prefix: str, fault: str
) -> None:
    """The node had granted the lock, and its reply was lost."""
    others = [Lock(RedisBackend.from_url(node.url, prefix=prefix), "a", ttl=60).acquire() for node in nodes[:3]]
    lost = getattr(proxies[4], fault)(matching=ACQUIRE)
    assert through.try_acquire("a", ttl=600) is None
    assert lost.happened
    until(lambda: [here(node, prefix) for node in nodes[3:]] == [[], []])
    for lease in others:
        lease.release()


def disagree(nodes: list[Server], prefix: str) -> None:
    """Make each node draw a different token."""
    for place, node in enumerate(nodes):
        with redis.Redis.from_url(node.url) as client:
            client.incrby(f"{prefix}token", (place + 1) * 10**9)


def test_second_round_whose_replies_a_minority_lost_is_a_grant(
    through: Harness, proxies: list[Proxy], nodes: list[Server], prefix: str
) -> None:
    disagree(nodes, prefix)
    lost = [proxy.drop_reply(matching=ADOPT) for proxy in proxies[:2]]
    assert through.acquire("a", wait=0).token > 0
    assert all(fault.happened for fault in lost)


def test_second_round_whose_replies_a_majority_lost_is_none(
    through: Harness, proxies: list[Proxy], nodes: list[Server], direct: RedlockBackend, prefix: str
) -> None:
    disagree(nodes, prefix)
    for proxy in proxies[:3]:
        proxy.drop_reply(matching=ADOPT)
    with pytest.raises(BackendUnavailable, match="second round"):
        through.try_acquire("a")
    until(lambda: is_untouched(direct, "a"))


@pytest.mark.parametrize("fault", ["drop_reply", "cut_reply"])
def test_greater_token_that_could_not_be_had_costs_no_lease(
    through: Harness, proxies: list[Proxy], direct: RedlockBackend, fault: str
) -> None:
    lease = through.acquire("a", ttl=60, renew=False)
    for proxy in proxies[:3]:
        getattr(proxy, fault)(matching=ACQUIRE)
    request = lease._held.request._replace(floor=lease.token, queue=False)
    with pytest.raises(BackendUnavailable):
        through.call_store("try_acquire", request)
    assert holders(direct, "a") == [lease.holder]
    assert through.call_store("try_acquire", request).token > lease.token


def test_one_round_is_enough_when_the_clocks_are_known(through: Harness, proxies: list[Proxy]) -> None:
    through.do(through.acquire("a").release)
    before = [proxy.requests for proxy in proxies]
    for _ in range(10):
        through.do(through.acquire("a").release)
    rounds = [proxy.requests - count for proxy, count in zip(proxies, before, strict=True)]
    assert all(20 <= number < 30 for number in rounds), "an acquire and a release each, and hardly a second round"


def test_renewal_and_release_whose_replies_a_minority_lost_are_what_the_majority_says(
    through: Harness, proxies: list[Proxy]
) -> None:
    lease = through.acquire("a", ttl=60, renew=False)
    for proxy in proxies[:2]:
        proxy.drop_reply(matching=RENEW)
        proxy.cut_reply(matching=RELEASE)
    through.do(lease.renew)
    assert through.do(lease.release) is Released.RELEASED


def test_deaf_majority_is_given_up_in_time(through: Harness, proxies: list[Proxy], direct: RedlockBackend) -> None:
    for proxy in proxies[:3]:
        proxy.deaf()
    began = clock()
    with pytest.raises(BackendUnavailable):
        through.acquire("a", wait=0.3)
    assert clock() - began < 0.3 + 3 * LIMIT + 5
    for proxy in proxies:
        proxy.forward()
    until(lambda: holders(direct, "a") == [])


def test_waiting_is_no_storm_of_questions(harness: Harness) -> None:
    harness.acquire("a", ttl=60)
    with pytest.raises(AcquireTimeout):
        harness.acquire("a", wait=2.5)
    assert len(harness.calls_of("try_acquire", "a")) <= 1 + 1 + 4


def test_waiters_without_a_majority_to_wait_at_pause_between_questions(
    harness: Harness, nodes: list[Server], prefix: str
) -> None:
    """The end of another library's lock wakes no waiter."""
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            client.set(f"{prefix}{{a}}", "somebody", px=1000)
    assert harness.acquire("a", wait=20).token > 0
    assert len(harness.calls_of("try_acquire", "a")) <= 60


def test_cancelled_acquire_leaves_no_grant(harness: Harness, nodes: list[Server], direct: RedlockBackend) -> None:
    if not isinstance(harness, Tasks):
        pytest.skip("threads cannot be cancelled")
    for node in nodes[:3]:
        node.pause()
    pending = harness.start(harness.lock("a", wait=None).acquire)
    harness.observed.until(lambda _: len(harness.calls_of("try_acquire", "a")) >= 1)
    pending.cancel()
    harness.observed.until(lambda _: bool(harness.calls_of("abandon", "a")))
    for node in nodes:
        node.resume()
    until(lambda: is_untouched(direct, "a"))  # type: ignore[arg-type]


def test_cancelled_acquire_writes_nothing_on_a_connection_that_is_somebody_elses_by_now(
    direct: RedlockBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unread reply would be taken for the reply to the next request on that connection."""
    ask, answered = broadcast._ask, list[Any]()

    async def cancelled_with_the_last_answer() -> None:
        async def asking(*question: Any) -> Any:
            answer = await ask(*question)
            answered.append(answer)
            if len(answered) == len(direct._nodes.all):
                locking.cancel()
            return answer

        await (await AsyncLock(direct, "a").acquire()).release()
        monkeypatch.setattr(broadcast, "_ask", asking)
        locking = asyncio.ensure_future(AsyncLock(direct, "a").acquire())
        with pytest.raises(asyncio.CancelledError):
            await locking
        for node in direct._nodes.all:
            assert await send_commands(node.tasks, ASYNCIO, "", [("ECHO", node.title)], WITHIN) == [node.title.encode()]

    asyncio.run(cancelled_with_the_last_answer())
    assert is_untouched(direct, "a")


def test_threads_share_the_nodes_and_no_connection(direct: RedlockBackend) -> None:
    failures: list[BaseException] = []

    def use(number: int) -> None:
        try:
            for turn in range(20):
                with Lock(direct, f"a:{number if turn % 2 else 'all'}", wait=None):
                    pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.fixture(scope="module")
def guarded(servers_directory: Path) -> Iterator[list[Server]]:
    with masters(servers_directory / "redlock-guarded", 3, "--requirepass", SECRET) as nodes:
        yield nodes


@pytest.mark.parametrize("credentials", [":wrong@", "nobody:wrong@", ""])
def test_wrong_password_is_refused_at_once_and_never_told(
    guarded: list[Server], credentials: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = connect(redlock_nodes.url([node.port for node in guarded], credentials))
    caplog.set_level(logging.DEBUG)
    with pytest.raises(BackendUnavailable) as caught:
        Lock(backend, "a", wait=60).acquire()
    assert "wrong" not in f"{caught.value}{caplog.text}".replace("wrongpass", "").lower().replace("wrong password", "")
    if credentials:
        assert caught.value.refused
    backend.close()


def test_right_password_lets_us_in(guarded: list[Server]) -> None:
    backend = connect(redlock_nodes.url([node.port for node in guarded], f":{QUOTED}@") + "/2")
    with Lock(backend, "a") as lease:
        assert lease.token > 0
    backend.close()


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of three masters with TLS certificates of a private authority."""
    directory, authority = tmp_path_factory.mktemp("redlock-tls"), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    paths = ("--tls-cert-file", directory / "cert.pem", "--tls-key-file", directory / "key.pem")
    options = [*map(str, paths), "--tls-ca-cert-file", str(directory / "ca.pem"), "--tls-auth-clients", "no"]
    ports = [servers.free_port() for _ in range(3)]
    nodes = [servers.redis(directory / f"node{port}", "--tls-port", str(port), *options) for port in ports]
    for node in nodes:
        node.start()
    yield f"{redlock_nodes.url(ports)}?ssl_ca_certs={directory}/ca.pem"
    for node in nodes:
        node.stop()


def test_lock_is_held_over_tls_by_threads(encrypted: str) -> None:
    backend = connect(encrypted, tls=True, timeout=2.0)
    for _ in range(20):
        with Lock(backend, "a") as lease:
            lease.renew()
    backend.close()


async def test_lock_is_held_over_tls_by_tasks(encrypted: str) -> None:
    backend = connect(encrypted, tls=True, timeout=2.0)
    for _ in range(20):
        async with AsyncLock(backend, "a") as lease:
            await lease.renew()
    backend.close()


def test_nodes_with_certificates_that_nobody_trusts_are_unavailable(encrypted: str) -> None:
    with pytest.raises(BackendUnavailable, match="certificate verify failed"):
        Lock(connect(encrypted.partition("?")[0], tls=True, timeout=10.0), "a", wait=0).acquire()


def test_holder_that_was_stopped_beyond_its_ttl_knows_at_once_that_it_lost(
    nodes: list[Server], direct: RedlockBackend, prefix: str
) -> None:
    with worker(hold, url_of(nodes), prefix, {"ttl": 0.5}) as holder:
        token = holder.hear()
        holder.pause()
        lease = Lock(direct, "a", wait=None).acquire()
        assert lease.token > token
        holder.say("look")
        holder.resume()
        assert holder.hear() == (True, 0.0)
        holder.say("release")
        assert holder.hear() == "stolen"
    assert holders(direct, "a") == [lease.holder]  # type: ignore[arg-type]
    lease.release()


def test_killed_holder_is_followed_when_its_ttl_is_over(
    nodes: list[Server], direct: RedlockBackend, prefix: str
) -> None:
    with worker(hold, url_of(nodes), prefix, {"ttl": 0.5}) as holder:
        token = holder.hear()
        holder.kill()
        lease = Lock(direct, "a", wait=None).acquire()
    assert lease.token > token
    lease.release()
    assert is_untouched(direct, "a")  # type: ignore[arg-type]


def test_killed_waiter_stalls_nobody_for_long(nodes: list[Server], direct: RedlockBackend, prefix: str) -> None:
    first = Lock(direct, "a").acquire()
    with worker(wait, url_of(nodes), prefix) as dead:
        until(lambda: len(waiters(direct, "a")) == 1)  # type: ignore[arg-type]
        with worker(wait, url_of(nodes), prefix) as alive:
            until(lambda: len(waiters(direct, "a")) == 2)  # type: ignore[arg-type]
            dead.kill()
            first.release()
            assert alive.hear() > first.token
            alive.say("enough")
            alive.result()
    until(lambda: is_untouched(direct, "a"))  # type: ignore[arg-type]


def test_forked_child_locks_for_itself(nodes: list[Server], direct: RedlockBackend, prefix: str) -> None:
    with worker(fork, url_of(nodes), prefix) as parent:
        assert "'kept': True" in parent.hear()
        assert len(holders(direct, "a")) == 1  # type: ignore[arg-type]
        parent.say("go on")
        assert parent.result() == (False, True)


def test_sections_of_many_processes_are_apart_in_the_order_of_tokens(
    nodes: list[Server], prefix: str, tmp_path: Path
) -> None:
    path = tmp_path / "history"
    processes.run(work, [(url_of(nodes), prefix, str(path), 40, {})] * 5)
    history = read(path)
    assert len(history) == 200
    assert any(section.queued for section in history), "nobody had to wait: nothing was tested"
    assert overlaps(history) == []
    assert repeated_tokens(history) == []


def test_processes_and_nodes_that_stop_die_and_forget_make_no_overlap(
    nodes: list[Server], direct: RedlockBackend, prefix: str, tmp_path: Path
) -> None:
    """At most two nodes fail at a time, and one forgets only when every lease has had time to reach all nodes again."""
    path = tmp_path / "history"
    with ExitStack() as stack:
        arguments = (url_of(nodes), prefix, str(path), 100_000, {"ttl": 0.5}, 0.01)
        workers = [stack.enter_context(processes.worker(work, *arguments)) for _ in range(5)]

        def go_on(sections: int = 20) -> None:
            before = len(read(path))
            until(lambda: len(read(path)) >= before + sections)

        for pair in ((0, 1), (3, 4), (1, 4)):
            stopped = insist(lambda: inside(direct, workers))  # type: ignore[arg-type]
            stopped.pause()
            nodes[pair[0]].kill()
            nodes[pair[1]].pause()
            go_on()
            stopped.resume()
            nodes[pair[0]].start()
            nodes[pair[1]].resume()
            go_on()
        for forgetful in (2, 0):
            threading.Event().wait(3.0)
            nodes[forgetful].restart(keep_data=False)
            go_on()
        dead = insist(lambda: inside(direct, workers))  # type: ignore[arg-type]
        dead.kill()
        go_on()
        for one in workers:
            one.kill()
    history = read(path)
    assert overlaps(history) == []
    assert repeated_tokens(history) == []


def test_many_waiters_get_the_lock_one_after_the_other_without_a_pause(direct: RedlockBackend) -> None:
    """No waiter sleeps while it already holds some of the nodes: pauses of a second each would take far longer."""
    together = threading.Barrier(8)
    done: list[int] = []

    def use() -> None:
        together.wait(WITHIN)
        for _ in range(25):
            with Lock(direct, "a", wait=None) as lease:
                done.append(lease.token)

    threads = [threading.Thread(target=use, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WITHIN)
    assert len(done) == 200
    assert done == sorted(set(done))


def test_task_that_is_cancelled_before_the_nodes_are_asked_keeps_no_connection(backend: RedlockBackend) -> None:
    """The end of an event loop cancels every task at once like this."""

    async def main() -> None:
        await (await AsyncLock(backend, "a").acquire()).release()
        wires = [node.tasks._idle.here() for node in backend._nodes.all]
        free = [connection for wire in wires for connection, _ in wire._idle]
        assert len(free) == len(wires)
        asking = asyncio.ensure_future(AsyncLock(backend, "a", wait=0).acquire())
        while len(asyncio.all_tasks()) < 2 + len(wires):
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        known = {id(connection) for wire in wires for connection, _ in wire._idle}
        assert [connection for connection in free if connection.is_connected and id(connection) not in known] == []

    asyncio.run(main())
