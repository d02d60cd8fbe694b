"""Processes that are killed, stopped or forked while they hold or wait."""

import ast

import pytest

from dlock_core import Lock
from dlock_core.backends.redis.backend import RedisBackend
from tests.faults.holders import fork, fork_out_of_block, hold, wait
from tests.faults.looking import holders, is_untouched, keys, waiters
from tests.processes import worker
from tests.servers import Server
from tests.waiting import until


def test_killed_holder_is_followed_when_its_ttl_is_over_and_leaves_nothing(
    redis_server: Server, direct: RedisBackend, prefix: str
) -> None:
    with worker(hold, redis_server.url, prefix, {"ttl": 1.0}) as holder:
        token = holder.hear()
        assert Lock(direct, "a").try_acquire() is None
        holder.kill()
        lease = Lock(direct, "a", wait=None).acquire()
    assert lease.token > token
    lease.release()
    assert is_untouched(direct, "a")
    assert keys(redis_server.url, prefix) <= {"locks"}


def test_killed_waiter_stalls_nobody_for_long_and_leaves_nothing(
    redis_server: Server, direct: RedisBackend, prefix: str
) -> None:
    first = Lock(direct, "a").acquire()
    with worker(wait, redis_server.url, prefix) as dead:
        until(lambda: len(waiters(direct, "a")) == 1)
        with worker(wait, redis_server.url, prefix) as alive:
            until(lambda: len(waiters(direct, "a")) == 2)
            dead.kill()
            first.release()
            assert alive.hear() > first.token
            alive.say("enough")
            alive.result()
    assert is_untouched(direct, "a")


@pytest.mark.parametrize("renew", [False, True])
def test_holder_that_was_stopped_beyond_its_ttl_knows_at_once_that_it_lost(
    redis_server: Server, direct: RedisBackend, prefix: str, renew: bool
) -> None:
    with worker(hold, redis_server.url, prefix, {"ttl": 0.6, "renew": renew}) as holder:
        token = holder.hear()
        holder.pause()
        lease = Lock(direct, "a", wait=None).acquire()
        assert lease.token > token
        holder.say("look")
        holder.resume()
        assert holder.hear() == (True, 0.0)
        holder.say("release")
        assert holder.hear() == "stolen"
    assert holders(direct, "a") == [lease.holder]
    lease.release()


def test_holder_that_was_stopped_for_a_moment_has_lost_nothing(
    redis_server: Server, direct: RedisBackend, prefix: str
) -> None:
    with worker(hold, redis_server.url, prefix, {"ttl": 60.0}) as holder:
        holder.hear()
        holder.pause()
        assert Lock(direct, "a").try_acquire() is None
        holder.say("look")
        holder.resume()
        lost, remaining = holder.hear()
        assert not lost
        assert remaining > 0
        holder.say("release")
        assert holder.hear() == "released"
    assert is_untouched(direct, "a")


def test_forked_child_owns_nothing_of_its_parent_and_can_lock_for_itself(
    redis_server: Server, direct: RedisBackend, prefix: str
) -> None:
    with worker(fork, redis_server.url, prefix) as parent:
        seen = ast.literal_eval(parent.hear())
        assert seen == {"released": "NotHeld", "remaining": 0.0, "lost": True, "taken": None, "kept": True}
        assert len(holders(direct, "a")) == 1
        parent.say("go on")
        assert parent.result() == (False, True)
    assert is_untouched(direct, "a")


@pytest.mark.parametrize("several", [False, True])
def test_forked_child_that_leaves_its_parents_block_releases_nothing(
    redis_server: Server, direct: RedisBackend, prefix: str, several: bool
) -> None:
    with worker(fork_out_of_block, redis_server.url, prefix, several) as parent:
        for _ in range(2):
            holder = parent.hear()
            assert holders(direct, "a") == [holder]
            parent.say("go on")
        assert parent.result() == "done"
    assert is_untouched(direct, "a")


def test_waiter_that_was_stopped_for_good_is_not_listed_for_longer_than_its_place(
    redis_server: Server, direct: RedisBackend, prefix: str
) -> None:
    """An open connection proves nothing: the machine behind it may be gone."""
    first = Lock(direct, "a").acquire()
    with worker(wait, redis_server.url, prefix) as gone:
        until(lambda: len(waiters(direct, "a")) == 1)
        gone.pause()
        until(lambda: not waiters(direct, "a"))
        first.release()
        gone.kill()
    assert is_untouched(direct, "a")


def test_waiter_whose_machine_vanished_at_its_turn_holds_others_up_for_no_longer_than_its_ttl(
    redis_server: Server, direct: RedisBackend, prefix: str
) -> None:
    first = Lock(direct, "a").acquire()
    with worker(wait, redis_server.url, prefix, 1.0) as gone:
        until(lambda: len(waiters(direct, "a")) == 1)
        gone.pause()
        first.release()
        lease = Lock(direct, "a", wait=None).acquire()
        assert lease.token > first.token
        lease.release()
        gone.kill()
    assert is_untouched(direct, "a")
