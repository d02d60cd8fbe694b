"""ZooKeeper sessions expire, leaders die and networks fail: no lock has two holders, and nothing is left."""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient, KazooState
from kazoo.protocol.serialization import Exists

from dlock_core import AcquireTimeout, AsyncLock, BackendUnavailable, LeaseLost, Lock, Released, connect
from dlock_core.backends.zookeeper.backend import ZooKeeperBackend
from dlock_core.backends.zookeeper.connection import KazooReply
from dlock_core.leases.acquisition import new_request
from dlock_core.options import LockOptions
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.testing.contract.harness import Harness, Tasks
from tests import processes, servers
from tests.conftest import start
from tests.faults.history import overlaps, overtaken, read, repeated_tokens, work
from tests.faults.holders import fork, fork_out_of_block, hold, wait
from tests.faults.looking import holders, is_untouched, waiters
from tests.processes import worker
from tests.proxy import Proxy
from tests.servers import Server
from tests.waiting import until
from tests.zookeeper_servers import Ensemble, ensemble, zookeeper

LIMIT = 1.5
"""Seconds that one request may take in these tests. A second try has to succeed in them, however busy the machine."""
SHORT_SESSION = 2.0
WITHIN = 30.0
SECRET = "hunter2"
CREATE = b"x-"
"""Part of the name of an exclusive request's node: in the request that creates it, and in each later one about it."""


@pytest.fixture(scope="module")
def server(servers_directory: Path) -> Iterator[Server]:
    yield from start(lambda: zookeeper(servers_directory / "zookeeper-faults"))


@pytest.fixture(scope="module")
def three(servers_directory: Path) -> Iterator[Ensemble]:
    yield from start(lambda: ensemble(servers_directory / "zookeepers-faults"))


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def direct(server: Server, prefix: str) -> Iterator[ZooKeeperBackend]:
    """Yield the store over a good network."""
    backend = ZooKeeperBackend.from_url(server.url, prefix=prefix)
    yield backend
    backend.close()


@pytest.fixture
def session() -> float:
    """Return the seconds for which a session outlives its connection: a slow machine needs several to reconnect."""
    return 20.0


wait_for_its_end = pytest.mark.parametrize("session", [SHORT_SESSION])


@pytest.fixture
def backend(proxy: Proxy, prefix: str, session: float) -> Iterator[ZooKeeperBackend]:
    """Yield the store as its users reach it: through the proxy."""
    url = f"zookeeper://127.0.0.1:{proxy.port}"
    backend = ZooKeeperBackend.from_url(url, prefix=prefix, timeout=LIMIT, session=session)
    yield backend
    backend.close()


@pytest.fixture
def replicated(three: Ensemble, prefix: str) -> Iterator[ZooKeeperBackend]:
    """Yield a store of three servers, all of which run again after the test."""
    backend = ZooKeeperBackend.from_url(three.url, prefix=prefix, timeout=LIMIT, session=20.0)
    yield backend
    for member in three.members:
        member.resume()
        if member._running.poll() is not None:
            member.start()
    backend.close()
    three.wait()


def test_connection_that_breaks_at_once_is_waited_for_again(server: Server, prefix: str) -> None:
    server.stop()
    backend = ZooKeeperBackend.from_url(server.url, prefix=prefix, timeout=WITHIN)
    with ThreadPoolExecutor(1) as pool:
        acquire = pool.submit(Lock(backend, "order:42", wait=0).acquire)
        until(lambda: backend._session._waiting)
        backend._session._changed(KazooState.CONNECTED)  # By the time the caller sees it, it is over.
        backend._session._changed(KazooState.SUSPENDED)
        server.start()
        assert acquire.result().release() is Released.RELEASED
    backend.close()


def warm_up(harness: Harness) -> None:
    """Open a session, so that the next request is the acquire itself."""
    harness.do(harness.acquire("warm-up").release)


def expire(backend: ZooKeeperBackend) -> None:
    """End the session on the server, as if the client had been silent for too long."""
    kazoo = backend._session._kazoo
    twin = KazooClient(f"127.0.0.1:{kazoo._connection._socket.getpeername()[1]}", client_id=kazoo.client_id)
    twin.start(60)
    twin.stop()
    twin.close()


def test_holder_whose_session_expired_has_lost_its_lease_and_is_told_once(
    harness: Harness, backend: ZooKeeperBackend
) -> None:
    told: list[bool] = []
    lease = harness.acquire("a", on_lost=lambda: told.append(True))
    pending = harness.queue_up("a", ttl=60)
    expire(backend)
    harness.until(lambda: told)
    assert lease.lost
    with pytest.raises(LeaseLost):
        harness.do(lease.renew)
    assert harness.keep(pending.result(WITHIN)).token > lease.token
    assert harness.do(lease.release) is Released.STOLEN
    assert told == [True]


def test_waiter_whose_session_expired_queues_again(
    harness: Harness, backend: ZooKeeperBackend, direct: ZooKeeperBackend
) -> None:
    first = Lock(direct, "a").acquire()
    pending = harness.queue_up("a")
    before = waiters(direct, "a")
    expire(backend)
    until(lambda: waiters(direct, "a") == before)
    first.release()
    assert pending.result(WITHIN).token > first.token


def test_connection_that_is_suspended_is_unknown_and_not_lost(harness: Harness, proxy: Proxy) -> None:
    told: list[bool] = []
    lease = harness.acquire("a", renew=False, on_lost=lambda: told.append(True))
    before = runs_out(lease)
    proxy.refuse()
    with pytest.raises(BackendUnavailable):
        harness.do(lease.renew)
    assert not lease.lost
    proxy.forward()
    harness.until(lambda: is_done(harness, lease.renew))
    assert runs_out(lease) > before + 0.001
    assert told == []


@wait_for_its_end
def test_lease_is_lost_in_time_when_the_store_is_deaf(harness: Harness, proxy: Proxy, direct: ZooKeeperBackend) -> None:
    """It is lost before ZooKeeper may grant the lock again; the callback's thread may run later on a busy machine."""
    told: list[str] = []
    lease = harness.acquire("a", on_lost=lambda: told.append("lost"))
    proxy.deaf()
    with Lock(direct, "a", wait=WITHIN) as next_lease:
        assert lease.lost
        assert next_lease.token > lease.token
    harness.until(lambda: told)
    proxy.forward()


def test_lease_is_sure_for_no_longer_than_the_session_that_the_servers_grant(server: Server, prefix: str) -> None:
    """The servers grant at most 60 seconds, of which two thirds are certain."""
    store = connect(server.url, prefix=prefix, session=300.0)
    with Lock(store, "a", ttl=600, renew=False) as lease:
        assert 20 < lease.remaining() < 40
    store.close()


@pytest.mark.parametrize("fault", ["drop_reply", "cut_reply", "cut_request"])
def test_creation_whose_reply_was_lost_is_one_grant(
    harness: Harness, proxy: Proxy, direct: ZooKeeperBackend, fault: str
) -> None:
    warm_up(harness)
    broken = getattr(proxy, fault)(matching=CREATE)
    lease = harness.acquire("a")
    assert broken.happened
    assert holders(direct, "a") == [lease.holder]
    assert waiters(direct, "a") == []
    assert harness.do(lease.release) is Released.RELEASED
    assert is_untouched(direct, "a")


def test_request_that_a_signal_handler_cut_off_before_it_was_sent_holds_up_no_later_one(
    harness: Harness, direct: ZooKeeperBackend, backend: ZooKeeperBackend
) -> None:
    """kazoo appends a request to its queue, and then wakes its thread with one byte, which an interrupt can prevent."""
    warm_up(harness)
    kazoo = backend._session._kazoo
    kazoo._queue.append((Exists("/", None), KazooReply()))
    lease = harness.acquire("a", wait=0)
    assert harness.do(lease.release) is Released.RELEASED
    assert is_untouched(direct, "a")


def test_one_release_wakes_hundreds_of_waiters_of_a_process(
    direct: ZooKeeperBackend, backend: ZooKeeperBackend
) -> None:
    """kazoo's thread then sends hundreds of requests to itself, more than its wake-up socket takes."""

    async def main() -> None:
        async with asyncio.timeout(WITHIN):
            first = await asyncio.to_thread(Lock(direct, "a", ttl=60).acquire)
            readers = [
                asyncio.create_task(AsyncLock(backend, "a", shared=True, ttl=60, wait=WITHIN).acquire())
                for _ in range(400)
            ]
            while len(await asyncio.to_thread(waiters, direct, "a")) < len(readers):
                await asyncio.sleep(0.02)
            await asyncio.to_thread(first.release)
            for lease in await asyncio.gather(*readers):
                await lease.release()

    asyncio.run(main())
    assert is_untouched(direct, "a")


def test_thread_that_looks_ended_to_python_keeps_its_session(
    harness: Harness, backend: ZooKeeperBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler that raises in `Thread.is_alive` makes it return False from then on (CPython before 3.13)."""
    lease = harness.acquire("a")
    before = backend._session.id
    monkeypatch.setattr(backend._session._kazoo._connection._connection_routine, "is_alive", lambda: False)
    harness.do(harness.acquire("b").release)
    assert backend._session.id == before
    assert harness.do(lease.release) is Released.RELEASED


def test_session_outlives_the_workers_that_kazoo_stops_as_the_interpreter_exits(
    harness: Harness, backend: ZooKeeperBackend
) -> None:
    """Hooks of `atexit` that were registered earlier run later, and may still use their leases."""
    lease = harness.acquire("a")
    before = backend._session.id
    backend._session._kazoo.handler.stop()
    harness.do(harness.acquire("b").release)
    assert backend._session.id == before
    assert harness.do(lease.release) is Released.RELEASED


@pytest.mark.parametrize("fault", ["drop_reply", "cut_reply"])
def test_release_whose_reply_was_lost_is_a_release(
    harness: Harness, proxy: Proxy, direct: ZooKeeperBackend, fault: str
) -> None:
    lease = harness.acquire("a", renew=False)
    broken = getattr(proxy, fault)(matching=CREATE)
    assert harness.do(lease.release) is Released.RELEASED
    assert broken.happened
    assert is_untouched(direct, "a")


def test_renewal_whose_reply_was_lost_is_no_loss(harness: Harness, proxy: Proxy) -> None:
    lease = harness.acquire("a", renew=False)
    lost = proxy.drop_reply(matching=CREATE)
    with pytest.raises(BackendUnavailable):
        harness.do(lease.renew)
    assert lost.happened
    harness.until(lambda: is_done(harness, lease.renew))
    assert not lease.lost


def test_attempt_that_failed_leaves_no_node_once_the_network_is_back(
    harness: Harness, proxy: Proxy, direct: ZooKeeperBackend
) -> None:
    """Its request may have been sent, and its session lives on, so only we can remove its node."""
    warm_up(harness)
    held = proxy.hold_request(matching=CREATE)
    with pytest.raises(BackendUnavailable):
        harness.acquire("a", wait=0)
    assert held.happened
    held.release()
    assert Lock(direct, "a", wait=WITHIN).acquire().release() is Released.RELEASED
    until(lambda: is_untouched(direct, "a"))


def test_cancelled_attempt_leaves_no_node(harness: Harness, proxy: Proxy, direct: ZooKeeperBackend) -> None:
    if not isinstance(harness, Tasks):
        pytest.skip("threads cannot be cancelled")
    warm_up(harness)
    held = proxy.hold_reply(matching=CREATE)
    pending = harness.start(harness.lock("a").acquire)
    held.wait()
    pending.cancel()
    held.release()
    with pytest.raises(CancelledError):
        pending.result(WITHIN)
    until(lambda: is_untouched(direct, "a"))


def test_waiter_survives_a_reset_of_the_connection_and_keeps_its_place(
    harness: Harness, proxy: Proxy, direct: ZooKeeperBackend
) -> None:
    first = harness.acquire("a")
    line = [harness.queue_up("a") for _ in range(3)]
    order = waiters(direct, "a")
    proxy.cut()
    got = [first]
    for pending in line:
        harness.do(got[-1].release)
        got.append(pending.result(WITHIN))
    assert [lease.holder for lease in got[1:]] == order


def test_release_is_repeated_for_a_holder_who_could_not_reach_the_store(
    harness: Harness, proxy: Proxy, direct: ZooKeeperBackend
) -> None:
    lease = harness.acquire("a", renew=False)
    proxy.refuse()
    with pytest.raises(BackendUnavailable):
        harness.do(lease.release)
    proxy.forward()
    until(lambda: is_untouched(direct, "a"))
    assert harness.do(lease.release) is Released.RELEASED


@pytest.mark.parametrize("how", ["deaf", "refuse"])
@pytest.mark.parametrize("wait", [0, 1.0])
def test_store_that_does_not_answer_is_given_up_in_time(harness: Harness, proxy: Proxy, how: str, wait: float) -> None:
    warm_up(harness)
    getattr(proxy, how)()
    began = clock()
    with pytest.raises(BackendUnavailable):
        harness.acquire("a", wait=wait)
    assert clock() - began < wait + 3 * LIMIT + 5, "a last request, one more for a broken one, and a clean-up"
    proxy.forward()


@pytest.mark.parametrize("how", ["deaf", "refuse"])
def test_waiter_whose_store_goes_away_gives_up_in_time(harness: Harness, proxy: Proxy, how: str) -> None:
    harness.acquire("a")
    pending = harness.queue_up("a", wait=1.0)
    getattr(proxy, how)()
    began = clock()
    with pytest.raises((BackendUnavailable, AcquireTimeout)):
        pending.result(WITHIN)
    assert clock() - began < 1.0 + 2 * LIMIT + 5
    proxy.forward()


def test_servers_that_are_not_there_are_told_at_once_and_all_are_named(prefix: str) -> None:
    ports = [servers.free_port() for _ in range(3)]
    url = "zookeeper://app:" + SECRET + "@" + ",".join(f"127.0.0.1:{port}" for port in ports)
    store = ZooKeeperBackend.from_url(url, prefix=prefix, timeout=LIMIT)
    with pytest.raises(BackendUnavailable, match=str(ports[2])) as caught:
        Lock(store, "a", wait=0).acquire()
    assert SECRET not in str(caught.value)
    began = clock()
    store.close()
    assert clock() - began < 5


def test_restart_that_kept_its_data_ends_no_lease(server: Server, prefix: str) -> None:
    store = ZooKeeperBackend.from_url(server.url, prefix=prefix, session=WITHIN)
    lease = Lock(store, "a", ttl=2 * WITHIN).acquire()
    server.restart()
    until(lambda: is_renewed(lease))
    assert not lease.lost
    assert Lock(store, "b").try_acquire().release() is Released.RELEASED  # type: ignore[union-attr]
    assert lease.release() is Released.RELEASED
    store.close()


def test_restart_that_lost_its_data_ends_the_lease_and_the_store_is_found_again(server: Server, prefix: str) -> None:
    """The servers refuse clients that have seen later data than theirs; kazoo would retry forever."""
    store = ZooKeeperBackend.from_url(server.url, prefix=prefix, session=SHORT_SESSION)
    lease = Lock(store, "a").acquire()
    server.restart(keep_data=False)
    until(lambda: lease.lost)
    with Lock(store, "a", wait=WITHIN) as next_lease:
        assert lease.release() is Released.STOLEN
        assert next_lease.remaining() > 0
    store.close()


def is_renewed(lease: Any) -> bool:
    try:
        lease.renew()
    except BackendUnavailable:
        return False
    return True


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_lease_survives_a_leader_that_is_killed_or_stopped(
    three: Ensemble, replicated: ZooKeeperBackend, fault: str
) -> None:
    lease = Lock(replicated, "a").acquire()
    getattr(three.leader, fault)()
    before = runs_out(lease)
    until(lambda: runs_out(lease) > before + 0.01)
    assert not lease.lost
    assert lease.release() is Released.RELEASED


def test_lease_survives_the_member_it_is_connected_to_being_stopped(
    three: Ensemble, replicated: ZooKeeperBackend
) -> None:
    lease = Lock(replicated, "a", renew=False).acquire()
    before = runs_out(lease)
    port = replicated._session._kazoo._connection._socket.getpeername()[1]
    next(member for member in three.members if member.port == port).pause()
    with pytest.raises(BackendUnavailable):
        lease.renew()
    until(lambda: is_renewed(lease))
    assert runs_out(lease) > before + 0.01
    assert lease.release() is Released.RELEASED


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_waiters_survive_a_leader_that_is_killed_or_stopped_and_keep_their_order(
    three: Ensemble, replicated: ZooKeeperBackend, fault: str
) -> None:
    first = Lock(replicated, "a").acquire()
    got: list[Any] = []

    def take() -> None:
        lease = Lock(replicated, "a", wait=None).acquire()
        got.append(lease.holder)
        lease.release()

    threads = []
    for number in range(3):
        threads.append(threading.Thread(target=take))
        threads[-1].start()
        until(lambda number=number: len(waiters(replicated, "a")) > number)
    order = waiters(replicated, "a")
    getattr(three.leader, fault)()
    until(lambda: is_released(first))
    for thread in threads:
        thread.join(WITHIN)
    assert got == order


def is_released(lease: Any) -> bool:
    try:
        return lease.release() is Released.RELEASED
    except BackendUnavailable:
        return False


def test_majority_that_is_gone_grants_nothing_and_is_waited_for_in_time(
    three: Ensemble, replicated: ZooKeeperBackend
) -> None:
    Lock(replicated, "warm-up").acquire().release()
    for member in three.followers:
        member.kill()
    began = clock()
    with pytest.raises(BackendUnavailable):
        Lock(replicated, "a", wait=1.0).acquire()
    assert clock() - began < 1.0 + 3 * LIMIT + 5


def test_killed_holder_is_followed_within_its_session(server: Server, direct: ZooKeeperBackend, prefix: str) -> None:
    url = f"{server.url}"
    with worker(hold_short, url, prefix, {"ttl": 60}) as holder:
        token = holder.hear()
        holder.kill()
        with Lock(direct, "a", wait=WITHIN) as lease:
            assert lease.token > token
    assert is_untouched(direct, "a")


def test_killed_waiter_is_no_obstacle(server: Server, direct: ZooKeeperBackend, prefix: str) -> None:
    first = Lock(direct, "a").acquire()
    with worker(wait_short, server.url, prefix) as waiter:
        until(lambda: waiters(direct, "a"))
        waiter.kill()
    first.release()
    with Lock(direct, "a", wait=WITHIN):
        pass
    assert is_untouched(direct, "a")


def hold_short(link: processes.Link, url: str, prefix: str, options: dict[str, Any]) -> None:
    lease = Lock(connect(url, prefix=prefix, session=SHORT_SESSION), "a", **options).acquire()
    link.say(lease.token)
    link.hear()


def wait_short(link: processes.Link, url: str, prefix: str) -> None:
    Lock(connect(url, prefix=prefix, session=SHORT_SESSION), "a", wait=None).acquire()
    link.hear()


def test_stopped_process_sees_at_once_that_it_lost_its_lease(
    server: Server, direct: ZooKeeperBackend, prefix: str
) -> None:
    with worker(hold_and_tell, server.url, prefix) as holder:
        token = holder.hear()
        holder.pause()
        with Lock(direct, "a", wait=WITHIN) as lease:
            assert lease.token > token
            holder.resume()
            holder.say("lost?")
            assert holder.hear() is True


def hold_and_tell(link: processes.Link, url: str, prefix: str) -> None:
    lease = Lock(connect(url, prefix=prefix, session=SHORT_SESSION), "a", ttl=60).acquire()
    link.say(lease.token)
    link.hear()
    link.say(lease.lost)


def test_child_has_a_session_of_its_own_and_its_parents_lease_lives_on(
    server: Server, direct: ZooKeeperBackend, prefix: str
) -> None:
    with worker(fork, server.url, prefix) as parent:
        found = parent.hear()
        assert "'released': 'NotHeld'" in found
        assert "'taken': None" in found
        assert "'kept': True" in found
        parent.say("go on")
        assert parent.result() == (False, True)


def test_lease_that_a_child_does_not_renew_runs_out_as_any_other(server: Server, prefix: str) -> None:
    """A thread of the process ends it, and a fork does not copy threads."""
    with worker(fork_and_let_run_out, server.url, prefix) as parent:
        assert parent.result() == b"got it again"


def fork_and_let_run_out(link: processes.Link, url: str, prefix: str) -> bytes:
    store = connect(url, prefix=prefix)
    with Lock(store, "of the parent"):
        ours, theirs = os.pipe()
        if os.fork() == 0:
            lease = Lock(store, "a", ttl=0.2, renew=False).acquire()
            until(lambda: lease.lost)
            Lock(store, "a", wait=5.0).acquire()
            os.write(theirs, b"got it again")
            os._exit(0)
        os.close(theirs)
        return os.read(ours, 100)


def test_child_walks_out_of_its_parents_block_and_releases_nothing(
    server: Server, direct: ZooKeeperBackend, prefix: str
) -> None:
    with worker(fork_out_of_block, server.url, prefix) as parent:
        for _ in range(2):
            holder = parent.hear()
            assert holders(direct, "a") == [holder]
            parent.say("go on")
        assert parent.result() == "done"


def test_holder_in_another_process_is_seen_and_waited_for(
    server: Server, direct: ZooKeeperBackend, prefix: str
) -> None:
    with worker(hold, server.url, prefix, {}) as holder:
        token = holder.hear()
        with worker(wait, server.url, prefix) as waiter:
            until(lambda: waiters(direct, "a"))
            holder.say("release")
            assert holder.hear() == "released"
            assert waiter.hear() > token
            waiter.say("done")
            waiter.result()


def test_sections_of_many_processes_are_apart_in_the_order_of_tokens_and_of_arrival(
    three: Ensemble, prefix: str, tmp_path: Path
) -> None:
    path = tmp_path / "history"
    processes.run(work, [(three.url, prefix, str(path), 40, {})] * 5)
    history = read(path)
    assert len(history) == 200
    assert any(section.queued for section in history), "nobody had to wait: nothing was tested"
    assert overlaps(history) == []
    assert repeated_tokens(history) == []
    assert overtaken(history) == []


def test_processes_that_are_stopped_and_killed_never_overlap_with_those_that_follow(
    server: Server, direct: ZooKeeperBackend, prefix: str, tmp_path: Path
) -> None:
    """The current holder is stopped for longer than its session several times; then one holder is killed."""
    path = tmp_path / "history"
    arguments = (f"{server.url}", prefix, str(path), 100_000, {}, 0.02)
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(work_short, *arguments)) for _ in range(4)]
        for _ in range(3):
            one = inside(direct, workers)
            one.pause()
            threading.Event().wait(1.0)
            one.resume()
        one = inside(direct, workers)
        one.kill()
        workers.remove(one)
        before = len(read(path))
        until(lambda: len(read(path)) >= before + 20)
        for one in workers:
            one.kill()
    history = read(path)
    assert overlaps(history) == []
    assert repeated_tokens(history) == []


def work_short(link: processes.Link, url: str, prefix: str, *rest: Any) -> None:
    """Run `work` with very short sessions."""
    import tests.faults.history as module

    real = module.connect
    module.connect = lambda url, **options: real(url, session=0.6, **options)  # type: ignore[assignment]
    work(link, url, prefix, *rest)


def inside(store: ZooKeeperBackend, workers: list[processes.Worker]) -> processes.Worker:
    """Return the worker that holds the lock now; that it may be another a moment later does no harm."""
    by_pid = {one.process.pid: one for one in workers}
    while True:
        (state,) = run(store.inspect(BLOCKING, "a"))
        for holder in state.holders:
            pid = json.loads(holder.owner)["pid"]
            if pid in by_pid:
                return by_pid[pid]


def test_store_with_a_password_is_closed_to_others_and_shows_no_secret(
    server: Server, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = f"127.0.0.1:{server.port}/closed"
    store = connect(f"zookeeper://app:{SECRET}@{where}", prefix=prefix)
    with caplog.at_level(logging.DEBUG), Lock(store, "a"):
        for url in (f"zookeeper://{where}", f"zookeeper://app:wrong{SECRET}@{where}"):
            stranger = connect(url, prefix=prefix)
            with pytest.raises(BackendUnavailable, match="refused our credentials") as caught:
                Lock(stranger, "a", wait=None).acquire()
            error: Any = caught.value
            while error is not None:
                assert SECRET not in f"{error!s} {error!r} {vars(error)}"
                error = error.__cause__ or error.__context__
            stranger.close()
    store.close()
    assert SECRET not in caplog.text
    assert SECRET not in f"{store!r} {vars(store)}"


def test_nothing_is_left_over_after_all_of_it(
    harness: Harness, proxy: Proxy, backend: ZooKeeperBackend, direct: ZooKeeperBackend, server: Server, prefix: str
) -> None:
    for fault in (proxy.drop_reply, proxy.cut_reply, proxy.cut_request):
        for own_node in (1, 2, 3):
            fault(own_node, matching=CREATE)
            first = harness.acquire("a")
            pending = harness.queue_up("a")
            with pytest.raises((AcquireTimeout, BackendUnavailable)):
                harness.acquire("a", wait=0.02)
            until(lambda first=first: is_done(harness, first.release))
            until(lambda pending=pending: is_done(harness, pending.result(WITHIN).release))
    until(lambda: is_untouched(direct, "a"))


def runs_out(lease: Any) -> float:
    """Return the time at which the lease is lost unless it is renewed."""
    return clock() + float(lease.remaining())


def is_done(harness: Harness, step: Any) -> bool:
    try:
        harness.do(step)
    except BackendUnavailable:
        return False
    return True


def test_nodes_of_locks_that_nobody_uses_are_removed_by_the_servers(
    direct: ZooKeeperBackend, server: Server, prefix: str
) -> None:
    for number in range(20):
        Lock(direct, f"a:{number}").acquire().release()
    kazoo = KazooClient(f"127.0.0.1:{server.port}")
    kazoo.start()
    try:
        until(lambda: kazoo.get_children(f"/{prefix}") == [])
    finally:
        kazoo.stop()
        kazoo.close()
    assert Lock(direct, "a:1").acquire().release() is Released.RELEASED


def test_mark_of_a_raised_token_outlives_the_lock_and_raises_the_next(
    direct: ZooKeeperBackend, server: Server, prefix: str
) -> None:
    request = new_request("a", LockOptions(30.0, 0.0))
    raised = request._replace(floor=1 << 62)
    granted: Any = run(direct.try_acquire(BLOCKING, request))
    again: Any = run(direct.try_acquire(BLOCKING, raised))
    assert granted.token < 1 << 62
    assert again.token == (1 << 62) + 1
    assert run(direct.release(BLOCKING, request, again)) is Released.RELEASED
    with Lock(direct, "a") as lease:
        assert lease.token > again.token
