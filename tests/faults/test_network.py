"""Replies are lost, late or never sent, for threads and tasks: no lock has two holders, nothing is left over."""

import logging

import pytest
import redis

from dlock_core.backend import Released
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.backends.redis.protocol import load_script
from dlock_core.errors import AcquireTimeout, BackendUnavailable
from dlock_core.runtime import clock
from dlock_core.testing.contract.harness import Harness, Tasks
from tests.faults.conftest import LIMIT
from tests.faults.looking import holders, is_untouched, keys, waiters
from tests.proxy import Proxy
from tests.servers import Server
from tests.waiting import until

ACQUIRE, RELEASE, RENEW, WITHDRAW = (
    load_script(name).sha.encode() for name in ("acquire", "release", "renew", "abandon")
)
WITHIN = 30.0


@pytest.fixture(autouse=True)
def _known_scripts(redis_server: Server) -> None:
    """Load the scripts into the server, so that every command is one request."""
    with redis.Redis.from_url(redis_server.url) as client:
        for name in ("acquire", "release", "renew", "abandon"):
            client.script_load(load_script(name).text)


def connect(harness: Harness) -> None:
    """Leave an idle connection, so that the next request is the acquire itself."""
    harness.do(harness.acquire("warm-up").release)


@pytest.mark.parametrize("fault", ["drop_reply", "cut_reply", "cut_request"])
def test_acquire_whose_reply_was_lost_is_one_grant(
    harness: Harness, proxy: Proxy, direct: RedisBackend, fault: str
) -> None:
    connect(harness)
    broken = getattr(proxy, fault)(matching=ACQUIRE)
    lease = harness.acquire("a")
    assert broken.happened
    assert holders(direct, "a") == [lease.holder]
    assert harness.do(lease.release) is Released.RELEASED
    assert is_untouched(direct, "a")


def test_try_whose_reply_was_lost_is_an_error_and_leaves_no_grant(
    harness: Harness, proxy: Proxy, direct: RedisBackend
) -> None:
    connect(harness)
    lost = proxy.drop_reply(matching=ACQUIRE)
    with pytest.raises(BackendUnavailable):
        harness.try_acquire("a")
    assert lost.happened
    until(lambda: is_untouched(direct, "a"))


def test_reset_of_an_idle_connection_is_no_reason_to_fail_a_single_try(harness: Harness, proxy: Proxy) -> None:
    connect(harness)
    proxy.cut()
    assert harness.try_acquire("a") is not None


def test_several_idle_connections_that_died_cost_one_more_question(harness: Harness, proxy: Proxy) -> None:
    leases = [harness.start(harness.lock(f"a:{number}").acquire) for number in range(8)]
    for lease in leases:
        harness.do(harness.keep(lease.result(WITHIN)).release)
    proxy.cut()
    assert harness.try_acquire("b") is not None


def sleep_of(harness: Harness) -> bytes:
    """Return the command in which a waiter, or the listener of all waiting tasks, sleeps."""
    return b"BLMOVE" if isinstance(harness, Tasks) else b"BLPOP"


@pytest.mark.parametrize("fault", ["drop_reply", "cut_reply"])
def test_waiter_whose_wake_up_was_lost_is_one_grant(
    harness: Harness, proxy: Proxy, direct: RedisBackend, fault: str
) -> None:
    first = harness.acquire("a", ttl=30)
    lost = getattr(proxy, fault)(matching=sleep_of(harness))
    pending = harness.queue_up("a", ttl=1.0)
    harness.do(first.release)
    lost.wait()
    second = pending.result(WITHIN)
    assert second.token > first.token
    assert holders(direct, "a") == [second.holder]


def test_waiter_survives_a_reset_of_every_connection(harness: Harness, proxy: Proxy, direct: RedisBackend) -> None:
    first = harness.acquire("a")
    line = [harness.queue_up("a") for _ in range(3)]
    order = waiters(direct, "a")
    proxy.cut()
    got = [first]
    for pending in line:
        harness.do(got[-1].release)
        got.append(pending.result(WITHIN))
    assert [lease.holder for lease in got[1:]] == order


def test_waiter_begins_while_the_store_is_away_and_gets_the_lock_when_it_is_back(
    harness: Harness, proxy: Proxy
) -> None:
    proxy.refuse()
    pending = harness.start(harness.lock("a", wait=None).acquire)
    harness.until(lambda: len(harness.calls_of("try_acquire", "a")) >= 3)
    assert not pending.done()
    proxy.forward()
    assert harness.keep(pending.result(WITHIN)).remaining() > 0


@pytest.mark.parametrize("fault", ["drop_reply", "cut_reply", "cut_request"])
def test_release_whose_reply_was_lost_is_a_release(
    harness: Harness, proxy: Proxy, direct: RedisBackend, fault: str
) -> None:
    lease = harness.acquire("a")
    broken = getattr(proxy, fault)(matching=RELEASE)
    assert harness.do(lease.release) is Released.RELEASED
    assert broken.happened
    assert is_untouched(direct, "a")


def test_release_whose_reply_was_lost_serves_the_waiter_and_not_twice(
    harness: Harness, proxy: Proxy, direct: RedisBackend
) -> None:
    lease = harness.acquire("a")
    pending, last = harness.queue_up("a"), harness.queue_up("a")
    proxy.drop_reply(matching=RELEASE)
    assert harness.do(lease.release) is Released.RELEASED
    assert holders(direct, "a") == [pending.result(WITHIN).holder]
    assert not last.done()


@pytest.mark.parametrize("fault", ["drop_reply", "cut_reply", "cut_request"])
def test_renewal_whose_reply_was_lost_is_no_loss(harness: Harness, proxy: Proxy, fault: str) -> None:
    told: list[bool] = []
    lease = harness.acquire("a", ttl=1.5, on_lost=lambda: told.append(True))
    broken = getattr(proxy, fault)(matching=RENEW)
    broken.wait()
    before = harness.renewals(lease)
    harness.observed.until(lambda _: harness.renewals(lease) >= before + 3)
    assert not lease.lost
    assert told == []


def test_renewal_by_hand_whose_reply_was_lost_says_nothing_about_the_lease(harness: Harness, proxy: Proxy) -> None:
    lease = harness.acquire("a", ttl=30, renew=False)
    proxy.drop_reply(matching=RENEW)
    with pytest.raises(BackendUnavailable):
        harness.do(lease.renew)
    assert not lease.lost
    harness.do(lease.renew)


def test_shorter_renewal_whose_reply_was_lost_is_believed(harness: Harness, proxy: Proxy) -> None:
    lease = harness.acquire("a", ttl=30, renew=False)
    proxy.drop_reply(matching=RENEW)
    with pytest.raises(BackendUnavailable):
        harness.do(lambda: lease.renew(1))
    assert lease.remaining() <= 1


@pytest.mark.parametrize("earlier", [5.0, None])
def test_renewal_that_comes_late_shortens_no_lease(
    harness: Harness, proxy: Proxy, redis_server: Server, earlier: float | None
) -> None:
    def renewals() -> int:
        with redis.Redis.from_url(redis_server.url) as client:
            return int(client.info("commandstats")["cmdstat_pexpire"]["calls"])

    lease = harness.acquire("a", ttl=20, renew=False)
    late = proxy.hold_request(matching=RENEW)
    with pytest.raises(BackendUnavailable):
        harness.do(lambda: lease.renew(earlier))
    harness.do(lambda: lease.renew(60))
    before = renewals()
    late.release()
    until(lambda: renewals() > before)
    (holder,) = harness.state("a").holders
    assert (holder.expires_in or 0) >= lease.remaining() > 30


def test_abandon_whose_reply_was_lost_has_still_abandoned(harness: Harness, proxy: Proxy, direct: RedisBackend) -> None:
    harness.acquire("a")
    lost = proxy.drop_reply(matching=WITHDRAW)
    with pytest.raises(AcquireTimeout):
        harness.acquire("a", wait=0.05)
    lost.wait()
    assert waiters(direct, "a") == []


@pytest.mark.parametrize("wait", [0, 0.3])
def test_deaf_store_is_given_up_in_time(harness: Harness, proxy: Proxy, wait: float) -> None:
    connect(harness)
    proxy.deaf()
    began = clock()
    with pytest.raises(BackendUnavailable):
        harness.acquire("a", wait=wait)
    assert clock() - began < wait + LIMIT + 5, "one request is all that may come on top of the wait"
    until(lambda: bool(harness.calls_of("abandon", "a")))


def test_store_that_goes_deaf_under_a_waiter_is_given_up_in_time(harness: Harness, proxy: Proxy) -> None:
    harness.acquire("a")
    pending = harness.queue_up("a", wait=0.5, ttl=1.0)
    proxy.deaf()
    with pytest.raises((BackendUnavailable, AcquireTimeout)):
        pending.result(WITHIN)
    proxy.forward()


def test_release_to_a_deaf_store_is_an_error_and_may_be_repeated(
    harness: Harness, proxy: Proxy, direct: RedisBackend
) -> None:
    lease = harness.acquire("a")
    proxy.deaf()
    with pytest.raises(BackendUnavailable):
        harness.do(lease.release)
    proxy.forward()
    assert harness.do(lease.release) is Released.RELEASED
    assert is_untouched(direct, "a")


def test_block_ends_in_peace_when_the_store_is_deaf_and_the_lease_runs_out(
    harness: Harness, proxy: Proxy, direct: RedisBackend, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="dlock"):
        harness.do(lambda: harness.block(harness.lock("a", ttl=1.0), lambda _: proxy.deaf()))
    assert "runs out by itself" in caplog.text
    proxy.forward()
    until(lambda: is_untouched(direct, "a"))


def test_lease_is_lost_in_time_when_the_store_is_deaf(harness: Harness, proxy: Proxy) -> None:
    told: list[float] = []
    lease = harness.acquire("a", ttl=0.9, on_lost=lambda: told.append(clock()))
    until_then = clock() + lease.remaining()
    proxy.deaf()
    harness.until(lambda: told)
    assert lease.lost
    assert told[0] >= until_then - 0.01
    proxy.forward()


def test_request_that_arrives_after_we_gave_up_blocks_nobody_for_longer_than_its_ttl(
    harness: Harness, proxy: Proxy, direct: RedisBackend
) -> None:
    connect(harness)
    late = proxy.hold_request(matching=ACQUIRE)
    with pytest.raises(BackendUnavailable):
        harness.acquire("a", wait=0, ttl=0.5)
    late.release()
    until(lambda: is_untouched(direct, "a"))


def test_nothing_is_left_over_after_all_of_it(
    harness: Harness, proxy: Proxy, direct: RedisBackend, prefix: str, redis_server: Server
) -> None:
    for fault in (proxy.drop_reply, proxy.cut_reply, proxy.cut_request):
        for matching in (ACQUIRE, RELEASE, WITHDRAW, sleep_of(harness)):
            fault(matching=matching)
            first = harness.acquire("a", ttl=2.0)
            pending = harness.queue_up("a", ttl=2.0)
            with pytest.raises(AcquireTimeout):
                harness.acquire("a", wait=0.02)
            harness.do(first.release)
            harness.do(pending.result(WITHIN).release)
    assert keys(redis_server.url, prefix) <= {"locks"}
    assert is_untouched(direct, "a")
