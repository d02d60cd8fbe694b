"""Each Lua script alone, against the promise in its header: keys before, keys after, reply."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from dlock_core.backends.redis.protocol import load_script
from tests.servers import Server

LOCK, TOKENS, INDEX = "{a}", "token", "held"
ANN, BOB, EVE = "a" * 32, "b" * 32, "e" * 32
ALIVE = 5000


@pytest.fixture
def server(any_redis: Server) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(any_redis.url, db=9, decode_responses=True) as client:
        client.flushdb()
        yield client
        client.flushdb()


def call(server: redis.Redis, name: str, *args: Any, keys: tuple[str, ...] = (LOCK, TOKENS, INDEX)) -> Any:
    return server.eval(load_script(name).text, len(keys), *keys, *args)


def acquire(
    server: redis.Redis,
    holder: str,
    ttl: int = 30_000,
    mode: str = "x",
    place: int = ALIVE,
    floor: int = 0,
    barge: int = 0,
    keys: tuple[str, ...] = (LOCK, TOKENS, INDEX),
) -> Any:
    return call(server, "acquire", holder, ttl, mode, f"owner of {holder[0]}", place, floor, barge, keys=keys)


def waiting(server: redis.Redis) -> list[str]:
    return server.zrange(f"{LOCK}:q", 0, -1)  # type: ignore[return-value]


def die(server: redis.Redis, holder: str) -> None:
    """Let the time pass within which a waiter must show that it lives."""
    alive, rest = server.hget(f"{LOCK}:w", holder).split("|", 1)  # type: ignore[union-attr]
    assert int(alive) > 0
    server.hset(f"{LOCK}:w", holder, f"1|{rest}")


def contents(server: redis.Redis) -> dict[bytes, bytes | None]:
    options = server.connection_pool.connection_kwargs | {"decode_responses": False}
    with redis.Redis.from_pool(redis.ConnectionPool(**options)) as raw:
        return {key: raw.dump(key) for key in sorted(raw.keys())}


def expire_share(server: redis.Redis, holder: str) -> None:
    server.zadd(f"{LOCK}:s", {holder: 1})


def test_acquire_of_a_free_lock_writes_a_plain_string_with_a_ttl(server: redis.Redis) -> None:
    token = acquire(server, ANN, ttl=12_345)
    holder, written, since, owner = server.get(LOCK).split("|", 3)
    assert (holder, int(written), owner) == (ANN, token, "owner of a")
    assert 12_000 < server.pttl(LOCK) <= 12_345
    assert abs(int(since) - server.time()[0]) < 60
    assert int(server.get(TOKENS)) == token
    assert server.smembers(INDEX) == {LOCK}
    assert set(server.keys()) == {LOCK, TOKENS, INDEX}


@pytest.mark.parametrize("mode", ["x", "s"])
def test_acquire_draws_the_servers_time_or_what_is_greater(server: redis.Redis, mode: str) -> None:
    seconds, micros = server.time()
    first = acquire(server, ANN, mode=mode)
    assert first >= seconds * 1_000_000 + micros
    call(server, "release", ANN)
    server.set(TOKENS, first + 10**12)
    assert acquire(server, ANN, mode=mode) == first + 10**12 + 1
    call(server, "release", ANN)
    assert acquire(server, ANN, mode=mode, floor=first + 2 * 10**12) == first + 2 * 10**12 + 1


@pytest.mark.parametrize("mode", ["x", "s"])
def test_acquire_by_the_holder_gives_the_same_token_and_a_full_ttl(server: redis.Redis, mode: str) -> None:
    token = acquire(server, ANN, ttl=1000, mode=mode)
    assert acquire(server, ANN, ttl=60_000, mode=mode) == token
    assert server.pttl(LOCK) > 50_000
    assert waiting(server) == []


@pytest.mark.parametrize("mode", ["x", "s"])
def test_acquire_by_the_holder_with_a_higher_floor_gives_a_greater_token(server: redis.Redis, mode: str) -> None:
    token = acquire(server, ANN, mode=mode)
    assert acquire(server, ANN, mode=mode, floor=token + 5) > token + 5
    assert call(server, "release", ANN) == 1
    assert server.exists(LOCK, f"{LOCK}:s", f"{LOCK}:o") == 0


def test_acquire_of_a_taken_lock_queues_up_once_and_tells_the_time_left(server: redis.Redis) -> None:
    acquire(server, ANN, ttl=20_000)
    for _ in range(2):
        retry_after, owner = acquire(server, BOB)
        assert 15_000 < retry_after <= 20_001
        assert owner.endswith("owner of a")
    acquire(server, EVE)
    assert waiting(server) == [BOB, EVE]
    assert len(server.hgetall(f"{LOCK}:w")) == 2
    assert server.pttl(f"{LOCK}:q") > 0
    assert server.pttl(f"{LOCK}:w") > 0


def test_acquire_without_a_place_leaves_no_place(server: redis.Redis) -> None:
    acquire(server, ANN)
    acquire(server, BOB, place=0)
    assert waiting(server) == []
    assert set(server.keys()) == {LOCK, TOKENS, INDEX}


def test_acquire_never_overtakes_the_queue_of_a_lock_that_expired(server: redis.Redis) -> None:
    acquire(server, ANN)
    acquire(server, BOB)
    server.delete(LOCK)
    retry_after, owner = acquire(server, EVE, place=0)
    assert retry_after > 0
    assert owner.endswith("owner of b")
    assert server.get(LOCK).startswith(BOB)
    assert 0 < server.pttl(LOCK) <= 2000
    assert server.lrange(f"wake:{BOB}", 0, -1) == [f"{BOB}|30000|{LOCK}"]


def test_acquire_that_barges_is_served_before_the_queue(server: redis.Redis) -> None:
    acquire(server, ANN)
    acquire(server, BOB)
    server.delete(LOCK)
    assert isinstance(acquire(server, EVE, barge=1), int)
    assert waiting(server) == [BOB]


def test_acquire_passes_over_waiters_that_died(server: redis.Redis) -> None:
    acquire(server, ANN)
    acquire(server, BOB)
    die(server, BOB)
    server.delete(LOCK)
    assert isinstance(acquire(server, EVE), int)
    assert waiting(server) == []
    assert server.hgetall(f"{LOCK}:w") == {}


def test_acquire_shared_beside_shared_and_not_beside_a_waiting_exclusive(server: redis.Redis) -> None:
    tokens = [acquire(server, holder, mode="s") for holder in (ANN, BOB)]
    assert tokens[0] < tokens[1]
    assert sorted(server.zrange(f"{LOCK}:s", 0, -1)) == [ANN, BOB]
    writer = "c" * 32
    assert isinstance(acquire(server, writer), list)
    assert isinstance(acquire(server, EVE, mode="s"), list)
    assert waiting(server) == [writer, EVE]


def test_acquire_forgets_shares_that_ran_out(server: redis.Redis) -> None:
    acquire(server, ANN, mode="s")
    acquire(server, BOB, mode="s")
    expire_share(server, ANN)
    assert isinstance(acquire(server, EVE), list)
    assert list(server.hgetall(f"{LOCK}:o")) == [BOB]
    expire_share(server, BOB)
    assert isinstance(acquire(server, EVE), int)
    assert server.exists(f"{LOCK}:s", f"{LOCK}:o") == 0


def test_acquire_takes_any_other_value_for_a_stranger(server: redis.Redis) -> None:
    server.set(LOCK, "somebody else", px=30_000)
    retry_after, owner = acquire(server, ANN)
    assert (retry_after, owner) == (100, "somebody else")
    assert server.get(LOCK) == "somebody else"
    server.delete(LOCK)
    server.rpush(LOCK, "a list")
    assert acquire(server, ANN)[1] == "a key of another type"
    assert server.lrange(LOCK, 0, -1) == ["a list"]


@pytest.mark.parametrize("mode", ["x", "s"])
def test_waiter_for_a_lease_whose_expiry_another_program_took_away_is_told_to_take_its_time(
    server: redis.Redis, mode: str
) -> None:
    acquire(server, ANN, mode=mode)
    if mode == "x":
        server.persist(LOCK)
    else:
        server.zadd(f"{LOCK}:s", {ANN: 1e300})
    for place in (ALIVE, 0):
        assert acquire(server, BOB, place=place) == [
            100,
            server.get(LOCK) if mode == "x" else server.hget(f"{LOCK}:o", ANN),
        ]


def test_release_ends_our_lease_and_nobody_elses(server: redis.Redis) -> None:
    assert call(server, "release", ANN) == 0
    acquire(server, ANN)
    assert call(server, "release", BOB) == 2
    assert call(server, "release", ANN[:-1]) == 2
    assert server.get(LOCK).startswith(ANN)
    assert call(server, "release", ANN) == 1
    assert call(server, "release", ANN) == 0
    assert set(server.keys()) == {TOKENS}


def test_release_hands_over_to_the_first_live_waiter_and_wakes_only_it(server: redis.Redis) -> None:
    first = acquire(server, ANN)
    for holder in (BOB, EVE, "d" * 32):
        acquire(server, holder)
    die(server, BOB)
    assert call(server, "release", ANN) == 1
    holder, token, *_ = server.get(LOCK).split("|")
    assert holder == EVE
    assert int(token) > first
    assert 0 < server.pttl(LOCK) <= 2000, "until it is confirmed, the time to claim it"
    assert server.keys("wake:*") == [f"wake:{EVE}"]
    assert 0 < server.pttl(f"wake:{EVE}") <= 2000
    assert waiting(server) == ["d" * 32]
    assert acquire(server, EVE) == int(token)
    assert server.pttl(LOCK) > 2000
    assert server.exists(f"wake:{EVE}") == 0


def claim(server: redis.Redis, holder: str, ttl: int = 30_000) -> Any:
    return call(server, "claim", holder, ttl, keys=(LOCK,))


def test_claim_starts_the_full_ttl_of_what_was_handed_over_and_of_nothing_else(server: redis.Redis) -> None:
    acquire(server, ANN, ttl=60_000)
    acquire(server, BOB)
    assert claim(server, BOB) is None
    assert claim(server, ANN[:-1]) is None
    assert server.pttl(LOCK) > 50_000
    call(server, "release", ANN)
    assert claim(server, ANN) is None
    assert server.pttl(LOCK) <= 2000
    assert claim(server, BOB) == int(server.get(LOCK).split("|")[1])  # type: ignore[union-attr]
    assert server.pttl(LOCK) > 20_000
    call(server, "release", BOB)
    assert claim(server, BOB) is None
    server.rpush(LOCK, "a list")
    assert claim(server, BOB) is None


EAR = "f" * 32
"""A listener: an event loop whose waiters share one wake-up list."""


def wait_with_listener(
    server: redis.Redis, holder: str, ttl: int = 30_000, mode: str = "x", keys: tuple[str, ...] = (LOCK, TOKENS, INDEX)
) -> Any:
    return call(server, "acquire", holder, ttl, mode, f"owner of {holder[0]}", ALIVE, 0, 0, 0, EAR, keys=keys)


def confirm(server: redis.Redis, **looked_after: str) -> Any:
    """Confirm the listener's hand-overs; `looked_after` maps a holder's letter to its lock, without braces."""
    locks = tuple(f"{{{lock}}}" for lock in looked_after.values())
    holders = [letter * 32 for letter in looked_after]
    return call(server, "confirm", 4000, 9000, *holders, keys=(f"wake:{EAR}", TOKENS, INDEX, *locks))


def let_hand_over_run_out(server: redis.Redis) -> None:
    """Hand the lock over to Bob, and let the claim run out before his listener hears of it."""
    acquire(server, ANN)
    wait_with_listener(server, BOB)
    call(server, "release", ANN)
    server.delete(LOCK)
    assert server.llen(f"wake:{EAR}") == 1


@pytest.mark.parametrize("mode", ["x", "s"])
def test_request_takes_off_the_list_what_an_earlier_hand_over_has_left(server: redis.Redis, mode: str) -> None:
    """Otherwise the listener would hear of a hand-over to a holder that has long had its lease."""
    let_hand_over_run_out(server)
    assert wait_with_listener(server, BOB, mode=mode) > 0
    assert server.llen(f"wake:{EAR}") == 0


def test_request_that_queues_again_takes_its_notice_off_the_list(server: redis.Redis) -> None:
    let_hand_over_run_out(server)
    acquire(server, EVE)
    assert wait_with_listener(server, BOB)[0] > 0
    call(server, "release", EVE)
    confirmed, _ = confirm(server)
    assert [holder for holder, _, _ in confirmed] == [BOB]


@pytest.mark.parametrize("mode", ["x", "s"])
def test_confirm_starts_the_full_ttl_of_all_that_was_handed_over_to_a_listener(server: redis.Redis, mode: str) -> None:
    locks = [(f"{{{letter}}}", TOKENS, INDEX) for letter in "abc"]
    for keys in locks:
        acquire(server, ANN, keys=keys)
        wait_with_listener(server, BOB, mode=mode, keys=keys)
        call(server, "release", ANN, keys=keys)
    call(server, "abandon", BOB, keys=locks[1])  # it is no longer the grant that was handed over
    acquire(server, EVE, ttl=50, keys=locks[1])
    confirmed, left = confirm(server)
    assert [(holder, lock) for holder, _, lock in confirmed] == [(BOB, "{a}"), (BOB, "{c}")]
    assert left == []
    for _, token, lock in confirmed:
        assert 20_000 < server.pttl(lock) <= 30_000
        if mode == "s":
            seconds, micros = server.time()
            now = seconds * 1000 + micros // 1000
            assert 20_000 < server.zscore(f"{lock}:s", BOB) - now <= 30_000
            assert min(server.pttl(f"{lock}:s"), server.pttl(f"{lock}:o")) > 20_000
            assert server.hget(f"{lock}:o", BOB).startswith(f"{BOB}|{token}|")
        else:
            assert server.get(lock).startswith(f"{BOB}|{token}|")
    assert server.pttl("{b}") <= 50
    assert not server.exists(f"wake:{EAR}")
    assert 3000 < server.pttl(f"wake:{EAR}:alive") <= 4000


def test_confirm_tells_a_listener_when_its_waiters_should_ask_again_and_keeps_their_queues(server: redis.Redis) -> None:
    acquire(server, ANN, ttl=20_000)
    acquire(server, ANN, ttl=50_000, mode="s", keys=("{b}", TOKENS, INDEX))
    acquire(server, BOB, ttl=20_000, mode="s", keys=("{b}", TOKENS, INDEX))
    server.set("{c}", "of another program", px=20_000)
    for letter, lock in zip("cde", "abc", strict=True):
        wait_with_listener(server, letter * 32, keys=(f"{{{lock}}}", TOKENS, INDEX))
        server.pexpire(f"{{{lock}}}:q", 5000)
        server.pexpire(f"{{{lock}}}:w", 5000)
    server.rpush("{d}", "a list")
    server.zadd("{d}:q", {ANN: 1})
    server.hset("{d}:w", ANN, "1|x|1|1||")
    server.set("{e}", f"{BOB}|1|1|", px=20_000)
    confirmed, left = confirm(server, c="a", d="b", e="c", a="d", b="e")
    assert confirmed == []
    held, shared, *others = left
    assert 10_000 < held <= 20_000
    assert 10_000 < shared <= 20_000, "the first share that runs out may be what is waited for"
    assert others == [0, 0, 0], "a stranger's lock, a key of another type, and a waiter without a position"
    for key in ("{a}:q", "{a}:w", "{b}:q", "{b}:w", "{c}:q"):
        assert 8000 < server.pttl(key) <= 9000


def test_hand_over_keeps_the_lock_listed_and_leaves_nothing_of_its_waiter(server: redis.Redis) -> None:
    acquire(server, ANN)
    acquire(server, BOB)
    call(server, "release", ANN)
    assert server.smembers(INDEX) == {LOCK}
    assert server.exists(f"{LOCK}:q", f"{LOCK}:w") == 0


@pytest.mark.parametrize("how", ["release", "abandon", "force_release"])
def test_lock_whose_last_waiter_has_died_is_free_and_not_listed(server: redis.Redis, how: str) -> None:
    token = acquire(server, ANN)
    acquire(server, BOB)
    die(server, BOB)
    assert call(server, how, token if how == "force_release" else ANN) == 1
    assert set(server.keys()) == {TOKENS}


@pytest.mark.parametrize("mode", ["x", "s"])
def test_hand_over_of_a_short_lease_lasts_no_longer_than_its_ttl(server: redis.Redis, mode: str) -> None:
    acquire(server, ANN, ttl=60_000)
    acquire(server, BOB, ttl=500, mode=mode)
    call(server, "release", ANN)
    assert 0 < server.pttl(LOCK) <= 500
    if mode == "s":
        assert 0 < server.pttl(f"{LOCK}:s") <= 500
        assert 0 < server.pttl(f"{LOCK}:o") <= 500
    assert server.exists(f"{LOCK}:s") == (mode == "s")


@pytest.mark.parametrize("mode", ["x", "s"])
def test_lock_that_is_taken_after_it_ran_out_under_its_waiters_is_listed(server: redis.Redis, mode: str) -> None:
    acquire(server, ANN)
    acquire(server, BOB)
    server.delete(LOCK, INDEX)
    acquire(server, EVE, mode=mode)
    assert server.smembers(INDEX) == {LOCK}


def test_release_lets_all_shared_waiters_in_up_to_the_next_exclusive(server: redis.Redis) -> None:
    acquire(server, ANN)
    acquire(server, BOB, mode="s")
    acquire(server, EVE, mode="s")
    acquire(server, "d" * 32)
    acquire(server, "f" * 32, mode="s")
    call(server, "release", ANN)
    assert sorted(server.zrange(f"{LOCK}:s", 0, -1)) == [BOB, EVE]
    assert waiting(server) == ["d" * 32, "f" * 32]


def test_release_of_the_last_live_share_frees_the_lock(server: redis.Redis) -> None:
    for holder in (ANN, BOB, EVE):
        acquire(server, holder, mode="s")
    expire_share(server, ANN)
    assert call(server, "release", ANN) == 2
    assert call(server, "release", BOB) == 1
    assert server.get(LOCK) == "shared"
    assert call(server, "release", EVE) == 1
    assert call(server, "release", EVE) == 0
    assert set(server.keys()) == {TOKENS}


def test_release_after_all_shares_ran_out_finds_a_free_lock(server: redis.Redis) -> None:
    acquire(server, ANN, mode="s")
    expire_share(server, ANN)
    assert call(server, "release", ANN) == 0
    assert set(server.keys()) == {TOKENS}


def test_release_leaves_the_queue_only_if_it_is_told_to(server: redis.Redis) -> None:
    for holder in (ANN, BOB, EVE):
        acquire(server, holder)
    assert call(server, "release", BOB) == 2
    assert waiting(server) == [BOB, EVE]
    assert server.hexists(f"{LOCK}:w", BOB)
    assert call(server, "release", BOB, 1) == 2
    assert waiting(server) == [EVE]
    assert server.hkeys(f"{LOCK}:w") == [EVE]


def test_release_leaves_a_key_of_another_type_alone(server: redis.Redis) -> None:
    server.rpush(LOCK, "a list")
    assert call(server, "release", ANN) == 2
    assert server.lrange(LOCK, 0, -1) == ["a list"]


def test_release_frees_a_lock_whose_queue_is_a_key_of_another_type(server: redis.Redis) -> None:
    acquire(server, ANN)
    server.set(f"{LOCK}:q", "text")
    assert call(server, "release", ANN) == 1
    assert not server.exists(LOCK)


def test_key_of_another_type_keeps_no_other_lease_from_its_renewal(server: redis.Redis) -> None:
    acquire(server, ANN, mode="s")
    server.delete(f"{LOCK}:s")
    server.set(f"{LOCK}:s", "text")
    server.set("{b}", f"{BOB}|1|1|", px=1000)
    assert renew(server, (LOCK, ANN, 60_000), ("{b}", BOB, 60_000)) == [0, 1]


@pytest.mark.parametrize("part", ["s", "o", "q", "w"])
def test_key_of_another_type_hides_no_other_lock(server: redis.Redis, part: str) -> None:
    acquire(server, ANN, mode="s")
    acquire(server, BOB)
    server.delete(f"{LOCK}:{part}")
    server.set(f"{LOCK}:{part}", "text")
    server.set("{b}", f"{BOB}|1|1|", px=1000)
    _, values, *_ = call(server, "inspect", "wake:", keys=(LOCK, "{b}"))
    assert values == ["shared", f"{BOB}|1|1|"]


def renew(server: redis.Redis, *pairs: tuple[str, str, int]) -> list[int]:
    keys = tuple(lock for lock, _, _ in pairs)
    holders, ttls = "".join(holder for _, holder, _ in pairs), [ttl for _, _, ttl in pairs]
    return call(server, "renew", holders, *ttls, keys=keys)  # type: ignore[no-any-return]


def test_renew_answers_each_and_pushes_only_what_is_ours(server: redis.Redis) -> None:
    acquire(server, ANN, ttl=1000)
    server.set("{b}", f"{BOB}|1|1|", px=1000)
    server.rpush("{d}", "a list")
    assert renew(server, (LOCK, ANN, 60_000), ("{b}", ANN, 60_000), ("{c}", ANN, 60_000), ("{d}", ANN, 60_000)) == [
        1,
        0,
        0,
        0,
    ]
    assert server.pttl(LOCK) > 50_000
    assert server.pttl("{b}") <= 1000
    assert server.exists("{c}") == 0


@pytest.mark.parametrize("mode", ["x", "s"])
def test_what_comes_late_never_shortens(server: redis.Redis, mode: str) -> None:
    def left() -> float:
        seconds, fraction = server.time()
        share = (server.zscore(f"{LOCK}:s", ANN) or 0) - (seconds * 1000 + fraction // 1000)
        return min(server.pttl(LOCK), share) if mode == "s" else server.pttl(LOCK)

    token = acquire(server, ANN, ttl=1000, mode=mode)
    assert renew(server, (LOCK, ANN, 60_000)) == [1]
    assert renew(server, (LOCK, ANN, 1000)) == [1]
    assert left() > 50_000
    assert acquire(server, ANN, ttl=1000, mode=mode) == token
    assert left() > 50_000
    assert acquire(server, ANN, ttl=1000, mode=mode, floor=token) > token
    assert left() > 50_000
    if mode == "x":
        claim(server, ANN, ttl=1000)
        call(server, "acquire_many", "owner", ANN, 1000, keys=(TOKENS, INDEX, LOCK))
        assert left() > 50_000


@pytest.mark.parametrize("mode", ["x", "s"])
def test_renew_heals_the_expiry_of_a_lease_that_was_granted_by_a_clock_that_has_gone_back(
    server: redis.Redis, mode: str
) -> None:
    acquire(server, ANN, ttl=3_600_000, mode=mode)
    text = f"{ANN}|7|{server.time()[0] + 3600}|owner"
    if mode == "x":
        server.set(LOCK, text, keepttl=True)
    else:
        server.hset(f"{LOCK}:o", ANN, text)
    assert renew(server, (LOCK, ANN, 1000)) == [1]
    if mode == "x":
        assert server.pttl(LOCK) <= 1000
    else:
        assert server.zscore(f"{LOCK}:s", ANN) <= server.time()[0] * 1000 + 2000


def test_renew_of_a_share_pushes_its_own_expiry_and_never_brings_one_back(server: redis.Redis) -> None:
    acquire(server, ANN, ttl=1000, mode="s")
    acquire(server, BOB, ttl=60_000, mode="s")
    before = server.zscore(f"{LOCK}:s", BOB)
    assert renew(server, (LOCK, ANN, 90_000)) == [1]
    assert server.zscore(f"{LOCK}:s", ANN) > before == server.zscore(f"{LOCK}:s", BOB)
    assert server.pttl(LOCK) > 80_000
    assert server.pttl(f"{LOCK}:o") > 80_000
    expire_share(server, ANN)
    assert renew(server, (LOCK, ANN, 90_000), (LOCK, EVE, 90_000)) == [0, 0]


def test_renew_takes_one_ttl_for_all(server: redis.Redis) -> None:
    acquire(server, ANN, ttl=1000)
    server.set("{b}", f"{BOB}|1|1|", px=1000)
    assert call(server, "renew", ANN + BOB, 60_000, keys=(LOCK, "{b}")) == [1, 1]
    assert min(server.pttl(LOCK), server.pttl("{b}")) > 50_000


def test_renew_of_more_leases_than_a_command_takes(server: redis.Redis) -> None:
    count = 2500
    keys = tuple(f"{{n{number}}}" for number in range(count))
    server.mset({key: f"{number:032x}|1|1|" for number, key in enumerate(keys)})
    server.set(keys[1200], f"{BOB}|1|1|")
    answers = call(server, "renew", "".join(f"{number:032x}" for number in range(count)), 60_000, keys=keys)
    assert [number for number, ours in enumerate(answers) if not ours] == [1200]
    assert all(server.pttl(keys[number]) > 50_000 for number in (0, 999, 1000, 2499))


def test_abandon_leaves_the_queue_and_nothing_else(server: redis.Redis) -> None:
    acquire(server, ANN)
    acquire(server, BOB)
    acquire(server, EVE)
    assert call(server, "abandon", BOB) == 1
    assert call(server, "abandon", BOB) == 0
    assert waiting(server) == [EVE]
    assert list(server.hgetall(f"{LOCK}:w")) == [EVE]
    assert server.get(LOCK).startswith(ANN)


@pytest.mark.parametrize("mode", ["x", "s"])
def test_abandon_undoes_a_grant_and_hands_over(server: redis.Redis, mode: str) -> None:
    acquire(server, ANN, mode=mode)
    acquire(server, BOB)
    assert call(server, "abandon", ANN) == 1
    assert server.get(LOCK).startswith(BOB)
    call(server, "abandon", BOB)
    assert set(server.keys()) == {TOKENS}


def test_abandon_of_a_waiting_exclusive_lets_the_shared_behind_it_in(server: redis.Redis) -> None:
    acquire(server, ANN, mode="s")
    acquire(server, BOB)
    acquire(server, EVE, mode="s")
    call(server, "abandon", BOB)
    assert sorted(server.zrange(f"{LOCK}:s", 0, -1)) == [ANN, EVE]


def test_abandon_leaves_strangers_alone(server: redis.Redis) -> None:
    server.set(LOCK, "somebody else")
    acquire(server, ANN)
    assert call(server, "abandon", ANN) == 1
    assert server.get(LOCK) == "somebody else"
    server.delete(LOCK)
    server.rpush(LOCK, "a list")
    assert call(server, "abandon", ANN) == 0
    assert server.lrange(LOCK, 0, -1) == ["a list"]


def test_force_release_needs_the_very_token(server: redis.Redis) -> None:
    token = acquire(server, ANN)
    for wrong in (token + 1, token - 1, 0, str(token)[:-1]):
        assert call(server, "force_release", wrong) == 0
    assert server.get(LOCK).startswith(ANN)
    acquire(server, BOB)
    assert call(server, "force_release", token) == 1
    assert server.get(LOCK).startswith(BOB)
    assert call(server, "force_release", token) == 0


def test_force_release_of_one_share_leaves_the_others(server: redis.Redis) -> None:
    tokens = {holder: acquire(server, holder, mode="s") for holder in (ANN, BOB)}
    assert call(server, "force_release", tokens[ANN]) == 1
    assert server.zrange(f"{LOCK}:s", 0, -1) == [BOB]
    assert call(server, "force_release", tokens[BOB]) == 1
    assert set(server.keys()) == {TOKENS}


def test_inspect_shows_holders_sharers_and_waiters_and_writes_nothing(server: redis.Redis) -> None:
    acquire(server, ANN)
    acquire(server, BOB)
    acquire(server, EVE, mode="s")
    before = contents(server)
    now, (value,), (left,), (number, sharers, waiters) = call(server, "inspect", "wake:", keys=(LOCK,))
    assert number == 1
    assert value.startswith(ANN)
    assert 0 < left <= 30_000
    assert sharers == []
    assert [(holder, place.split("|")[1]) for holder, _, place in waiters] == [(BOB, "x"), (EVE, "s")]
    assert abs(int(now) / 1000 - server.time()[0]) < 60
    assert contents(server) == before


def test_inspect_hides_shares_that_ran_out_and_shows_strangers(server: redis.Redis) -> None:
    acquire(server, ANN, mode="s")
    acquire(server, BOB, mode="s")
    expire_share(server, ANN)
    server.rpush("{b}", "a list")
    _, values, _, (number, sharers, waiters) = call(server, "inspect", "wake:", keys=("{b}", LOCK, "{c}"))
    assert values == ["a key of another type", "shared", ""]
    assert (number, [holder for holder, _, _ in sharers], waiters) == (2, [BOB], [])


def test_acquire_many_takes_all_or_none(server: redis.Redis) -> None:
    keys = (TOKENS, INDEX, "{a}", "{b}")
    tokens = call(server, "acquire_many", "owner", ANN + BOB, 30_000, keys=keys)
    assert len(set(tokens)) == 2
    assert server.get("{a}").startswith(ANN)
    assert server.get("{b}").startswith(BOB)
    call(server, "release", ANN, keys=("{a}", TOKENS, INDEX))
    assert call(server, "acquire_many", "owner", EVE + "d" * 32, 30_000, keys=keys) == []
    assert server.exists("{a}") == 0
    later = acquire(server, ANN)
    assert later > max(tokens)


def test_acquire_many_never_overtakes_a_queue_nor_a_stranger(server: redis.Redis) -> None:
    acquire(server, ANN)
    acquire(server, BOB)
    server.delete(LOCK)
    keys = (TOKENS, INDEX, LOCK, "{b}")
    assert call(server, "acquire_many", "owner", EVE + "d" * 32, 30_000, keys=keys) == []
    server.delete(f"{LOCK}:q", f"{LOCK}:w")
    server.rpush("{b}", "a list")
    assert call(server, "acquire_many", "owner", EVE + "d" * 32, 30_000, keys=keys) == []
    assert server.lrange("{b}", 0, -1) == ["a list"]


def test_acquire_many_repeats_a_grant_whose_reply_was_lost(server: redis.Redis) -> None:
    keys = (TOKENS, INDEX, "{a}", "{b}")
    first = call(server, "acquire_many", "owner", ANN + BOB, 30_000, 20_000, keys=keys)
    granted = server.mget("{a}", "{b}")
    assert call(server, "acquire_many", "owner", ANN + BOB, 30_000, 20_000, keys=keys) == first
    assert server.mget("{a}", "{b}") == granted
    assert server.pttl("{b}") <= 20_000 < server.pttl("{a}") <= 30_000
    assert int(server.get(TOKENS)) >= max(first)


def test_acquire_many_that_comes_late_changes_no_token_and_shortens_no_ttl(server: redis.Redis) -> None:
    alone = acquire(server, BOB, ttl=60_000, keys=("{b}", TOKENS, INDEX))
    tokens = call(server, "acquire_many", "owner", ANN + BOB, 30_000, keys=(TOKENS, INDEX, "{a}", "{b}"))
    assert tokens[1] == alone < tokens[0]
    assert server.get("{b}").startswith(f"{BOB}|{alone}|")
    assert server.pttl("{a}") <= 30_000 < server.pttl("{b}")


def release_many(server: redis.Redis, *holders: str, keys: tuple[str, ...]) -> Any:
    return call(server, "release_many", "".join(holders), keys=(INDEX, *keys))


def test_release_many_ends_what_is_ours(server: redis.Redis) -> None:
    keys = (TOKENS, INDEX, "{a}", "{b}")
    call(server, "acquire_many", "owner", ANN + BOB, 30_000, keys=keys)
    server.set("{c}", "of another program")
    server.rpush("{d}", "a list")
    acquire(server, EVE, mode="s", keys=("{e}", TOKENS, INDEX))
    five = ("{a}", "{b}", "{c}", "{d}", "{e}")
    assert release_many(server, ANN, BOB, ANN, ANN, EVE, keys=five) == [1, 1, 0, 0, 0]
    assert server.exists("{a}", "{b}") == 0
    assert server.exists("{c}", "{d}", "{e}") == 3
    assert server.smembers(INDEX) == {"{e}"}
    assert release_many(server, ANN, BOB, keys=five[:2]) == [0, 0]


def test_more_locks_than_a_command_takes_are_taken_and_ended_together(server: redis.Redis) -> None:
    count = 2500
    keys, holders = tuple(f"{{n{number}}}" for number in range(count)), "".join(f"{n:032x}" for n in range(count))
    taken = [call(server, "acquire_many", "owner", holders, 60_000, keys=(TOKENS, INDEX, *keys)) for _ in range(2)]
    assert [len(set(tokens)) for tokens in taken] == [count, count]
    assert server.scard(INDEX) == count
    acquire(server, ANN, keys=(keys[1700], TOKENS, INDEX))
    assert [number for number, ended in enumerate(release_many(server, holders, keys=keys)) if not ended] == [1700]
    assert server.smembers(INDEX) == {keys[1700]}
    call(server, "release", f"{1700:032x}", keys=(keys[1700], TOKENS, INDEX))
    assert call(server, "acquire_many", "owner", holders, 60_000, keys=(TOKENS, INDEX, *keys)) == []


def test_release_many_leaves_what_is_waited_for(server: redis.Redis) -> None:
    keys = (TOKENS, INDEX, LOCK, "{b}")
    call(server, "acquire_many", "owner", ANN + ANN, 30_000, keys=keys)
    acquire(server, BOB)
    assert release_many(server, ANN, ANN, keys=(LOCK, "{b}")) == [0, 1]
    assert server.get(LOCK).startswith(ANN)
    assert call(server, "release", ANN) == 1
    assert server.get(LOCK).startswith(BOB)


SPOILED = [str(2**53), str(2**63 - 1), str(2**64), "1e300", "inf", "-inf", "nan", "-5", "-1e300", "text", "", "0x"]


@pytest.mark.parametrize("counter", SPOILED)
@pytest.mark.parametrize("how", ["exclusive", "shared", "many"])
def test_counter_that_was_spoiled_heals(server: redis.Redis, counter: str, how: str) -> None:
    tokens = []
    for _ in range(2):
        server.set(TOKENS, counter)
        seconds, micros = server.time()
        for _ in range(2):
            if how == "many":
                (token,) = call(server, "acquire_many", "owner", ANN, 30_000, keys=(TOKENS, INDEX, LOCK))
            else:
                token = acquire(server, ANN, mode="x" if how == "exclusive" else "s")
            assert 0 <= token - (seconds * 1_000_000 + micros) < 60_000_000
            assert 0 <= int(server.get(TOKENS)) - token <= 1
            tokens.append(token)
            call(server, "release", ANN)
    assert tokens == sorted(set(tokens))


def test_counter_that_is_no_text_is_made_anew(server: redis.Redis) -> None:
    for mode in ("x", "s"):
        server.delete(TOKENS)
        server.rpush(TOKENS, "of another program")
        token = acquire(server, ANN, mode=mode)
        assert int(server.get(TOKENS)) == token
        call(server, "release", ANN)


def test_set_of_held_locks_does_not_grow_by_locks_that_ran_out(server: redis.Redis) -> None:
    acquire(server, BOB, ttl=600_000)
    server.sadd(INDEX, *[f"{{over{number}}}" for number in range(3000)])
    for number in range(2000):  # one grant in 64 tidies up, by chance
        acquire(server, ANN, ttl=1, keys=(f"{{over{number}}}", TOKENS, INDEX))
    assert server.scard(INDEX) < 1500
    assert server.sismember(INDEX, LOCK), "it is held"


def test_lock_that_is_waited_for_stays_in_the_set_of_held_locks(server: redis.Redis) -> None:
    acquire(server, ANN)
    acquire(server, BOB)
    server.delete(LOCK)
    for number in range(1000):
        acquire(server, EVE, keys=(f"{{n{number}}}", TOKENS, INDEX))
        call(server, "release", EVE, keys=(f"{{n{number}}}", TOKENS, INDEX))
    assert server.smembers(INDEX) == {LOCK}


def test_single_try_of_a_strangers_lock_is_not_listed(server: redis.Redis) -> None:
    server.set(LOCK, "of another program")
    acquire(server, ANN, place=0)
    assert server.scard(INDEX) == 0
    acquire(server, ANN, place=ALIVE)
    assert server.smembers(INDEX) == {LOCK}


def test_queue_of_waiters_that_vanished_is_gone_in_seconds(server: redis.Redis) -> None:
    acquire(server, ANN)
    acquire(server, BOB)
    for key in (f"{LOCK}:q", f"{LOCK}:w"):
        assert ALIVE < server.pttl(key) <= 3 * ALIVE


def test_single_try_does_not_shorten_the_life_of_the_queue(server: redis.Redis) -> None:
    acquire(server, ANN)
    acquire(server, BOB)
    acquire(server, EVE, place=0)
    assert server.pttl(f"{LOCK}:q") > ALIVE


def test_inspect_hides_waiters_that_died(server: redis.Redis) -> None:
    acquire(server, ANN)
    for waiter in (BOB, EVE):
        acquire(server, waiter)
    die(server, BOB)
    *_, (_, _, waiters) = call(server, "inspect", "wake:", keys=(LOCK,))
    assert [holder for holder, _, _ in waiters] == [EVE]


def test_waiters_keep_their_order_when_the_servers_clock_steps_back(server: redis.Redis) -> None:
    acquire(server, ANN)
    acquire(server, BOB)
    later = server.zscore(f"{LOCK}:q", BOB) + 3_600_000_000  # BOB queued before the clock was set back by an hour
    server.zadd(f"{LOCK}:q", {BOB: later})
    acquire(server, EVE)
    acquire(server, EVE)
    assert waiting(server) == [BOB, EVE]
    acquire(server, "f" * 32, barge=1)
    assert waiting(server) == ["f" * 32, BOB, EVE]
