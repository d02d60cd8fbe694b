"""Faults of the network between the workers and a server, in the server's proxy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tests.proxy import Fault, Proxy, What
from tests.random_faults import schedule
from tests.random_faults.world import World


@contextmanager
def latency(world: World, fault: schedule.Fault) -> Iterator[None]:
    """Everything arrives up to two hundred milliseconds later."""
    proxy = world.proxies[fault.target]
    proxy.slow_down(fault.seconds / 15)
    yield
    proxy.forward()


@contextmanager
def mute(world: World, fault: schedule.Fault) -> Iterator[None]:
    """Requests arrive, but replies do not."""
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
    """As long as the fault lasts, existing connections carry nothing, and neither end is notified."""
    proxy = world.proxies[fault.target]
    proxy.strand()
    yield
    proxy.cut()


def one_request(plan: Callable[[Proxy], Fault]) -> Callable[[World, schedule.Fault], object]:
    """Return a fault of one request, the next that `plan` applies to.

    At its end the fault is cancelled and what it holds goes on; after a dropped reply every connection is reset.
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
