"""What happens between the workers and a server, in the proxy in front of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tests.proxy import Proxy
from tests.random_faults.schedule import Fault
from tests.random_faults.world import World


@contextmanager
def latency(world: World, fault: Fault) -> Iterator[None]:
    """Everything arrives later, by up to two hundred milliseconds."""
    proxy = world.proxies[fault.target]
    proxy.slow_down(fault.seconds / 15)
    yield
    proxy.forward()


@contextmanager
def mute(world: World, fault: Fault) -> Iterator[None]:
    """Requests arrive, replies do not."""
    proxy = world.proxies[fault.target]
    proxy.mute()
    yield
    proxy.forward()


@contextmanager
def silence(world: World, fault: Fault) -> Iterator[None]:
    """Nothing arrives, in either direction."""
    proxy = world.proxies[fault.target]
    proxy.deaf()
    yield
    proxy.forward()


@contextmanager
def refuse(world: World, fault: Fault) -> Iterator[None]:
    proxy = world.proxies[fault.target]
    proxy.refuse()
    yield
    proxy.forward()


@contextmanager
def cut(world: World, fault: Fault) -> Iterator[None]:
    """Every connection is reset."""
    world.proxies[fault.target].cut()
    yield


@contextmanager
def half_open(world: World, fault: Fault) -> Iterator[None]:
    """The connections that exist carry nothing any more, and neither end is told, for as long as the fault lasts."""
    proxy = world.proxies[fault.target]
    proxy.strand()
    yield
    proxy.cut()


def _once(plan: Callable[[Proxy], object], *, cuts: bool = False) -> Callable[[World, Fault], object]:
    """Make the fault of one request, the next one; a connection on which a client would wait for ever is cut at the end."""

    @contextmanager
    def happens(world: World, fault: Fault) -> Iterator[None]:
        proxy = world.proxies[fault.target]
        plan(proxy)
        yield
        if cuts:
            proxy.cut()

    return happens


@contextmanager
def hold_reply(world: World, fault: Fault) -> Iterator[None]:
    """One reply arrives late."""
    held = world.proxies[fault.target].hold_reply()
    yield
    held.release()


FAULTS: Final[dict[str, Callable[[World, Fault], object]]] = {
    "latency": latency, "mute": mute, "silence": silence, "refuse": refuse, "cut": cut, "half open": half_open,
    "lose request": _once(Proxy.cut_request), "lose reply": _once(Proxy.cut_reply),
    "drop reply": _once(Proxy.drop_reply, cuts=True), "hold reply": hold_reply,
}  # fmt: skip
