"""The scripts, and the arguments of scripts, that only Redlock uses: keys before, keys after, reply."""

import redis

from tests.contract.test_redis_scripts import (
    ALIVE,
    ANN,
    BOB,
    EVE,
    INDEX,
    LOCK,
    TOKENS,
    acquire,
    call,
    contents,
    server,  # noqa: F401 - a fixture
    waiting,
)

AHEAD = 10**14
"""Three years in microseconds: a counter that is further ahead counts as spoiled."""


def test_acquire_draws_no_token_below_the_one_that_was_proposed(server: redis.Redis) -> None:  # noqa: F811
    proposal = server.time()[0] * 1_000_000 + AHEAD
    token = call(server, "acquire", ANN, 30_000, "x", "owner", ALIVE, 0, 0, proposal)
    assert token == proposal
    assert int(server.get(TOKENS)) == proposal
    assert call(server, "acquire", ANN, 30_000, "x", "owner", ALIVE, 0, 0, proposal + 1) == proposal, "it is held"
    call(server, "release", ANN)
    assert call(server, "acquire", BOB, 30_000, "x", "owner", ALIVE, 0, 0, proposal) == proposal + 1


def test_release_leaves_the_queue_when_asked_to(server: redis.Redis) -> None:  # noqa: F811
    acquire(server, ANN)
    acquire(server, BOB)
    assert call(server, "release", BOB) == 2
    assert waiting(server) == [BOB]
    assert call(server, "release", BOB, 1) == 2
    assert waiting(server) == []
    assert server.hgetall(f"{LOCK}:w") == {}
    assert call(server, "release", ANN, 1) == 1


def test_adopted_token_is_noted_with_the_grant_and_in_the_counter(server: redis.Redis) -> None:  # noqa: F811
    drawn = acquire(server, ANN, ttl=12_345)
    before = server.time()[0] * 1_000_000
    assert call(server, "adopt", ANN, drawn + 5, keys=(LOCK, TOKENS)) >= before
    holder, token, _, owner = server.get(LOCK).split("|", 3)
    assert (holder, int(token), owner) == (ANN, drawn + 5, "owner of a")
    assert int(server.get(TOKENS)) == drawn + 5
    assert 12_000 < server.pttl(LOCK) <= 12_345


def test_adopted_token_makes_no_counter_go_back(server: redis.Redis) -> None:  # noqa: F811
    drawn = acquire(server, ANN)
    server.set(TOKENS, drawn + 100)
    assert call(server, "adopt", ANN, drawn - 1, keys=(LOCK, TOKENS)) > 0
    assert int(server.get(TOKENS)) == drawn + 100
    assert f"|{drawn}|" in server.get(LOCK)


def test_token_is_adopted_only_for_a_grant_that_is_there(server: redis.Redis) -> None:  # noqa: F811
    assert call(server, "adopt", ANN, 5, keys=(LOCK, TOKENS)) == 0
    acquire(server, ANN)
    before = contents(server)
    assert call(server, "adopt", EVE, AHEAD * 9, keys=(LOCK, TOKENS)) == 0
    assert contents(server) == before
    server.delete(LOCK)
    server.lpush(LOCK, "a key of another type")
    assert call(server, "adopt", ANN, 5, keys=(LOCK, TOKENS)) == 0


def test_restored_lease_is_what_it_was_elsewhere(server: redis.Redis) -> None:  # noqa: F811
    assert call(server, "restore", ANN, 12_345, AHEAD, "its | owner", keys=(TOKENS, INDEX, LOCK)) == 1
    holder, token, _, owner = server.get(LOCK).split("|", 3)
    assert (holder, int(token), owner) == (ANN, AHEAD, "its | owner")
    assert 12_000 < server.pttl(LOCK) <= 12_345
    assert int(server.get(TOKENS)) == AHEAD
    assert server.smembers(INDEX) == {LOCK}
    assert call(server, "release", ANN) == 1


def test_restoration_that_comes_late_leaves_a_greater_token(server: redis.Redis) -> None:  # noqa: F811
    acquire(server, ANN, floor=AHEAD)
    granted, left = server.get(LOCK), server.pttl(LOCK)
    assert call(server, "restore", ANN, 2 * left, AHEAD, "its | owner", keys=(TOKENS, INDEX, LOCK)) == 1
    assert server.get(LOCK) == granted
    assert server.pttl(LOCK) <= left


def test_restoration_marks_a_grant_that_was_not_heard_of(server: redis.Redis) -> None:  # noqa: F811
    """A node that was too slow has drawn a greater token, and the undo is on its way to it."""
    assert acquire(server, ANN) > 1000
    assert call(server, "restore", ANN, 12_345, 1000, "its | owner", keys=(TOKENS, INDEX, LOCK)) == 1
    assert server.get(LOCK).startswith(f"{ANN}|1000|0")
    assert call(server, "abandon", ANN, 1) == 0
    assert server.get(LOCK).startswith(ANN)


def test_what_is_not_free_is_not_restored(server: redis.Redis) -> None:  # noqa: F811
    acquire(server, BOB)
    server.set(TOKENS, AHEAD * 2)
    before = server.get(LOCK)
    keys = (TOKENS, INDEX, LOCK, "{b}")
    assert call(server, "restore", ANN, 12_345, AHEAD, "a", EVE, 23_456, AHEAD + 1, "e", keys=keys) == 1
    assert server.get(LOCK) == before
    assert server.get("{b}").startswith(f"{EVE}|{AHEAD + 1}|")
    assert server.pttl("{b}") > 23_000
    assert int(server.get(TOKENS)) == AHEAD * 2
