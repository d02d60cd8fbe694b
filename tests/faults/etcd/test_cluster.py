"""A cluster of three whose members and clients die, stop and come back: no lock has two holders, nothing hangs."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dlock_core import Lock
from dlock_core.backend import Released
from dlock_core.backends.etcd.backend import EtcdBackend
from dlock_core.errors import AcquireTimeout, BackendUnavailable, LeaseLost
from dlock_core.runtime import clock
from dlock_core.testing.contract.harness import Harness
from tests import processes
from tests.etcd_servers import Cluster, cluster
from tests.faults.history import overlaps, overtaken, read, repeated_tokens, work
from tests.faults.holders import fork, hold, wait
from tests.faults.looking import holders, insist, is_untouched, waiters
from tests.faults.test_history import inside
from tests.processes import worker
from tests.servers import Server
from tests.waiting import until

WITHIN = 30.0
LIMIT = 1.0
SECRET = "s3cr3t/p:ss@w"
QUOTED = "s3cr3t%2Fp%3Ass%40w"
LEASE, ENTER, LEAVE, RENEW, WATCH = b"/lease/grant", b"/kv/txn", b"/kv/deleterange", b"/lease/keepalive", b"/v3/watch"


@pytest.fixture(scope="module")
def three(servers_directory: Path) -> Iterator[Cluster]:
    with cluster(servers_directory / "etcd3", 3) as three:
        yield three


@pytest.fixture
def etcd(three: Cluster) -> Iterator[Cluster]:
    """Yield three members, all of which run again after each test."""
    yield three
    for member in three.members:
        member.resume()
        if member.process is None or member.process.poll() is not None:
            member.start()
    three.settle()


@pytest.fixture
def backend(etcd: Cluster, prefix: str) -> Iterator[EtcdBackend]:
    backend = EtcdBackend(etcd.url, prefix=prefix)
    yield backend
    backend.close()


def current(harness: Harness, etcd: Cluster) -> Server:
    """Return the member to which the store under test sends its requests now."""
    port = harness.observed.backend._gateway._connections.member.port  # type: ignore[attr-defined]
    return next(member for member in etcd.members if member.port == port)


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_leader_that_goes_away_while_we_hold_costs_no_lease(harness: Harness, etcd: Cluster, how: str) -> None:
    lease = harness.acquire("a", ttl=8)
    getattr(etcd.leader(), how)()
    insist(lambda: harness.do(lease.renew))
    before = harness.renewals(lease)
    harness.observed.until(lambda _: harness.renewals(lease) >= before + 2)
    assert not lease.lost
    assert insist(lambda: harness.holders("a")) == [lease.holder]
    assert insist(lambda: harness.do(lease.release)) is Released.RELEASED


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_leader_that_goes_away_while_we_wait_keeps_the_queue(harness: Harness, etcd: Cluster, how: str) -> None:
    first = harness.acquire("a", ttl=60)
    line = [harness.queue_up("a", wait=60) for _ in range(3)]
    order = harness.waiting("a")
    getattr(etcd.leader(), how)()
    assert insist(lambda: harness.do(first.release)) is Released.RELEASED
    got = []
    for pending in line:
        got.append(pending.result(WITHIN))
        insist(lambda: harness.do(got[-1].release))
    assert [lease.holder for lease in got] == order


@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
def test_waiter_whose_neighbour_gives_up_stays_behind_the_holder(harness: Harness, shared: bool) -> None:
    first = harness.acquire("a", ttl=60)
    neighbour = harness.queue_up("a", wait=1)
    pending = harness.queue_up("a", wait=60, shared=shared)
    with pytest.raises(AcquireTimeout):
        neighbour.result(WITHIN)
    harness.observed.until(lambda _: len(harness.calls_of("wait", "a")) >= 3 or pending.done())
    assert harness.holders("a") == [first.holder]
    harness.do(first.release)
    assert pending.result(WITHIN).token > first.token


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_lock_is_acquired_within_its_wait_while_a_new_leader_is_elected(
    harness: Harness, etcd: Cluster, how: str
) -> None:
    getattr(etcd.leader(), how)()
    assert harness.acquire("a", wait=20).token > 0


def test_member_that_died_is_passed_over_even_by_a_single_try(harness: Harness, etcd: Cluster) -> None:
    lease = harness.acquire("a", ttl=8)
    for dead in etcd.followers()[:1]:
        dead.kill()
        while current(harness, etcd) is not dead:
            harness.observed.backend._gateway._connections.skip(current_member(harness))  # type: ignore[attr-defined]
        assert harness.try_acquire("a") is None
        assert harness.try_acquire("b") is not None
        assert current(harness, etcd) is not dead
    harness.do(lease.renew)
    assert harness.do(lease.release) is Released.RELEASED


def current_member(harness: Harness) -> Any:
    return harness.observed.backend._gateway._connections.member  # type: ignore[attr-defined]


def test_member_that_stands_still_is_passed_over_even_by_a_single_try(harness: Harness, etcd: Cluster) -> None:
    lease = harness.acquire("a", ttl=30)
    etcd.settle()
    stuck = next(member for member in etcd.followers())
    while current(harness, etcd) is not stuck:
        harness.observed.backend._gateway._connections.skip(current_member(harness))  # type: ignore[attr-defined]
    stuck.pause()
    assert harness.try_acquire("b") is not None
    assert current(harness, etcd) is not stuck
    harness.do(lease.renew)


def test_waiter_whose_member_stands_still_is_woken_all_the_same(harness: Harness, etcd: Cluster) -> None:
    first = harness.acquire("a", ttl=60)
    pending = harness.queue_up("a", wait=None)
    current(harness, etcd).pause()
    assert insist(lambda: harness.do(first.release)) is Released.RELEASED
    assert pending.result(WITHIN).token > first.token


def test_cluster_without_a_majority_is_unavailable_and_not_taken(harness: Harness, etcd: Cluster) -> None:
    for member in etcd.members[:2]:
        member.kill()
    began = clock()
    with pytest.raises(BackendUnavailable) as caught:
        harness.acquire("a", wait=0.5)
    assert clock() - began < 0.5 + 3 + 5, "one request is all that may come on top of the wait"
    assert caught.value.name == "a"


def test_cluster_that_is_gone_is_unavailable_and_the_lease_is_lost_in_time(harness: Harness, etcd: Cluster) -> None:
    told: list[bool] = []
    lease = harness.acquire("a", ttl=2, on_lost=lambda: told.append(True))
    for member in etcd.members:
        member.kill()
    harness.until(lambda: told)
    with pytest.raises(LeaseLost, match="could not be renewed in time"):
        lease.ensure_held()
    with pytest.raises(BackendUnavailable):
        harness.do(lease.release)


def test_cluster_that_was_restarted_has_kept_leases_and_places(harness: Harness, etcd: Cluster) -> None:
    lease = harness.acquire("a", ttl=60)
    pending = harness.queue_up("a", wait=60)
    etcd.restart()
    insist(lambda: harness.do(lease.renew))
    assert not lease.lost
    assert harness.try_acquire("a") is None
    assert insist(lambda: harness.do(lease.release)) is Released.RELEASED
    assert pending.result(WITHIN).token > lease.token


def test_tokens_grow_over_restarts_and_elections(harness: Harness, etcd: Cluster) -> None:
    tokens = []
    for step in (etcd.restart, etcd.leader().kill, lambda: None):
        lease = insist(lambda: harness.acquire("a", wait=20))
        tokens.append(lease.token)
        insist(lambda lease=lease: harness.do(lease.release))
        step()
    assert tokens == sorted(set(tokens))


def test_holder_that_was_stopped_beyond_its_ttl_knows_at_once_that_it_lost(
    etcd: Cluster, backend: EtcdBackend, prefix: str
) -> None:
    with worker(hold, etcd.url, prefix, {"ttl": 2.0}) as holder:
        token = holder.hear()
        holder.pause()
        lease = Lock(backend, "a", wait=None).acquire()
        assert lease.token > token
        holder.say("look")
        holder.resume()
        assert holder.hear() == (True, 0.0)
        holder.say("release")
        assert holder.hear() == "stolen"
    assert holders(backend, "a") == [lease.holder]  # type: ignore[arg-type]
    lease.release()


def test_killed_holder_is_followed_when_its_ttl_is_over(etcd: Cluster, backend: EtcdBackend, prefix: str) -> None:
    with worker(hold, etcd.url, prefix, {"ttl": 2.0}) as holder:
        token = holder.hear()
        assert Lock(backend, "a").try_acquire() is None
        holder.kill()
        lease = Lock(backend, "a", wait=None).acquire()
    assert lease.token > token
    lease.release()
    assert is_untouched(backend, "a")  # type: ignore[arg-type]


def test_killed_waiter_stalls_nobody_for_long(etcd: Cluster, backend: EtcdBackend, prefix: str) -> None:
    first = Lock(backend, "a").acquire()
    with worker(wait, etcd.url, prefix) as dead:
        until(lambda: len(waiters(backend, "a")) == 1)  # type: ignore[arg-type]
        with worker(wait, etcd.url, prefix) as alive:
            until(lambda: len(waiters(backend, "a")) == 2)  # type: ignore[arg-type]
            dead.kill()
            first.release()
            assert alive.hear() > first.token
            alive.say("enough")
            alive.result()
    assert is_untouched(backend, "a")  # type: ignore[arg-type]


def test_forked_child_locks_for_itself(etcd: Cluster, backend: EtcdBackend, prefix: str) -> None:
    with worker(fork, etcd.url, prefix) as parent:
        assert "'kept': True" in parent.hear()
        assert len(holders(backend, "a")) == 1  # type: ignore[arg-type]
        parent.say("go on")
        assert parent.result() == (False, True)


def test_sections_of_many_processes_are_apart_in_the_order_of_tokens_and_of_arrival(
    etcd: Cluster, prefix: str, tmp_path: Path
) -> None:
    path = tmp_path / "history"
    processes.run(work, [(etcd.url, prefix, str(path), 40, {})] * 5)
    history = read(path)
    assert len(history) == 200
    assert any(section.queued for section in history), "nobody had to wait: nothing was tested"
    assert overlaps(history) == []
    assert repeated_tokens(history) == []
    assert overtaken(history) == []


def test_processes_and_members_that_stop_and_die_make_no_overlap(
    etcd: Cluster, backend: EtcdBackend, prefix: str, tmp_path: Path
) -> None:
    path = tmp_path / "history"
    with ExitStack() as stack:
        arguments = (etcd.url, prefix, str(path), 100_000, {"ttl": 2.0}, 0.02)
        workers = [stack.enter_context(processes.worker(work, *arguments)) for _ in range(4)]
        for number in range(3):
            stopped = insist(lambda: inside(backend, workers))  # type: ignore[arg-type]
            stopped.pause()
            etcd.leader().kill() if number == 1 else threading.Event().wait(3.0)
            stopped.resume()
        dead = insist(lambda: inside(backend, workers))  # type: ignore[arg-type]
        dead.kill()
        before = len(read(path))
        until(lambda: len(read(path)) >= before + 30)
    history = read(path)
    assert overlaps(history) == []
    assert repeated_tokens(history) == []
