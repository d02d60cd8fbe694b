"""`lock(lock(...), lock(...))`: several locks of any stores and databases, all or none, named in any order."""

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections, transaction
from django.test import override_settings

from django_dlock import lock, locked
from django_dlock.errors import AcquireTimeout, AlreadyHeld, LeaseLost, NotSupported, SnapshotTooOld
from django_dlock.tie import current
from dlock_core.backend import Capabilities
from dlock_core.backends.memory import MemoryBackend
from dlock_core.errors import BackendUnavailable
from dlock_core.leases.acquisition import Acquisition
from dlock_core.runtime import BLOCKING, run
from dlock_core.testing.contract.observed import Observed
from dlock_core.transactions import transaction_lock
from tests.django_dlock.parties import WITHIN
from tests.leases import is_held
from tests.testapp.models import Counter
from tests.waiting import until


class Stores:
    """Two stores, "default" and "ledger", and the requests that they got."""

    def __init__(self) -> None:
        self.default, self.ledger = Observed(MemoryBackend()), Observed(MemoryBackend())

    def held(self) -> list[str]:
        names = ("account:1", "account:2", "account:3")
        both = (("default", self.default), ("ledger", self.ledger))
        return [f"{alias} {name}" for alias, store in both for name in names if is_held(store, name)]


@pytest.fixture
def stores() -> Iterator[Stores]:
    stores = Stores()
    one, other = ({"BACKEND": each, "TTL": 30, "WAIT": 20} for each in (stores.default, stores.ledger))
    with override_settings(DLOCK={"default": one, "ledger": other}):
        yield stores
        assert current() == []
        assert stores.held() == []


def account(number, **options):
    return lock("account", number, **{"using": "default", **options})


def in_ledger(number, **options):
    return account(number, store="ledger", **options)


def value(alias, name):
    return Counter.objects.using(alias).get(name=name).value


def acquired(journal):
    return [entry for entry in journal if entry.startswith("acquired")]


def test_all_are_held_to_the_end_of_the_block(stores, database):
    with lock(in_ledger(2, using=database), account(1, using=database)) as leases:
        assert stores.held() == ["default account:1", "ledger account:2"]
        assert [lease.name for lease in leases] == ["account:2", "account:1"]
        assert leases.remaining() > 0
        assert not leases.lost
        leases.ensure_held()
    assert stores.held() == []


def test_they_are_taken_in_one_order_in_whatever_order_they_are_named(stores, database, journal):
    for order in ([in_ledger(1), account(2), account(1)], [account(1), account(2), in_ledger(1)]):
        with lock(*order) as leases:
            assert [lease.name for lease in leases] == [each.name for each in order]
        assert [call.name for call in stores.default.calls if call.method == "try_acquire"] == [
            "account:1",
            "account:2",
        ]
        asked = acquired(journal)
        assert asked == ["acquired account:1", "acquired account:2", "acquired account:1"]
        stores.default.calls.clear()
        journal.clear()


def test_lock_that_joins_one_of_several_only_leaves_it(stores, database):
    with lock(account(1, using=database), account(2, using=database)) as leases:
        with account(1, using=database, reentrant=True):
            pass
        assert stores.held() == ["default account:1", "default account:2"]
        assert leases.remaining() > 0
    assert stores.held() == []


def test_several_leave_the_one_that_another_lock_has_joined(stores, database):
    leases = lock(account(1, using=database), account(2, using=database)).acquire()
    with account(1, using=database, reentrant=True) as joined:
        leases.release()
        assert stores.held() == ["default account:1"]
        assert joined.remaining() > 0
    assert stores.held() == []


async def test_async_lock_that_joins_one_of_several_only_leaves_it(stores):
    async with lock(account(1, fence=False), account(2, fence=False)) as leases:
        async with account(1, fence=False, reentrant=True):
            pass
        assert stores.held() == ["default account:1", "default account:2"]
        async with account(2, fence=False, reentrant=True) as joined:
            await leases.arelease()
            assert stores.held() == ["default account:2"]
            assert joined.remaining() > 0
    assert stores.held() == []


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_one_that_is_taken_leaves_none_held(stores, database, party, taken):
    other = party()
    theirs = other.now(account(taken).acquire)
    with pytest.raises(AcquireTimeout) as refused:
        lock(in_ledger(1), *map(account, (1, 2, 3)), wait=0.05).acquire()
    assert refused.value.name == f"account:{taken}"
    assert stores.held() == [f"default account:{taken}"]
    other.now(theirs.release)


def test_one_that_is_taken_leaves_none_held_by_an_open_transaction(stores, database, party):
    other = party()
    theirs = other.now(in_ledger(1).acquire)
    with transaction.atomic(using=database):
        with pytest.raises(AcquireTimeout):
            lock(account(1, using=database), in_ledger(1, using=database), wait=0).acquire()
        assert stores.held() == ["ledger account:1"]
        Counter.objects.using(database).create(name="its transaction goes on", value=1)
    other.now(theirs.release)


def test_locks_that_were_held_before_stay_held_when_another_is_taken(stores, database, party):
    other = party()
    theirs = other.now(account(2).acquire)
    with account(1, using=database) as lease:
        with pytest.raises(AcquireTimeout):
            lock(account(1, reentrant=True), account(2), wait=0).acquire()
        assert stores.held() == ["default account:1", "default account:2"]
        lease.ensure_held()
    assert stores.held() == ["default account:2"]
    other.now(theirs.release)


def test_the_wait_is_one_for_all(stores, database, party, monkeypatch):
    """The first is released during the wait, and the second is not."""
    deadlines = set()

    class Noting(Acquisition):
        __slots__ = ()

        async def wait(self, busy):
            deadlines.add(self.deadline)
            return await super().wait(busy)

    monkeypatch.setattr(transaction_lock, "Acquisition", Noting)
    other = party()
    first, second = other.now(account(1).acquire), other.now(account(2).acquire)
    ours = party()
    waiting = ours.do(lock(account(1), account(2), wait=0.3).acquire)
    stores.default.until(lambda calls: any(call.method == "wait" for call in calls))
    other.now(first.release)
    with pytest.raises(AcquireTimeout):
        waiting.result(30)
    assert len(deadlines) == 1
    assert stores.held() == ["default account:2"]
    other.now(second.release)


def test_inside_a_transaction_all_are_held_to_its_end(stores, database):
    with transaction.atomic(using=database):
        with lock(account(1, using=database), in_ledger(1, using=database)):
            Counter.objects.using(database).create(name="written", value=1)
        assert stores.held() == ["default account:1", "ledger account:1"]
    assert stores.held() == []
    assert value(database, "written") == 1


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_all_are_granted_before_the_first_is_admitted_so_no_snapshot_is_too_old(stores, isolated, database):
    alias = isolated(database, "repeatable read")
    with transaction.atomic(using=alias), lock(account(1, using=alias), in_ledger(1, using=alias)):
        Counter.objects.using(alias).create(name="written", value=1)
    assert value(database, "written") == 1


def test_each_database_refuses_a_lost_lease(stores, database, use_database):
    use_database("other")
    with (
        pytest.raises(LeaseLost),
        lock(account(1, using=database), in_ledger(1, using="other")) as leases,
        transaction.atomic(using=database),
        transaction.atomic(using="other"),
    ):
        Counter.objects.using(database).create(name="a", value=1)
        Counter.objects.using("other").create(name="b", value=1)
        leases[1]._held.lose("in a test")
        assert leases.lost
    assert Counter.objects.using(database).count() == 0
    assert Counter.objects.using("other").count() == 0


def test_one_lock_protects_two_databases(stores, database, use_database, journal):
    use_database("other")
    with lock(account(1, using=database), account(1, using="other"), account(1, using=database)) as leases:
        assert len({lease.token for lease in leases}) == 1
        assert acquired(journal) == ["acquired account:1"]
        with transaction.atomic(using="other"):
            Counter.objects.using("other").create(name="fenced", value=1)
    assert value("other", "fenced") == 1


def test_what_is_held_already_is_refused_before_anything_is_taken(stores, database):
    with account(2), pytest.raises(AlreadyHeld) as refused:
        lock(in_ledger(1), account(1), account(2)).acquire()
    assert refused.value.name == "account:2"


def test_store_that_fails_leaves_none_held(stores, database, monkeypatch):
    async def fail(*_: object, **__: object) -> None:
        raise BackendUnavailable("account:1", reason="unplugged")

    monkeypatch.setattr(stores.ledger, "try_acquire", fail)
    with pytest.raises(BackendUnavailable):
        lock(account(1), in_ledger(1), wait=0).acquire()


def test_fence_that_refuses_leaves_none_held(stores, database, monkeypatch):
    monkeypatch.setattr("django_dlock.tie.TiedDatabases.bind", _failing_for("account:2"))
    with pytest.raises(RuntimeError, match="refused"):
        lock(account(1), account(2), account(3)).acquire()


def _failing_for(name):
    from django_dlock.tie import TiedDatabases

    bind = TiedDatabases.bind

    def failing(self, *args):
        if self.held.name == name:
            raise RuntimeError("refused")
        bind(self, *args)

    return failing


@pytest.mark.parametrize("taken", [1, 2])
async def test_cancelled_while_it_waits_leaves_none_held(stores, party, taken):
    async def holding() -> None:
        async with lock(account(1, fence=False), account(2, fence=False), in_ledger(1, fence=False)):
            raise AssertionError("one of them is taken")

    other = party()
    theirs = other.now(account(taken, fence=False).acquire)
    task = asyncio.create_task(holding())
    await asyncio.to_thread(stores.default.until, lambda calls: any(call.method == "wait" for call in calls))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stores.held() == [f"default account:{taken}"]
    other.now(theirs.release)


async def test_async_block_holds_all_and_releases_all(stores):
    async with lock(in_ledger(1, fence=False), account(1, fence=False)) as leases:
        assert [lease.name for lease in leases] == ["account:1", "account:1"]
        assert stores.held() == ["default account:1", "ledger account:1"]
    leases = await lock(account(1, fence=False), account(2, fence=False)).aacquire()
    await leases.arelease()


def test_several_in_one_redis_come_in_one_request(redis_store, database, journal):
    import redis

    with redis.Redis(port=redis_store._blocking.checkout().port) as client:
        lock(*map(account, range(2))).acquire().release()
        client.config_resetstat()
        leases = lock(*map(account, range(10))).acquire()
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 1
        leases.release()
    assert len(acquired(journal)) == 12


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_what_was_granted_in_one_request_and_never_taken_up_is_given_back(redis_store, isolated, database):
    alias = isolated(database, "repeatable read")
    with transaction.atomic(using=alias):
        Counter.objects.using(alias).count()
        with pytest.raises(SnapshotTooOld):
            lock(account(1), account(2, using=alias), account(3)).acquire()
    assert not any(is_held(redis_store, f"account:{number}") for number in (1, 2, 3))


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_transfers_between_two_databases_never_deadlock_and_lose_nothing(redis_store, database, use_database):
    use_database("other")
    rows = [(alias, f"{alias} {number}") for alias in (database, "other") for number in range(2)]
    for alias, name in rows:
        Counter.objects.using(alias).create(name=name, value=100)

    def transfer(source, target):
        with (
            lock(*(lock(name, using=alias, wait=None) for alias, name in (source, target))),
            transaction.atomic(using=source[0]),
            transaction.atomic(using=target[0]),
        ):
            for (alias, name), amount in ((source, -1), (target, 1)):
                counter = Counter.objects.using(alias).get(name=name)
                counter.value += amount
                counter.save(using=alias)

    def work(seed):
        chance = random.Random(seed)
        moved = [tuple(chance.sample(rows, 2)) for _ in range(30)]
        for pair in moved:
            transfer(*pair)
        connections.close_all()
        return moved

    with ThreadPoolExecutor(4) as threads:
        moves = [pair for done in threads.map(work, range(4)) for pair in done]
    for alias, name in rows:
        expected = 100 + sum(((alias, name) == target) - ((alias, name) == source) for source, target in moves)
        assert value(alias, name) == expected


@pytest.mark.parametrize("parts", [("a", "b"), (42,)])
def test_locks_and_parts_of_a_name_are_not_mixed(stores, parts):
    with pytest.raises(TypeError, match="every part must be a lock"):
        lock(account(1), *parts)


def test_locks_that_are_together_already_are_refused_among_others(stores):
    several = lock(account(1), account(2))
    for parts in ((several, account(3)), (account(3), several), (several,)):
        with pytest.raises(TypeError, match=r"are several locks already: pass each of them to one lock\(\)"):
            lock(*parts)


def test_decorator_is_told_that_each_lock_has_its_own():
    with pytest.raises(TypeError, match="one @locked for each"):
        locked(lock("a"), lock("b"))


def test_no_locks_at_all_are_refused():
    with pytest.raises(ValueError, match="neither a name nor locks were given"):
        lock(*[])


def test_options_belong_to_each_lock(stores):
    with pytest.raises(TypeError, match="ttl"):
        lock(account(1), account(2), ttl=3)
    with pytest.raises(ValueError, match="wait"):
        lock(account(1), account(2), wait=-1)


def test_what_one_store_cannot_do_is_refused_and_nothing_is_held(stores, monkeypatch):
    monkeypatch.setattr(stores.ledger.backend, "capabilities", Capabilities(), raising=False)
    with pytest.raises(NotSupported):
        lock(account(1), in_ledger(1, shared=True)).acquire()


def test_the_wait_of_all_gives_a_place_in_the_queue_to_one_that_would_not_wait_alone(stores, database, party):
    other, ours = party(), party()
    theirs = other.now(account(1).acquire)
    waiting = ours.do(lock(account(1, wait=0), wait=WITHIN).acquire)
    stores.default.until(lambda calls: any(call.method == "wait" for call in calls))
    assert len(run(stores.default.inspect(BLOCKING, "account:1"))[0].waiters) == 1
    other.now(theirs.release)
    ours.now(waiting.result(WITHIN).release)


def test_acquire_that_fails_while_its_store_is_down_leaves_nothing_behind_in_its_thread(stores, database, monkeypatch):
    """The thread no longer holds what could not be released, and writes as before; the releases are repeated in the background."""

    async def fail(*_: object, **__: object) -> None:
        raise BackendUnavailable("account:1", reason="unplugged")

    with monkeypatch.context() as patch:
        patch.setattr("django_dlock.tie.TiedDatabases.bind", _failing_for("account:2"))
        patch.setattr(stores.default, "release", fail)
        with pytest.raises(RuntimeError, match="refused"):
            lock(account(1, using=database), account(2, using=database)).acquire()
        assert current() == []
        assert stores.held() == ["default account:1", "default account:2"]
        Counter.objects.using(database).create(name="outside a transaction", value=1)
        with transaction.atomic(using=database), pytest.raises(AcquireTimeout):
            lock(account(1, using=database), wait=0).acquire()
    until(lambda: stores.held() == [])
