"""etcd behind a network that loses replies and resets connections: one grant, one queue entry, nothing left over."""

import asyncio
from base64 import b64encode

import pytest

from dlock_core import AsyncLock, Lock
from dlock_core.backend import Granted, Released, Renewal, RenewalFailure
from dlock_core.backends.etcd import backend as etcd
from dlock_core.backends.etcd import keys, steps
from dlock_core.backends.etcd.backend import EtcdBackend
from dlock_core.errors import AcquireTimeout, BackendUnavailable, LeaseLost
from dlock_core.leases.acquisition import new_request
from dlock_core.options import LockOptions
from dlock_core.runtime import BLOCKING, clock, run
from dlock_core.testing.contract.harness import Harness, Tasks
from tests.etcd_servers import Cluster, ask
from tests.faults.etcd.conftest import TIMEOUT_S
from tests.faults.looking import holders, is_untouched, waiters
from tests.faults.test_cancellation import Cancelled, attempt, sweep
from tests.proxy import Proxy
from tests.waiting import auntil, until

WITHIN = 30.0
FAULTS = ["drop_reply", "cut_reply", "halve_reply", "cut_request"]
LEASE, ENTER, LEAVE, RENEW, WATCH = b"/lease/grant", b"/kv/txn", b"/kv/deleterange", b"/lease/keepalive", b"/v3/watch"


@pytest.mark.parametrize("is_first", [True, False], ids=["new lease", "used lease"])
@pytest.mark.parametrize("fault", FAULTS)
def test_acquire_whose_reply_was_lost_is_one_grant(
    harness: Harness, proxy: Proxy, direct: EtcdBackend, fault: str, is_first: bool
) -> None:
    harness.do(harness.acquire("warm-up", ttl=20 if is_first else 30).release)
    broken = getattr(proxy, fault)(matching=LEASE if is_first else ENTER)
    lease = harness.acquire("a")
    assert broken.happened
    assert holders(direct, "a") == [lease.holder]  # type: ignore[arg-type]
    assert harness.do(lease.release) is Released.RELEASED
    assert is_untouched(direct, "a")  # type: ignore[arg-type]


def test_shared_acquire_whose_reply_was_lost_is_one_grant(harness: Harness, proxy: Proxy, direct: EtcdBackend) -> None:
    other = harness.acquire("a", shared=True)
    broken = proxy.drop_reply(matching=ENTER)
    lease = harness.acquire("a", shared=True)
    assert broken.happened
    assert sorted(holders(direct, "a")) == sorted([lease.holder, other.holder])  # type: ignore[arg-type]


def test_try_whose_reply_was_lost_is_an_error_and_leaves_no_grant(
    harness: Harness, proxy: Proxy, direct: EtcdBackend
) -> None:
    lost = proxy.drop_reply(matching=LEASE)
    with pytest.raises(BackendUnavailable):
        harness.try_acquire("a")
    assert lost.happened
    until(lambda: is_untouched(direct, "a"))  # type: ignore[arg-type]


def test_single_try_on_a_connection_that_died_after_the_request_finds_its_grant(
    harness: Harness, proxy: Proxy, direct: EtcdBackend
) -> None:
    harness.do(harness.acquire("warm-up").release)
    broken = proxy.cut_reply(matching=ENTER)
    lease = harness.try_acquire("a")
    assert broken.happened
    assert holders(direct, "a") == [lease.holder]  # type: ignore[arg-type]


def test_request_that_arrives_after_we_gave_up_can_put_nothing_on_its_revoked_lease(
    harness: Harness, proxy: Proxy, direct: EtcdBackend
) -> None:
    harness.do(harness.acquire("warm-up").release)
    late = proxy.hold_request(matching=ENTER)
    with pytest.raises(BackendUnavailable):
        harness.try_acquire("a")
    late.release()
    for _ in range(50):
        until(lambda: is_untouched(direct, "a"))  # type: ignore[arg-type]


def test_request_that_arrives_after_we_gave_up_blocks_nobody_for_longer_than_its_ttl(
    harness: Harness, proxy: Proxy, direct: EtcdBackend
) -> None:
    late = proxy.hold_request(matching=LEASE)
    with pytest.raises(BackendUnavailable):
        harness.try_acquire("a", ttl=2)
    late.release()
    until(lambda: is_untouched(direct, "a"))  # type: ignore[arg-type]


@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
def test_waiter_is_woken_by_the_release_and_not_only_by_its_own_looks(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr(etcd, "WAITER_KEEP_ALIVE_S", 1000.0)
    first = harness.acquire("a")
    line = [harness.queue_up("a", shared=shared) for _ in range(3)]
    for pending in line:
        harness.do(first.release)
        first = pending.result(WITHIN)


def test_reset_of_an_idle_connection_is_no_reason_to_fail_a_single_try(harness: Harness, proxy: Proxy) -> None:
    harness.do(harness.acquire("warm-up").release)
    proxy.cut()
    assert harness.try_acquire("a") is not None


@pytest.mark.parametrize("fault", FAULTS)
def test_place_whose_reply_was_lost_is_one_place(
    harness: Harness, proxy: Proxy, direct: EtcdBackend, fault: str
) -> None:
    first = harness.acquire("a")
    broken = getattr(proxy, fault)(2, matching=ENTER)  # the first finds the lock taken, the second queues
    pending = harness.queue_up("a")
    broken.wait()
    assert len(waiters(direct, "a")) == 1  # type: ignore[arg-type]
    harness.do(first.release)
    assert holders(direct, "a") == [pending.result(WITHIN).holder]  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", FAULTS)
def test_waiter_whose_watch_was_lost_is_served(harness: Harness, proxy: Proxy, fault: str) -> None:
    first = harness.acquire("a")
    lost = getattr(proxy, fault)(matching=WATCH)
    pending = harness.queue_up("a")
    lost.wait()
    harness.do(first.release)
    assert pending.result(WITHIN).token > first.token


def test_waiter_survives_a_reset_of_every_connection(harness: Harness, proxy: Proxy, direct: EtcdBackend) -> None:
    first = harness.acquire("a")
    line = [harness.queue_up("a") for _ in range(3)]
    order = waiters(direct, "a")  # type: ignore[arg-type]
    proxy.cut()
    got = [first]
    for pending in line:
        harness.do(got[-1].release)
        got.append(pending.result(WITHIN))
    assert [lease.holder for lease in got[1:]] == order


@pytest.mark.parametrize("fault", FAULTS)
def test_release_whose_reply_was_lost_is_a_release(
    harness: Harness, proxy: Proxy, direct: EtcdBackend, fault: str
) -> None:
    lease = harness.acquire("a")
    broken = getattr(proxy, fault)(matching=LEAVE)
    assert harness.do(lease.release) is Released.RELEASED
    assert broken.happened
    assert is_untouched(direct, "a")  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", FAULTS)
def test_renewal_whose_reply_was_lost_is_no_loss(harness: Harness, proxy: Proxy, fault: str) -> None:
    lease = harness.acquire("a", ttl=3)
    getattr(proxy, fault)(matching=RENEW).wait()
    before = harness.renewals(lease)
    harness.observed.until(lambda _: harness.renewals(lease) >= before + 3)
    assert not lease.lost


def test_longer_ttl_whose_reply_was_lost_says_nothing_about_the_lease(harness: Harness, proxy: Proxy) -> None:
    lease = harness.acquire("a", ttl=10, renew=False)
    proxy.drop_reply(matching=LEASE)
    with pytest.raises(BackendUnavailable):
        harness.do(lambda: lease.renew(60))
    assert not lease.lost
    harness.do(lambda: lease.renew(60))
    assert lease.remaining() > 30


def test_lease_whose_longer_ttl_was_carried_out_unheard_is_kept_for_a_shorter_one(
    harness: Harness, proxy: Proxy
) -> None:
    lease = harness.acquire("a", ttl=3)
    harness.do(lambda: lease.renew(3))
    proxy.drop_reply(matching=LEASE)
    with pytest.raises(BackendUnavailable):
        harness.do(lambda: lease.renew(6))
    harness.do(lambda: lease.renew(3))
    before = harness.renewals(lease)
    harness.observed.until(lambda _: lease.lost or harness.renewals(lease) >= before + 10)
    assert not lease.lost


@pytest.mark.parametrize("which", ["enter", "promote", "move"])
def test_request_that_comes_late_moves_no_grant_to_another_lease(direct: EtcdBackend, which: str) -> None:
    request = new_request("a", LockOptions(20.0))
    granted = run(direct.try_acquire(BLOCKING, request))
    assert isinstance(granted, Granted)
    created, first, late = granted.handle.created, granted.handle.lease.id, steps.new_lease(6.0)
    run(direct.renew(BLOCKING, [Renewal(request._replace(ttl=60.0), granted)]))
    comes = {
        "enter": direct._keys.enter(request, late.id, late.id),
        "promote": direct._keys.promote(request, created, first, late.id),
        "move": direct._keys.move(request, created, first, late.id),
    }
    run(direct._steps.ask(BLOCKING, "a", keys.grant(late.id, late.ttl), comes[which]))
    assert expires_in(direct, "a") > 40
    assert run(direct.renew(BLOCKING, [Renewal(request._replace(ttl=60.0), granted)])) == [60.0]
    run(direct.abandon(BLOCKING, request))


@pytest.mark.parametrize("which", ["promote", "move"])
def test_request_without_an_answer_that_comes_late_moves_no_grant_to_a_lease_that_nearly_ends(
    proxy: Proxy, direct: EtcdBackend, prefix: str, which: str
) -> None:
    """It is executed long after the lease that it names was granted; the key's own lease was renewed since."""
    through = EtcdBackend(f"etcd://127.0.0.1:{proxy.port}", prefix=prefix, timeout=TIMEOUT_S)
    request = new_request("a", LockOptions(20.0))
    granted = run(through.try_acquire(BLOCKING, request))
    assert isinstance(granted, Granted)
    created, first, late = granted.handle.created, granted.handle.lease.id, steps.new_lease(6.0)
    proxy.cut_request(2, matching=ENTER)  # the first only reads
    with pytest.raises(BackendUnavailable):
        if which == "move":
            run(through.renew(BLOCKING, [Renewal(request._replace(ttl=60.0), granted)]))
        else:  # The fence needs a greater token.
            run(through.try_acquire(BLOCKING, request._replace(floor=granted.token + 10, queue=False)))
    assert run(through.renew(BLOCKING, [Renewal(request, granted)])) == [20.0]
    comes = {
        "promote": direct._keys.promote(request, created, first, late.id),
        "move": direct._keys.move(request, created, first, late.id),
    }
    run(direct._steps.ask(BLOCKING, "a", keys.grant(late.id, late.ttl), comes[which]))
    assert expires_in(direct, "a") > 10
    assert run(through.release(BLOCKING, request, granted)) is Released.RELEASED
    through.close()


def expires_in(direct: EtcdBackend, name: str) -> float:
    ((holder,),) = [state.holders for state in run(direct.inspect(BLOCKING, name))]
    assert holder.expires_in is not None
    return holder.expires_in


@pytest.mark.parametrize("wait", [0, 0.3])
def test_deaf_store_is_given_up_in_time(harness: Harness, proxy: Proxy, wait: float) -> None:
    harness.do(harness.acquire("warm-up").release)
    proxy.deaf()
    began = clock()
    with pytest.raises(BackendUnavailable):
        harness.acquire("a", wait=wait)
    assert clock() - began < wait + TIMEOUT_S + 5
    proxy.forward()


def test_store_that_goes_deaf_under_a_waiter_is_given_up_in_time(harness: Harness, proxy: Proxy) -> None:
    harness.acquire("a")
    pending = harness.queue_up("a", wait=0.5)
    proxy.deaf()
    with pytest.raises((BackendUnavailable, AcquireTimeout)):
        pending.result(WITHIN)
    proxy.forward()


def test_task_that_is_cancelled_inside_a_request_leaves_nothing(
    harness: Harness, proxy: Proxy, direct: EtcdBackend
) -> None:
    if not isinstance(harness, Tasks):
        pytest.skip("threads cannot be cancelled")
    held_up = proxy.hold_reply(matching=LEASE)
    pending = harness.start(harness.lock("a").acquire)
    held_up.wait()
    pending.cancel()
    harness.observed.until(lambda _: bool(harness.calls_of("abandon", "a")))
    held_up.release()
    until(lambda: is_untouched(direct, "a"))  # type: ignore[arg-type]


def coded(text: str) -> str:
    return b64encode(text.encode()).decode()


def test_key_that_an_operator_deleted_is_a_loss_and_is_not_made_again(
    harness: Harness, one: Cluster, direct: EtcdBackend, prefix: str
) -> None:
    told: list[bool] = []
    lease = harness.acquire("a", ttl=2, on_lost=lambda: told.append(True))
    start, end = f"{prefix}lock/a/", f"{prefix}lock/a0"
    ask(one.members[0], "kv/deleterange", {"key": coded(start), "range_end": coded(end)})
    harness.until(lambda: told)
    with pytest.raises(LeaseLost):
        harness.do(lease.renew)
    assert is_untouched(direct, "a")  # type: ignore[arg-type]


def test_waiter_whose_place_was_deleted_queues_anew(
    harness: Harness, one: Cluster, direct: EtcdBackend, prefix: str
) -> None:
    first = harness.acquire("a")
    deleted, behind = harness.queue_up("a"), harness.queue_up("a")
    key = f"{prefix}lock/a/x/{waiters(direct, 'a')[0]}"  # type: ignore[arg-type]
    ask(one.members[0], "kv/deleterange", {"key": coded(key)})
    harness.do(first.release)
    second = behind.result(WITHIN)
    harness.until(lambda: waiters(direct, "a"))  # type: ignore[arg-type]
    assert not deleted.done()
    assert holders(direct, "a") == [second.holder]  # type: ignore[arg-type]
    harness.do(second.release)
    assert deleted.result(WITHIN).token > second.token


def test_unused_lease_that_the_server_forgot_costs_no_grant(harness: Harness, one: Cluster) -> None:
    harness.do(harness.acquire("a").release)
    for lease in ask(one.members[0], "lease/leases")["leases"]:
        ask(one.members[0], "lease/revoke", lease)
    assert harness.try_acquire("a") is not None


@pytest.mark.usefixtures("patience")
def test_many_leases_are_renewed_in_few_requests(harness: Harness, proxy: Proxy) -> None:
    leases = [harness.acquire(f"a:{number}", ttl=60, renew=False) for number in range(130)]
    renewals = [Renewal(lease._held.request, lease._held.granted) for lease in leases]
    before = proxy.requests
    assert harness.call_store("renew", renewals) == [60.0] * 130
    assert proxy.requests - before <= 4


@pytest.mark.parametrize("k", [1, 2, 3])
def test_renewal_of_many_of_which_one_request_fails_tells_of_the_others(
    harness: Harness, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    monkeypatch.setattr(etcd, "MAX_LEASES_PER_REQUEST", 10)
    leases = [harness.acquire(f"a:{number}", ttl=60, renew=False) for number in range(30)]
    renewals = [Renewal(lease._held.request, lease._held.granted) for lease in leases]
    proxy.cut_reply(k, matching=RENEW)
    results = harness.call_store("renew", renewals)
    failed = slice(10 * k - 10, 10 * k)
    assert results[failed] == [RenewalFailure.UNKNOWN] * 10
    assert results[: failed.start] + results[failed.stop :] == [60.0] * 20


def test_renewal_for_a_longer_ttl_that_fails_does_not_hide_the_renewal_of_others(
    harness: Harness, proxy: Proxy
) -> None:
    leases = [harness.acquire(f"a:{number}", ttl=20, renew=False) for number in range(3)]
    longer, *others = [Renewal(lease._held.request, lease._held.granted) for lease in leases]
    longer = longer._replace(request=longer.request._replace(ttl=60.0))
    proxy.cut_reply(matching=LEASE)
    assert harness.call_store("renew", [longer, *others]) == [RenewalFailure.UNKNOWN, 20.0, 20.0]
    assert harness.call_store("renew", [longer, *others]) == [60.0, 20.0, 20.0]


@pytest.mark.usefixtures("patience")
def test_leases_that_the_gateway_forgot_in_a_long_stream_are_asked_for_again(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MAX_LEASES_PER_STREAM", 100)
    leases = [harness.acquire(f"a:{number}", ttl=60, renew=False) for number in range(100)]
    renewals = [Renewal(lease._held.request, lease._held.granted) for lease in leases]
    for _ in range(10):
        assert harness.call_store("renew", renewals) == [60.0] * 100


@pytest.mark.parametrize("warm", [False, True], ids=["new lease", "used lease"])
def test_acquire_cancelled_at_any_await_leaves_nothing(backend: EtcdBackend, direct: EtcdBackend, warm: bool) -> None:
    async def main(k: int) -> bool:
        if warm:
            await (await AsyncLock(backend, "warm-up").acquire()).release()
        cancelled = Cancelled(k)
        lease = await attempt(cancelled, AsyncLock(backend, "a", wait=None, ttl=30 if warm else 30 + k).acquire())
        if lease is not None:
            await lease.release()
        assert is_untouched(direct, "a"), f"cancelled at await {k}"  # type: ignore[arg-type]
        return cancelled.happened

    sweep(main, awaits=1)


@pytest.mark.parametrize("shared", [False, True], ids=["exclusive", "shared"])
def test_waiting_acquire_cancelled_at_any_await_leaves_nothing(
    backend: EtcdBackend, direct: EtcdBackend, shared: bool
) -> None:
    async def main(k: int) -> bool:
        holder = await AsyncLock(backend, "a").acquire()
        cancelled = Cancelled(k)
        wish = AsyncLock(backend, "a", wait=None, shared=shared)
        pending = asyncio.ensure_future(attempt(cancelled, wish.acquire()))
        await auntil(lambda: pending.done() or waiters(direct, "a"))  # type: ignore[arg-type]
        await holder.release()
        lease = await pending
        if lease is not None:
            assert holders(direct, "a") == [lease.holder]  # type: ignore[arg-type]
            await lease.release()
        assert is_untouched(direct, "a"), f"cancelled at await {k}"  # type: ignore[arg-type]
        return cancelled.happened

    sweep(main, awaits=3)


def test_release_cancelled_at_any_await_is_still_done(backend: EtcdBackend, direct: EtcdBackend) -> None:
    async def main(k: int) -> bool:
        lease = await AsyncLock(backend, "a").acquire()
        cancelled = Cancelled(k)
        await attempt(cancelled, lease.release())
        assert is_untouched(direct, "a"), f"cancelled at await {k}"  # type: ignore[arg-type]
        return cancelled.happened

    sweep(main, awaits=1)


def test_connections_are_kept_and_each_step_is_one_write(backend: EtcdBackend, proxy: Proxy) -> None:
    Lock(backend, "a").acquire().release()
    before = proxy.requests
    Lock(backend, "a").acquire().release()
    assert proxy.requests - before == 2
