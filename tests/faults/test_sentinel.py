"""A master dies, stops or steps down under Sentinels: clients follow in time, use no replica, and report losses."""

import contextlib
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import trustme
from django.test import override_settings

from dlock_core import BackendUnavailable, DLockError, LeaseLost, Lock, MultiLock, Released, connect
from dlock_core.backend import Backend
from dlock_core.runtime import clock
from dlock_core.testing.contract.harness import Harness, Tasks, Threads
from tests import processes, servers
from tests.django_dlock.test_fencing import Adder, value
from tests.faults.history import WithClock, _section, overlaps, read, repeated_tokens
from tests.faults.looking import holders, is_untouched
from tests.faults.test_redlock import insist
from tests.outcomes import outcome
from tests.processes import Link
from tests.redis_sentinel import HOST, SERVICE, Group, group
from tests.servers import Server
from tests.testapp.models import Counter
from tests.waiting import until

SECRET, OTHER = "s3cr3t/p:ss@w", "hunter2"
QUOTED = "s3cr3t%2Fp%3Ass%40w"
WAIT = 60.0


@pytest.fixture(scope="module")
def steady(servers_directory: Path) -> Iterator[Group]:
    """Yield a group whose master stays the same; the tests leave it in order."""
    with group(servers_directory / "sentinel-steady") as shop:
        yield shop


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Group]:
    """Yield a group whose master may be lost."""
    with group(tmp_path / "sentinel") as shop:
        yield shop


@pytest.fixture
def shop(request: pytest.FixtureRequest) -> Group:
    """Return the group behind the store: `steady`, unless a test chooses another."""
    shop: Group = request.getfixturevalue(getattr(request, "param", "steady"))
    return shop


@pytest.fixture
def backend(shop: Group, prefix: str) -> Iterator[Backend]:
    yield from store(shop.url, prefix)


def store(url: str, prefix: str, **options: Any) -> Iterator[Backend]:
    backend = connect(url, prefix=prefix, **options)
    yield backend
    backend.close()


@pytest.fixture
def copied(harness: Harness, shop: Group, prefix: str) -> Iterator[Harness]:
    """Yield a harness of the same store whose grants wait for a replica."""
    for backend in store(shop.url, prefix, replicas=1):
        copied = type(harness)(backend)
        yield copied
        copied.close()


threads = pytest.mark.parametrize("harness", [Threads], indirect=True)
tasks = pytest.mark.parametrize("harness", [Tasks], indirect=True)
moving = pytest.mark.parametrize("shop", ["fresh"], indirect=True)


def questions(shop: Group, server: Server) -> int:
    """Return how many scripts a server has been asked to run."""
    with shop.client(server) as client:
        stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


def stubborn(shop: Group) -> Server:
    """Make the master refuse to step down; otherwise the Sentinels would demote it after about ten seconds."""
    master = shop.master()
    shop.ask(master, "ACL", "SETUSER", "default", "-slaveof", "-replicaof", "-client|kill")
    return master


@moving
def test_lease_and_waiter_survive_the_death_of_the_master_which_is_not_asked_when_it_is_back(
    harness: Harness, copied: Harness, shop: Group
) -> None:
    lease = copied.acquire("a", ttl=WAIT)
    pending = harness.queue_up("a", wait=WAIT)
    old = shop.master()
    new = shop.fail_over()
    assert copied.holders("a") == [lease.holder]
    assert harness.try_acquire("a") is None
    insist(lambda: copied.do(lease.renew))
    assert not lease.lost
    old.start()
    shop.ask(old, "REPLICAOF", HOST, new.port)  # the Sentinels would also do it, seconds later
    shop.settle()
    assert insist(lambda: copied.do(lease.release)) is Released.RELEASED
    later = pending.result(WAIT)
    assert later.token > lease.token
    assert harness.do(later.release) is Released.RELEASED
    assert questions(shop, old) == 0


@moving
@tasks
def test_lock_that_is_asked_for_while_there_is_no_master_is_had_from_the_next_one(
    harness: Harness, shop: Group
) -> None:
    token = harness.acquire("a").token
    shop.master().kill()
    pending = harness.start(harness.lock("b", wait=WAIT).acquire)
    harness.observed.until(lambda calls: any(call.name == "b" for call in calls))
    shop.fail_over()
    assert harness.keep(pending.result(WAIT)).token > token


@moving
@threads
def test_master_that_stands_still_is_left_for_the_next_one_and_not_asked_when_it_goes_on(
    harness: Harness, copied: Harness, shop: Group
) -> None:
    """It still considers itself the master, and the connections to it are open."""
    lease = copied.acquire("a", ttl=WAIT)
    pending = harness.queue_up("a", wait=WAIT)
    old = stubborn(shop)
    shop.fail_over(pause=True)
    insist(lambda: copied.do(lease.renew))
    old.resume()
    before = questions(shop, old)
    assert harness.try_acquire("a") is None
    assert insist(lambda: copied.do(lease.release)) is Released.RELEASED
    assert harness.do(pending.result(WAIT).release) is Released.RELEASED
    assert harness.acquire("a").token > lease.token
    assert questions(shop, old) - before <= 1, "a question of before may have been under way to it"


@moving
@threads
def test_master_that_was_replaced_in_good_order_is_left_while_it_still_takes_itself_for_one(
    harness: Harness, shop: Group
) -> None:
    harness.do(harness.acquire("a").release)
    old = stubborn(shop)
    shop.ask(shop.sentinels[0], "SENTINEL", "FAILOVER", SERVICE)
    new = shop.moved(old)
    before = questions(shop, new)

    def is_held_there() -> bool:
        harness.do(harness.acquire("a", wait=0).release)
        return questions(shop, new) > before

    until(is_held_there)
    last = questions(shop, old)
    for _ in range(5):
        harness.do(harness.acquire("a", wait=0).release)
    assert questions(shop, old) == last
    assert shop.role(old) == b"master"


@pytest.mark.parametrize("read_only", ["yes", "no"])
def test_replica_answers_nothing_over_the_connections_of_a_master_that_it_was(
    harness: Harness, shop: Group, read_only: str
) -> None:
    """It still knows the holders and waiters, could reply without a write, and may even be a writable replica."""
    lease = harness.acquire("a", ttl=WAIT, renew=False)
    pending, master = harness.queue_up("a"), shop.master()
    shop.ask(master, "CONFIG", "SET", "replica-read-only", read_only)
    shop.ask(master, "REPLICAOF", HOST, servers.free_port())
    try:
        for step in (
            *(harness.lock("a", wait=wait).acquire for wait in (0, 0.3)),
            harness.lock("a").try_acquire,
            lease.renew,
            lease.release,
        ):
            with pytest.raises(BackendUnavailable, match="not a master, but a replica"):
                harness.do(step)
        with pytest.raises(BackendUnavailable, match="not a master, but a replica"):
            harness.call_store("inspect", "a")
        assert not lease.lost
        assert not pending.done()
    finally:
        shop.ask(master, "REPLICAOF", "NO", "ONE")
        shop.ask(master, "CONFIG", "SET", "replica-read-only", "yes")
        shop.settle()
    assert insist(lambda: harness.do(lease.release)) is Released.RELEASED
    assert pending.result(WAIT).token > lease.token


def forget(shop: Group) -> None:
    """Cut the replica off from its master."""
    shop.ask(shop.replicas()[0], "REPLICAOF", HOST, servers.free_port())


@moving
@tasks
def test_lease_that_the_replica_had_not_heard_of_is_lost_and_told(harness: Harness, shop: Group) -> None:
    told: list[bool] = []
    forget(shop)
    lease = harness.acquire("a", ttl=WAIT, on_lost=lambda: told.append(True), renew=False)
    shop.fail_over(patience=2000)
    other = harness.acquire("a", wait=WAIT)
    assert other.token > lease.token
    with pytest.raises(LeaseLost, match="another holder, or lost it"):
        insist(lambda: harness.do(lease.renew))
    until(lambda: told)
    assert told == [True]
    assert lease.lost
    assert harness.do(lease.release) is not Released.RELEASED
    assert harness.holders("a") == [other.holder]


def test_transaction_under_a_lease_that_a_failover_forgot_is_refused(fresh: Group, use_database: Any) -> None:
    """The holder does not know of its loss, because by its own clock it holds; the database refuses it."""
    alias = use_database("default")
    Counter.objects.using(alias).create(name="a")
    settings = {"default": {"BACKEND": fresh.url, "TTL": WAIT, "WAIT": WAIT}}
    with override_settings(DLOCK=settings), Adder(alias, renew=False) as stale, Adder(alias) as next_one:
        forget(fresh)
        stale.take()
        fresh.fail_over(patience=2000)
        assert next_one.take() > stale.lease.token
        assert not stale.lease.lost
        assert next_one.start().result(WAIT) == 0
        next_one.finish()
        refused = outcome(stale.start())
        stale.rollback()
        next_one.release()
        stale.release()
    assert (refused.token, refused.highest) == (stale.lease.token, next_one.lease.token)  # type: ignore[union-attr]
    assert value(alias) == 1


@threads
def test_grant_that_no_replica_has_is_not_told_and_given_back(harness: Harness, copied: Harness, shop: Group) -> None:
    (replica,) = shop.replicas()
    replica.kill()
    try:
        for step in (copied.lock("a").try_acquire, copied.lock("a", wait=0).acquire):
            with pytest.raises(BackendUnavailable, match="0 of at least 1 replicas"):
                copied.do(step)
            until(lambda: is_untouched(harness.store, "a"))  # type: ignore[arg-type]
        with pytest.raises(BackendUnavailable, match="0 of at least 1 replicas"):
            MultiLock(copied.store, ["a", "b"], wait=0).acquire()
        until(lambda: is_untouched(harness.store, "a"))  # type: ignore[arg-type]
        until(lambda: is_untouched(harness.store, "b"))  # type: ignore[arg-type]
        first = harness.acquire("a")
        pending = copied.queue_up("a", wait=WAIT)
        before = len(copied.calls_of("try_acquire", "a"))
        harness.do(first.release)
        copied.observed.until(lambda _: pending.done() or len(copied.calls_of("try_acquire", "a")) > before)
        assert not pending.done()
    finally:
        replica.start()
    assert pending.result(WAIT).token > first.token
    shop.settle()


@pytest.mark.parametrize("how", ["kill", "pause"])
def test_sentinels_that_do_not_answer_are_passed_over(shop: Group, prefix: str, how: str) -> None:
    for sentinel in shop.sentinels[:2]:
        getattr(sentinel, how)()
    try:
        for backend in store(shop.url, prefix):
            with Lock(backend, "a", wait=WAIT if how == "pause" else 0) as lease:
                assert holders(backend, "a") == [lease.holder]  # type: ignore[arg-type]
    finally:
        revive(shop)


@pytest.mark.parametrize(("harness", "how"), [(Threads, "pause"), (Tasks, "kill")], indirect=["harness"])
def test_sentinels_that_are_all_down_are_named_in_time_and_no_holder_minds(
    harness: Harness, shop: Group, prefix: str, how: str
) -> None:
    lease = harness.acquire("a")
    for sentinel in shop.sentinels:
        getattr(sentinel, how)()
    began = clock()
    try:
        for backend in store(shop.url, prefix, timeout=1.0):
            later = type(harness)(backend)
            for acquire in (later.acquire, later.try_acquire):
                with pytest.raises(BackendUnavailable, match=f"master of '{SERVICE}'") as caught:
                    acquire("b", wait=0.2)
                assert all(f"{HOST}:{sentinel.port}: " in str(caught.value) for sentinel in shop.sentinels)
                assert not caught.value.refused
            later.close()
        assert clock() - began < 30
        harness.do(lease.renew)
        assert harness.do(lease.release) is Released.RELEASED
    finally:
        revive(shop)


def revive(shop: Group) -> None:
    for sentinel in shop.sentinels:
        sentinel.resume()
        if sentinel.process is not None and sentinel.process.poll() is not None:
            sentinel.start()
    shop.settle()


@threads
def test_unknown_service_is_told_at_once(harness: Harness, shop: Group, prefix: str) -> None:
    for backend in store(shop.url.replace(f"/{SERVICE}", "/stop"), prefix):
        with pytest.raises(BackendUnavailable, match=r"master of 'stop': .*does not know this service") as caught:
            harness.do(type(harness)(backend).lock("a", wait=None).acquire)
        assert caught.value.refused


@pytest.fixture(scope="module")
def guarded(servers_directory: Path) -> Iterator[Group]:
    with group(servers_directory / "sentinel-guarded", password=SECRET, sentinel_password=OTHER) as shop:
        yield shop


@pytest.mark.parametrize(("password", "of_sentinels"), [("wr0ng", OTHER), ("", OTHER), (QUOTED, "wr0ng"), (QUOTED, "")])
def test_wrong_credentials_are_refused_at_once_and_never_told(
    guarded: Group, prefix: str, caplog: pytest.LogCaptureFixture, password: str, of_sentinels: str
) -> None:
    caplog.set_level(logging.DEBUG)
    hosts = ",".join(f"{HOST}:{sentinel.port}" for sentinel in guarded.sentinels)
    at, query = f":{password}@" if password else "", f"?sentinel_password={of_sentinels}" if of_sentinels else ""
    for backend in store(f"redis+sentinel://{at}{hosts}/{SERVICE}{query}", prefix):
        with pytest.raises(BackendUnavailable, match="refused our credentials") as caught:
            Lock(backend, "a", wait=None).acquire()
        assert caught.value.refused
        error: Any = caught.value
        while error is not None:
            assert not any(secret in f"{error!s}{error!r}{vars(error)}" for secret in (SECRET, OTHER, "wr0ng"))
            error = error.__cause__ or error.__context__
        assert not any(secret in f"{caplog.text}{backend!r}" for secret in (SECRET, OTHER, "wr0ng"))


def test_right_credentials_let_us_in(guarded: Group, prefix: str) -> None:
    url = guarded.url.replace(SECRET, QUOTED).replace(f"/{SERVICE}", f"/{SERVICE}/2")
    for backend in store(url, prefix):
        with Lock(backend, "a", wait=WAIT) as lease:
            assert lease.token > 0
            with guarded.client(guarded.master()) as client:
                assert client.info("keyspace").keys() == {"db2"}


@pytest.fixture(scope="module")
def encrypted(servers_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    directory, authority = tmp_path_factory.mktemp("sentinel-tls"), trustme.CA()
    certificate = authority.issue_cert(HOST)
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    with group(servers_directory / "sentinel-tls", tls=directory) as shop:
        yield shop


@pytest.mark.parametrize("shop", ["encrypted"], indirect=True)
def test_lock_is_held_over_tls(harness: Harness, shop: Group, prefix: str) -> None:
    for backend in store(f"{shop.url}?ssl_ca_certs={shop.authority}", prefix):
        encrypted = type(harness)(backend)
        assert encrypted.do(encrypted.acquire("a", wait=WAIT).release) is Released.RELEASED
    with pytest.raises(BackendUnavailable, match="certificate verify failed"):
        harness.acquire("a", wait=0)


def work(link: Link, url: str, prefix: str, path: str) -> None:
    """Take the lock again and again, with grants that wait for a replica, and append a line after each section."""
    backend = WithClock(connect(url, prefix=prefix, replicas=1))
    with Path(path).open("a", buffering=1) as history:
        while True:
            with contextlib.suppress(DLockError):
                section = _section(backend, {"ttl": 3.0}, 0.002)
                history.write(json.dumps(asdict(section)) + "\n")


def test_processes_make_no_overlap_while_the_master_dies(fresh: Group, prefix: str, tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.touch()
    with ExitStack() as stack:
        workers = [stack.enter_context(processes.worker(work, fresh.url, prefix, str(path))) for _ in range(3)]

        def go_on() -> None:
            before = len(read(path))
            until(lambda: len(read(path)) >= before + 40 or not all(one.process.is_alive() for one in workers))
            assert [one.process.exitcode for one in workers] == [None] * 3

        go_on()
        old = fresh.master()
        new = fresh.fail_over()
        old.start()
        fresh.ask(old, "REPLICAOF", HOST, new.port)
        go_on()
        for one in workers:
            one.kill()
    history = read(path)
    assert len({section.process for section in history}) == 3
    assert overlaps(history) == []
    assert repeated_tokens(history) == []
