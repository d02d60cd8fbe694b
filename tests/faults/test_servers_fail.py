"""Servers forget, restart, refuse or are away: they are unavailable with the reason, never "taken"; no secret shows."""

import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from dlock_core import AcquireTimeout, BackendUnavailable, LeaseLost, Lock, MultiLock, Released
from dlock_core.backend import Renewal
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.leases.acquisition import new_request
from dlock_core.options import LockOptions
from dlock_core.runtime import BLOCKING, run
from dlock_core.testing.contract.harness import Harness
from tests import servers
from tests.conftest import start
from tests.faults.looking import holders, is_untouched, waiters
from tests.servers import Server
from tests.waiting import until

SECRET = "hunter2"
StartServer = Callable[..., Server]


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[StartServer]:
    """Yield a function that starts a Redis for this test alone, which may break it."""
    running: list[Iterator[Server]] = []

    def begin(*options: str) -> Server:
        running.append(start(lambda: servers.redis(tmp_path / f"redis{len(running)}", *options)))
        return next(running[-1])

    yield begin
    for server in running:
        next(server, None)


@pytest.fixture
def own_redis(start_redis: StartServer) -> Server:
    return start_redis()


@pytest.fixture
def backend(own_redis: Server, prefix: str) -> Iterator[RedisBackend]:
    backend = RedisBackend.from_url(own_redis.url, prefix=prefix, timeout=1.0)
    yield backend
    backend.close()


@pytest.fixture
def admin(own_redis: Server) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own_redis.url) as client:
        yield client


def test_holder_is_told_of_its_loss_after_flushall_and_the_next_token_is_greater(
    harness: Harness, admin: redis.Redis
) -> None:
    told: list[bool] = []
    lease = harness.acquire("a", ttl=1.0, on_lost=lambda: told.append(True))
    admin.flushall()
    harness.until(lambda: told)
    assert lease.lost
    assert harness.do(lease.release) is Released.EXPIRED
    assert harness.acquire("a").token > lease.token


def test_release_after_flushall_says_that_the_lease_was_gone(harness: Harness, admin: redis.Redis) -> None:
    lease = harness.acquire("a")
    admin.flushall()
    assert harness.do(lease.release) is Released.EXPIRED


def test_waiter_gets_the_lock_after_flushall(harness: Harness, admin: redis.Redis) -> None:
    first = harness.acquire("a")
    pending = harness.queue_up("a")
    admin.flushall()
    assert pending.result(30).token > first.token


def test_forgotten_scripts_are_loaded_again_without_notice(harness: Harness, admin: redis.Redis) -> None:
    first = harness.acquire("a", ttl=1.0)
    pending = harness.queue_up("a")
    for _ in range(3):
        admin.script_flush()
        before = harness.renewals(first)
        harness.observed.until(lambda _, before=before: harness.renewals(first) > before)  # type: ignore[misc]
    admin.script_flush()
    assert harness.do(first.release) is Released.RELEASED
    admin.script_flush()
    assert harness.do(pending.result(30).release) is Released.RELEASED
    assert harness.holders("a") == []


def test_restart_that_kept_its_data_ends_no_lease(harness: Harness, own_redis: Server) -> None:
    lease = harness.acquire("a", ttl=60)
    pending = harness.queue_up("a")
    own_redis.restart(keep_data=True)
    harness.do(lease.renew)
    assert not lease.lost
    assert harness.try_acquire("a") is None
    assert harness.do(lease.release) is Released.RELEASED
    assert pending.result(30).token > lease.token


@pytest.mark.parametrize("shared", [False, True])
def test_lock_that_was_to_be_released_while_the_server_restarted_is_free_when_it_is_back(
    harness: Harness, own_redis: Server, shared: bool
) -> None:
    lease = harness.acquire("a", ttl=1000, shared=shared)
    own_redis.stop()
    with pytest.raises(BackendUnavailable):
        harness.do(lease.release)
    own_redis.restart(keep_data=True)
    assert harness.acquire("a", wait=None, ttl=1000).token > lease.token


def test_lock_that_was_to_be_released_while_a_script_kept_the_server_busy_is_free_when_it_has_ended(
    harness: Harness, admin: redis.Redis, own_redis: Server
) -> None:
    lease = harness.acquire("a", ttl=1000)
    admin.config_set(
        "busy-reply-threshold" if b"busy" in repr(admin.config_get("busy*")).encode() else "lua-time-limit", 1
    )
    with ThreadPoolExecutor(1) as pool, redis.Redis.from_url(own_redis.url, socket_timeout=None) as busy:
        running = pool.submit(busy.eval, "while true do end", 0)
        until(lambda: is_busy(admin))
        with pytest.raises(BackendUnavailable, match=r"(?i)busy"):
            harness.do(lease.release)
        admin.script_kill()
        with pytest.raises(redis.ResponseError):
            running.result()
    assert harness.acquire("a", wait=None, ttl=1000).token > lease.token


def is_busy(admin: redis.Redis) -> bool:
    try:
        admin.ping()
    except redis.ResponseError as error:
        return "BUSY" in str(error)
    return False


def test_restart_that_lost_its_data_ends_the_lease_and_tokens_still_grow(harness: Harness, own_redis: Server) -> None:
    lease = harness.acquire("a", ttl=60)
    own_redis.restart(keep_data=False)
    with pytest.raises(LeaseLost):
        harness.do(lease.renew)
    assert lease.lost
    assert harness.acquire("a").token > lease.token


def test_waiter_survives_a_restart_that_lost_its_data(harness: Harness, own_redis: Server) -> None:
    first = harness.acquire("a")
    pending = harness.queue_up("a")
    own_redis.restart(keep_data=False)
    assert pending.result(30).token > first.token


def test_server_that_stands_still_for_a_moment_costs_no_lease(harness: Harness, own_redis: Server) -> None:
    lease = harness.acquire("a", ttl=5.0)
    pending = harness.queue_up("a")
    own_redis.pause()
    before = harness.renewals(lease)
    harness.observed.until(lambda _: harness.renewals(lease) > before)
    own_redis.resume()
    harness.do(lease.renew)
    assert harness.do(lease.release) is Released.RELEASED
    assert pending.result(30).token > lease.token


def test_server_that_went_away_while_we_held_is_unavailable_and_the_lease_is_lost_in_time(
    harness: Harness, own_redis: Server
) -> None:
    told: list[bool] = []
    lease = harness.acquire("a", ttl=1.0, on_lost=lambda: told.append(True))
    own_redis.kill()
    assert not lease.lost
    harness.until(lambda: told)
    with pytest.raises(LeaseLost, match=r"could not be renewed in time: ConnectionError"):
        lease.ensure_held()
    with pytest.raises(BackendUnavailable):
        harness.do(lease.release)
    assert told == [True]


@pytest.mark.parametrize("wait", [0, 0.2])
def test_server_that_is_not_there_is_unavailable_and_not_taken(
    harness: Harness, own_redis: Server, wait: float
) -> None:
    own_redis.kill()
    for acquire in (harness.acquire, harness.try_acquire):
        with pytest.raises(BackendUnavailable, match="lock 'a': ConnectionError") as caught:
            acquire("a", wait=wait)
        assert isinstance(caught.value.__cause__, redis.ConnectionError | OSError)
        assert caught.value.retry_after > 0


def test_read_only_replica_is_unavailable_and_not_taken(start_redis: StartServer, prefix: str) -> None:
    replica = start_redis("--replicaof", "127.0.0.1", str(servers.free_port()))
    store = RedisBackend.from_url(replica.url, prefix=prefix)
    with pytest.raises(BackendUnavailable, match=r"(?i)read.?only"):
        Lock(store, "a", wait=0.1).acquire()
    assert holders(store, "a") == []


def test_holder_on_a_server_that_became_read_only_keeps_its_lease_until_its_own_time(
    harness: Harness, admin: redis.Redis
) -> None:
    lease = harness.acquire("a", ttl=60, renew=False)
    admin.replicaof("127.0.0.1", servers.free_port())  # type: ignore[no-untyped-call]
    for step in (lease.renew, lease.release):
        with pytest.raises(BackendUnavailable, match=r"(?i)read.?only"):
            harness.do(step)
    assert not lease.lost
    admin.replicaof("no", "one")  # type: ignore[no-untyped-call]
    assert harness.do(lease.release) is Released.RELEASED


def test_full_server_grants_nothing_but_lets_holders_renew_release_and_hand_over(
    harness: Harness, admin: redis.Redis, backend: RedisBackend
) -> None:
    shared, lease = harness.acquire("s", shared=True, renew=False), harness.acquire("a", renew=False)
    pending = harness.queue_up("a")
    admin.config_set("maxmemory-policy", "noeviction")
    admin.config_set("maxmemory", 1)
    try:
        with pytest.raises(BackendUnavailable, match=r"OOM|used memory"):
            harness.acquire("b", wait=0.1)
        assert is_untouched(backend, "b")
        harness.do(lease.renew)
        harness.do(shared.renew)
        assert harness.do(shared.release) is Released.RELEASED
        assert harness.do(lease.release) is Released.RELEASED
        assert holders(backend, "a")
    finally:
        admin.config_set("maxmemory", 0)
    assert pending.result(30).token > lease.token


def test_batch_of_renewals_survives_a_full_server(admin: redis.Redis, backend: RedisBackend) -> None:
    requests = [new_request(f"a:{part}", LockOptions(30.0, 0.0, shared=part % 2 == 0)) for part in range(4)]
    renewals = [Renewal(request, run(backend.try_acquire(BLOCKING, request))) for request in requests]  # type: ignore[arg-type]
    admin.config_set("maxmemory", 1)
    try:
        assert run(backend.renew(BLOCKING, renewals)) == [30.0] * 4
    finally:
        admin.config_set("maxmemory", 0)


@pytest.mark.parametrize(
    "credentials", [f":{SECRET}", f"app:{SECRET}", ""], ids=["wrong password", "wrong user", "none"]
)
@pytest.mark.parametrize("protocol", [2, 3])
def test_refused_credentials_are_told_at_once_and_never_shown(
    start_redis: StartServer, prefix: str, caplog: pytest.LogCaptureFixture, credentials: str, protocol: int
) -> None:
    server = start_redis("--requirepass", "something else")
    at = f"{credentials}@" if credentials else ""
    store = RedisBackend.from_url(f"redis://{at}127.0.0.1:{server.port}/0?protocol={protocol}", prefix=prefix)
    with caplog.at_level(logging.DEBUG), pytest.raises(BackendUnavailable, match="refused our credentials") as caught:
        Lock(store, "a", wait=None).acquire()
    assert_no_secret_in(caught.value)
    assert SECRET not in caplog.text
    assert SECRET not in repr(store)


def test_missing_permission_is_told_at_once(own_redis: Server, admin: redis.Redis, prefix: str) -> None:
    admin.acl_setuser("reader", enabled=True, passwords=[f"+{SECRET}"], keys=["*"], commands=["+@read", "+@connection"])
    store = RedisBackend.from_url(f"redis://reader:{SECRET}@127.0.0.1:{own_redis.port}/0", prefix=prefix)
    with pytest.raises(BackendUnavailable, match=r"our user lacks a permission") as caught:
        Lock(store, "a", wait=None).acquire()
    assert SECRET not in str(caught.value)


def assert_no_secret_in(error: Any) -> None:
    while error is not None:
        assert SECRET not in f"{error!s} {error!r} {vars(error)}"
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("command", ["HELLO", "AUTH"])
@pytest.mark.parametrize("credentials", [f":{SECRET}", f"app:{SECRET}"])
def test_password_is_not_shown_where_the_server_does_not_know_the_command_that_has_it(
    start_redis: StartServer, prefix: str, caplog: pytest.LogCaptureFixture, command: str, credentials: str
) -> None:
    server = start_redis("--rename-command", command, "another")
    protocol = 3 if command == "HELLO" else 2
    store = RedisBackend.from_url(f"redis://{credentials}@127.0.0.1:{server.port}/0?protocol={protocol}", prefix=prefix)
    with caplog.at_level(logging.DEBUG), pytest.raises(BackendUnavailable, match=command) as caught:
        Lock(store, "a", wait=2).acquire()
    assert_no_secret_in(caught.value)
    assert SECRET not in caplog.text


@pytest.mark.parametrize("command", ["EVALSHA", "SET"], ids=["sent", "in a script"])
def test_command_that_operators_have_renamed_is_told_at_once(
    start_redis: StartServer, prefix: str, command: str
) -> None:
    server = start_redis("--rename-command", command, "another")
    store = RedisBackend.from_url(f"redis://127.0.0.1:{server.port}/0", prefix=prefix)
    with pytest.raises(BackendUnavailable, match="does not know a command") as caught:
        Lock(store, "a", wait=2).acquire()
    assert caught.value.refused


@pytest.mark.parametrize("command", ["get", "getrange", "set", "time", "zadd"])
def test_permission_that_only_a_script_needs_is_told_at_once_and_never_as_another_holder(
    denied: Callable[[str], RedisBackend], command: str
) -> None:
    with pytest.raises(BackendUnavailable, match="our user lacks a permission"):
        hold_renewed_and_contended(denied(command))


@pytest.fixture
def denied(any_redis: Server) -> Iterator[Callable[[str], RedisBackend]]:
    """Yield a function that makes a store for a user with the rights of the operators' page, except one command."""
    with redis.Redis.from_url(any_redis.url) as admin:
        admin.script_flush()
        always, _ = documented_acl()
        stores: list[RedisBackend] = []

        def deny(command: str) -> RedisBackend:
            admin.execute_command(  # type: ignore[no-untyped-call]
                "ACL", "SETUSER", "shop", "reset", "on", f">{SECRET}", "~dlock:*", *always, f"-{command}"
            )
            stores.append(RedisBackend.from_url(f"redis://shop:{SECRET}@127.0.0.1:{any_redis.port}/0"))
            return stores[-1]

        yield deny
        for store in stores:
            store.close()
        admin.acl_deluser("shop")
        admin.delete(*admin.keys("dlock:*"), "dlock:token")


def test_release_that_lacks_a_permission_is_never_called_stolen_and_ends_nothing(
    any_redis: Server, denied: Callable[[str], RedisBackend]
) -> None:
    store, permitted = denied("rpush"), RedisBackend.from_url(any_redis.url)
    lease = Lock(store, "a").acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Lock(permitted, "a").acquire)
        until(lambda: waiters(permitted, "a"))
        for _ in range(2):
            with pytest.raises(BackendUnavailable, match="our user lacks a permission"):
                lease.release()
            assert holders(permitted, "a") == [lease.holder]
            until(lambda: waiters(permitted, "a"))
        assert run(permitted.force_release(BLOCKING, "a", lease.token))
        waiting.result().release()
    permitted.close()


@pytest.mark.parametrize("command", ["get", "zrange", "hget", "zrangebyscore"])
def test_operator_who_lacks_a_permission_is_told_so_and_not_that_nothing_is_held(
    any_redis: Server, denied: Callable[[str], RedisBackend], command: str
) -> None:
    permitted = RedisBackend.from_url(any_redis.url)
    leases = [Lock(permitted, name, shared=name == "s").acquire() for name in "as"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Lock(permitted, "a").acquire)
        until(lambda: waiters(permitted, "a"))
        store = denied(command)
        with pytest.raises(BackendUnavailable, match="our user lacks a permission"):
            run(store.force_release(BLOCKING, "a", leases[0].token) if command == "get" else store.inspect(BLOCKING))
        for lease in leases:
            assert lease.release() is Released.RELEASED
        waiting.result().release()
    permitted.close()


def hold_renewed_and_contended(store: RedisBackend) -> None:
    lease = Lock(store, "a", wait=None).acquire()
    try:
        lease.renew()
        with ThreadPoolExecutor(1) as pool, pytest.raises(AcquireTimeout):
            pool.submit(Lock(store, "a", wait=0.01).acquire).result()
    finally:
        lease.release()


def documented_acl() -> tuple[list[str], dict[str, str]]:
    """Read from the operators' page which rights a user always needs, and which ones for further features."""
    page = (Path(__file__).parents[2] / "docs" / "howto" / "operations.md").read_text()
    always = re.findall(r"ACL SETUSER dlock on >password ~dlock:\* (.*)", page)[0].split()
    more = re.findall(r"`(\S+)` in a database other than 0, `(\S+)` with `client_name` in the URL", page)[0]
    doctor = re.findall(r"`(\S+)` for the doctor", page)[0]
    return always, {"": "", "/1": more[0], "?client_name=shop": more[1], "/0?protocol=3": "", "doctor": doctor}


@pytest.mark.parametrize("rest", ["", "/1", "?client_name=shop", "/0?protocol=3", "doctor"])
def test_user_who_may_do_what_the_operators_page_says_can_do_everything(any_redis: Server, rest: str) -> None:
    always, more = documented_acl()
    with redis.Redis.from_url(any_redis.url) as admin:
        admin.script_flush()
        admin.execute_command("ACL", "SETUSER", "shop", "reset", "on", f">{SECRET}", "~dlock:*", *always)  # type: ignore[no-untyped-call]
        store = RedisBackend.from_url(
            f"redis://shop:{SECRET}@127.0.0.1:{any_redis.port}{'' if rest == 'doctor' else rest}"
        )
        try:
            if more[rest] and rest != "doctor":
                with pytest.raises(BackendUnavailable, match="our user lacks a permission"):
                    Lock(store, "a", wait=0).acquire()
                store.close()
            if more[rest]:
                admin.execute_command("ACL", "SETUSER", "shop", more[rest])  # type: ignore[no-untyped-call]
            do_everything(store)
            found = run(store.diagnose(BLOCKING))
            assert (rest == "doctor") is not any("permission" in one.measured for one in found)
        finally:
            store.close()
            admin.acl_deluser("shop")


def do_everything(store: RedisBackend) -> None:
    for shared in (False, True):
        lock = Lock(store, "a", shared=shared, wait=None)
        lease = lock.acquire()
        lease.renew(20.0)
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(Lock(store, "a", wait=10).acquire)
            until(lambda: len(waiters(store, "a")) == 1)
            assert pool.submit(Lock(store, "a").try_acquire).result() is None
            assert [state.name for state in run(store.inspect(BLOCKING))] == ["a"]
            assert lease.release() is Released.RELEASED
            second = waiting.result()
        assert run(store.force_release(BLOCKING, "a", second.token))
        assert second.release() is not Released.RELEASED
    with MultiLock(store, ["a", "b", "c"]), ThreadPoolExecutor(1) as pool, pytest.raises(AcquireTimeout):
        pool.submit(Lock(store, "b", wait=0.01).acquire).result()
    assert is_untouched(store, "a")


def test_right_password_is_a_store_like_any_other(start_redis: StartServer, prefix: str) -> None:
    server = start_redis("--requirepass", SECRET)
    store = RedisBackend.from_url(f"redis://:{SECRET}@127.0.0.1:{server.port}/0", prefix=prefix)
    with Lock(store, "a"):
        assert Lock(store, "b").try_acquire().release() is Released.RELEASED  # type: ignore[union-attr]


def test_password_that_changed_ends_no_lease_by_itself(harness: Harness, admin: redis.Redis) -> None:
    lease = harness.acquire("a")
    admin.config_set("requirepass", "new")
    assert harness.do(lease.release) is Released.RELEASED
    harness.observed.backend.close()
    harness.until(lambda: is_refused(harness))


def is_refused(harness: Harness) -> bool:
    try:
        lease = harness.acquire("b", wait=0)
    except BackendUnavailable as error:
        return "credentials" in str(error)
    harness.do(lease.release)
    return False


@pytest.mark.parametrize("kind", ["list", "hash", "set", "zset", "stream"])
def test_key_of_another_type_is_taken_and_never_overwritten(
    harness: Harness, admin: redis.Redis, backend: RedisBackend, kind: str
) -> None:
    key = backend.lock_key("a")
    make = {"list": admin.rpush, "hash": lambda k, v: admin.hset(k, v, v), "set": admin.sadd}
    make |= {"zset": lambda k, v: admin.zadd(k, {v: 1}), "stream": lambda k, v: admin.xadd(k, {v: v})}
    make[kind](key, "precious")
    before = admin.dump(key)
    assert harness.try_acquire("a") is None
    if kind != "list":
        assert harness.try_acquire("a", shared=True) is None
    pending = harness.begin_to_wait("a")
    (state,) = run(backend.inspect(BLOCKING, "a"))
    assert "not dlock" in state.holders[0].owner
    assert not harness.call_store("force_release", "a", 1)
    assert admin.dump(key) == before
    admin.delete(key)
    assert pending.result(30).token > 0
    assert waiters(backend, "a") == []


def test_two_servers_are_two_stores(start_redis: StartServer, own_redis: Server, prefix: str) -> None:
    other = RedisBackend.from_url(start_redis().url, prefix=prefix)
    with Lock(RedisBackend.from_url(own_redis.url, prefix=prefix), "a"), Lock(other, "a"):
        until(lambda: holders(other, "a"))
