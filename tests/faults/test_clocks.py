"""Server clocks are really set forward and back, and the promises of the documentation hold."""

import threading
from collections.abc import Callable, Iterator

import pytest
import redis

from dlock_core import Lock
from dlock_core.backend import Released
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.errors import LeaseLost
from tests.faults.looking import holders, waiters
from tests.faults.turned_clocks import Turned
from tests.servers import Server
from tests.waiting import until

STEPS = [60, -60, -3600]


@pytest.fixture
def turned(start: Callable[[], Turned]) -> Turned:
    return start()


@pytest.fixture
def backend(turned: Turned) -> Iterator[RedisBackend]:
    yield from of(turned.server)


@pytest.fixture
def other(turned: Turned) -> Iterator[RedisBackend]:
    """Yield the same store, as another process would connect to it."""
    yield from of(turned.server)


def of(server: Server) -> Iterator[RedisBackend]:
    backend = RedisBackend.from_url(server.url)
    yield backend
    backend.close()


def test_clock_that_is_set_forward_ends_a_lease_and_its_holder_is_told(
    turned: Turned, backend: RedisBackend, other: RedisBackend
) -> None:
    first = Lock(backend, "a", ttl=20, renew=False).acquire()
    turned.set(60)
    second = Lock(other, "a", wait=0).acquire()
    assert second.token > first.token
    with pytest.raises(LeaseLost):
        first.renew()
    assert first.lost
    assert first.release() is not Released.RELEASED
    assert holders(other, "a") == [second.holder]
    second.release()


@pytest.mark.parametrize("step", [-60, -3600])
def test_clock_that_is_set_back_ends_no_lease_and_keeps_that_of_a_dead_holder_longer(
    turned: Turned, backend: RedisBackend, other: RedisBackend, step: int
) -> None:
    first = Lock(backend, "a", ttl=20, renew=False).acquire()
    turned.set(step)
    assert Lock(other, "a").try_acquire() is None
    with redis.Redis.from_url(turned.server.url) as client:
        assert client.pttl(backend.lock_key("a")) > -step * 1000
    first.renew()
    with redis.Redis.from_url(turned.server.url) as client:
        assert client.pttl(backend.lock_key("a")) <= 20_000
    assert not first.lost
    assert first.release() is Released.RELEASED


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shared", [False, True])
def test_tokens_grow_whatever_the_clock_does(turned: Turned, backend: RedisBackend, step: int, shared: bool) -> None:
    tokens = []
    for seconds in (0, step, 0, step):
        turned.set(seconds)
        for _ in range(3):
            with Lock(backend, "a", shared=shared) as lease:
                tokens.append(lease.token)
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("step", [-60, -3600])
def test_waiters_are_served_in_the_order_in_which_they_came_when_the_clock_is_set_back(
    turned: Turned, backend: RedisBackend, step: int
) -> None:
    served: list[int] = []

    def wait(number: int) -> None:
        with Lock(backend, "a", wait=None):
            served.append(number)

    first = Lock(backend, "a").acquire()
    threads = [threading.Thread(target=wait, args=(number,)) for number in range(4)]
    for number, thread in enumerate(threads):
        if number == 2:
            turned.set(step)
        thread.start()
        until(lambda number=number: len(waiters(backend, "a")) == number + 1)  # type: ignore[misc]
    first.release()
    for thread in threads:
        thread.join()
    assert served == [0, 1, 2, 3]
