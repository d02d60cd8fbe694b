"""Independent Redis servers for tests of Redlock, and what is left on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from tests import servers
from tests.servers import Server

HOST = "127.0.0.1"


@contextmanager
def masters(directory: Path, number: int = 5, *options: str) -> Iterator[list[Server]]:
    """So many servers, each alone, in directories that begin so."""
    nodes = [servers.redis(directory.with_name(f"{directory.name}{place}"), *options) for place in range(number)]
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.stop()


def url(ports: list[int], credentials: str = "") -> str:
    """Where Redlock finds them; each node of the first of the ports."""
    return f"redlock://{credentials}" + ",".join(f"{HOST}:{port}" for port in ports)


def url_of(nodes: list[Server]) -> str:
    return url([node.port for node in nodes])


def keys(node: Server, prefix: str) -> list[str]:
    """What outlives every lease and every waiter, but for the counter and the list that is tidied by renewals."""
    with redis.Redis.from_url(node.url, decode_responses=True) as client:
        found = set(client.scan_iter(f"{prefix}*")) - {f"{prefix}token", f"{prefix}locks"}
        moments = {key: 5000 if key.endswith(":alive") else 2000 for key in found}
        return sorted(key for key in found if not 0 <= client.pttl(key) <= moments[key] and client.exists(key))
