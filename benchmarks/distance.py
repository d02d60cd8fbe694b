"""Distant servers: a forwarder in its own process delivers everything half a round trip later.

`tc netem` needs a kernel module and root; this needs neither. It delays chunk by chunk, in each direction, so it suits
requests that wait for their reply, but would be too slow for a stream.
"""

import ctypes
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

FORK: Final = multiprocessing.get_context("fork")
PR_SET_TIMERSLACK: Final = 29
CHUNK: Final = 1 << 16


@contextmanager
def away(port: int, round_trip_ms: float) -> Iterator[int]:
    """Yield a port that leads to `port` over a network with this round trip; 0 ms yields `port` itself."""
    if not round_trip_ms:
        yield port
        return
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    process = FORK.Process(target=forward, args=(listener, port, round_trip_ms / 2000), daemon=True)
    process.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()
        process.terminate()
        process.join()


def forward(listener: socket.socket, port: int, delay_s: float) -> None:
    """Connect each client to the server, through two threads that deliver late."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)  # by default the kernel adds up to 50 µs to each sleep
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", port))
        for source, target in ((client, server), (server, client)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=deliver, args=(source, target, delay_s), daemon=True).start()


def deliver(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    with suppress(OSError):
        while chunk := source.recv(CHUNK):
            time.sleep(delay_s)
            target.sendall(chunk)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def ping(port: int, count: int = 200) -> dict[str, Any]:
    """Return the median round trip of a Redis PING on a bare socket, as a row of a table."""
    from benchmarks.floors import RawRedis

    raw, times = RawRedis(port), []
    for _ in range(count):
        start = time.perf_counter()
        raw.call("PING")
        times.append(time.perf_counter() - start)
    return {"contestant": "PING", "µs": round(sorted(times)[count // 2] * 1e6, 1)}
