"""The cost of the wire itself: a lock by hand on a bare socket, with hiredis and no client library."""

import itertools
import socket
from hashlib import sha1
from typing import Any, Final

import hiredis

COMPARE_AND_DELETE: Final = (
    "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"
)
DIGEST: Final = sha1(COMPARE_AND_DELETE.encode(), usedforsecurity=False).hexdigest()


class RawRedis:
    """One connection: pack, send, read."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = hiredis.Reader()
        self.call("SCRIPT", "LOAD", COMPARE_AND_DELETE)

    def call(self, *command: Any) -> Any:
        self.socket.sendall(hiredis.pack_command(command))
        while (reply := self.reader.gets()) is False:
            self.reader.feed(self.socket.recv(65536))
        if isinstance(reply, Exception):
            raise reply
        return reply

    def acquire(self, key: str, holder: str, ttl_ms: int) -> bool:
        return self.call("SET", key, holder, "NX", "PX", ttl_ms) == b"OK"

    def release(self, key: str, holder: str) -> bool:
        return bool(self.call("EVALSHA", DIGEST, 1, key, holder))

    def commands(self) -> dict[str, int]:
        """Return how often the server has run each command since the last reset, including those of scripts."""
        lines = self.call("INFO", "commandstats").decode().split()
        stats = {
            line[8 : line.index(":")]: int(line.split("calls=")[1].split(",")[0]) for line in lines if "calls=" in line
        }
        return {name: calls for name, calls in stats.items() if name not in {"info", "config|resetstat"}}


class Names:
    """Lock names in turn, like those of requests for different orders."""

    def __init__(self, prefix: str, count: int = 1000) -> None:
        self.next = itertools.cycle([f"{prefix}:{number}" for number in range(count)]).__next__
