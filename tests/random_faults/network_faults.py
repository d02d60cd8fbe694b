"""What happens between the workers and a server, in the proxy in front of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tests.proxy import Fault, Proxy, What
from tests.random_faults import schedule
from tests.random_faults.world import World


@contextmanager
def latency(world: World, fault: schedule.Fault) -> Iterator[None]:
    """Everything arrives later, by up to two hundred milliseconds."""
    proxy = world.proxies[fault.target]
    proxy.slow_down(fault.seconds / 15)
    yield
    proxy.forward()


@contextmanager
def mute(world: World, fault: schedule.Fault) -> Iterator[None]:
    """Requests arrive, replies do not."""
    proxy = world.proxies[fault.target]
    proxy.mute()
    yield
    proxy.forward()


@contextmanager
def silence(world: World, fault: schedule.Fault) -> Iterator[None]:
    """Nothing arrives, in either direction."""
    proxy = world.proxies[fault.target]
    proxy.deaf()
    yield
    proxy.forward()


@contextmanager
def refuse(world: World, fault: schedule.Fault) -> Iterator[None]:
    proxy = world.proxies[fault.target]
    proxy.refuse()
    yield
    proxy.forward()


@contextmanager
def cut(world: World, fault: schedule.Fault) -> Iterator[None]:
    """Every connection is reset."""
    world.proxies[fault.target].cut()
    yield


@contextmanager
def half_open(world: World, fault: schedule.Fault) -> Iterator[None]:
    """The connections that exist carry nothing any more, and neither end is told, for as long as the fault lasts."""
    proxy = world.proxies[fault.target]
    proxy.strand()
    yield
    proxy.cut()


def one_request(plan: Callable[[Proxy], Fault]) -> Callable[[World, schedule.Fault], object]:
    """Make the fault of one request, the next one that it is planned for.

    At its end it happens no more; what it holds goes on, and a client that would wait for ever for a dropped reply is cut off.
    """

    @contextmanager
    def happens(world: World, fault: schedule.Fault) -> Iterator[None]:
        proxy = world.proxies[fault.target]
        planned = plan(proxy)
        yield
        proxy.forget(planned)
        planned.release()
        if planned.what is What.DROP_REPLY:
            proxy.cut()

    return happens


FAULTS: Final[dict[str, Callable[[World, schedule.Fault], object]]] = {
    "latency": latency, "mute": mute, "silence": silence, "refuse": refuse, "cut": cut, "half open": half_open,
    "lose request": one_request(Proxy.cut_request), "lose reply": one_request(Proxy.cut_reply),
    "drop reply": one_request(Proxy.drop_reply), "hold reply": one_request(Proxy.hold_reply),
}  # fmt: skip
