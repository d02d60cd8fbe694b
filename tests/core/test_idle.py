"""Idle connections: which are used again, which are closed, and when."""

import asyncio
import os
from dataclasses import dataclass

import pytest

from dlock_core.backends import idle
from dlock_core.backends.idle import MAX_IDLE_S, IdlePool, LoopPools
from tests.garbage import collect_garbage


@dataclass(eq=False)
class Connection:
    number: int
    is_open: bool = True
    is_usable: bool = True

    def close(self) -> None:
        self.is_open = False


class Time:
    now = 100.0


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(idle, "clock", lambda: time.now)
    return time


def connections(count: int) -> list[Connection]:
    return [Connection(number) for number in range(count)]


def pool_of(*kept: Connection, size: int = 10, **options: object) -> IdlePool[Connection]:
    pool = IdlePool(Connection.close, size, **options)  # type: ignore[arg-type]
    for connection in kept:
        pool.put(connection)
    return pool


def test_last_used_is_taken_first() -> None:
    one, two = connections(2)
    pool = pool_of(one, two)
    assert [pool.take(), pool.take(), pool.take()] == [two, one, None]


def test_more_than_the_size_are_closed_oldest_first() -> None:
    kept = connections(5)
    pool = pool_of(*kept, size=3)
    assert [connection.is_open for connection in kept] == [False, False, True, True, True]
    assert pool.take() is kept[-1]


def test_connection_that_was_idle_for_long_is_closed_when_another_is_put_back(time: Time) -> None:
    old, new = connections(2)
    pool = pool_of(old)
    time.now += MAX_IDLE_S
    pool.put(new)
    assert (old.is_open, new.is_open) == (False, True)


def test_connection_that_was_idle_for_long_is_not_used_again(time: Time) -> None:
    (old,) = connections(1)
    pool = pool_of(old)
    time.now += MAX_IDLE_S
    assert pool.take() is None
    assert not old.is_open


def test_connection_is_asked_whether_it_works_unless_it_was_used_a_moment_ago(time: Time) -> None:
    dead, fresh = connections(2)
    dead.is_usable = fresh.is_usable = False
    pool = pool_of(dead, is_usable=lambda connection: connection.is_usable, trusted_s=1.0)
    time.now += 1.0
    pool.put(fresh)
    assert pool.take() is fresh
    assert pool.take() is None
    assert not dead.is_open


def test_pool_that_was_shut_closes_what_is_put_back() -> None:
    one, two = connections(2)
    pool = pool_of(one)
    pool.shut()
    pool.put(two)
    assert (one.is_open, two.is_open, pool.take()) == (False, False, None)


def test_pool_that_is_garbage_closes_its_connections() -> None:
    (one,) = connections(1)
    pool = pool_of(one)
    del pool
    collect_garbage()
    assert not one.is_open


@pytest.mark.parametrize("is_inherited", [False, True])
def test_forked_child_uses_no_connection_of_its_parent(is_inherited: bool) -> None:
    """If the child closed a database session, it would end for both; with `is_inherited` the child keeps it open."""
    (one,) = connections(1)
    pool = pool_of(one, is_inherited=is_inherited)
    if (child := os.fork()) == 0:
        os._exit(0 if pool.take() is None and one.is_open is is_inherited else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert pool.take() is one


def test_each_loop_has_its_own_connections_and_closes_them_at_its_end() -> None:
    one, two = connections(2)
    pools: LoopPools[Connection] = LoopPools(Connection.close, 10)

    async def main(connection: Connection) -> Connection | None:
        found = pools.here().take()
        pools.here().put(connection)
        assert connection.is_open
        return found

    assert [asyncio.run(main(one)), asyncio.run(main(two))] == [None, None]
    assert not one.is_open
    assert not two.is_open


def test_forked_child_neither_uses_nor_closes_what_a_loop_of_its_parent_has() -> None:
    (one,) = connections(1)
    pools: LoopPools[Connection] = LoopPools(Connection.close, 10)

    async def main() -> tuple[int, Connection | None]:
        pools.here().put(one)
        if (child := os.fork()) == 0:
            os._exit(0 if not pools._pools and one.is_open else 1)  # No loop runs in the child.
        return os.waitpid(child, 0)[1], pools.here().take()

    assert asyncio.run(main()) == (0, one)


def test_connections_of_a_loop_are_closed_in_that_loop() -> None:
    closed_in: list[object] = []
    pools: LoopPools[Connection] = LoopPools(lambda _: closed_in.append(asyncio.get_running_loop()), 10)

    async def main() -> asyncio.AbstractEventLoop:
        pools.here().put(Connection(1))
        await asyncio.to_thread(pools.clear)
        await asyncio.sleep(0)
        return asyncio.get_running_loop()

    loop = asyncio.run(main())
    assert closed_in == [loop]
