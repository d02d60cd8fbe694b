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
    """Run this number of independent servers, in directories whose names begin with that of `directory`."""
    nodes = [servers.redis(directory.with_name(f"{directory.name}{place}"), *options) for place in range(number)]
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.stop()


def url(ports: list[int], credentials: str = "") -> str:
    """Return the URL of Redlock over the servers on these ports."""
    return f"redlock://{credentials}" + ",".join(f"{HOST}:{port}" for port in ports)


def url_of(nodes: list[Server]) -> str:
    return url([node.port for node in nodes])


def keys(node: Server, prefix: str) -> list[str]:
    """Return the keys that outlive all leases and waiters, but for the counter and the list that renewals clean up."""
    with redis.Redis.from_url(node.url, decode_responses=True) as client:
        found = set(client.scan_iter(f"{prefix}*")) - {f"{prefix}token", f"{prefix}locks"}
        moments = {key: 5000 if key.endswith(":alive") else 2000 for key in found}
        return sorted(key for key in found if not 0 <= client.pttl(key) <= moments[key] and client.exists(key))
