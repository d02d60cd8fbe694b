"""A TCP proxy whose network can be broken at run time, one request at a time.

One chunk that the client sends counts as one request, which is exact for a client that sends a command and waits for its reply;
the reply is the first chunk that comes back after it. Faults need no timing: a fault says when it has happened.
"""

import asyncio
import contextlib
import enum
import socket
import struct
import threading
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, Self

from tests.servers import free_port

HOST: Final = "127.0.0.1"
CHUNK: Final = 1 << 16
WITHIN: Final = 30.0


class What(enum.Enum):
    CUT_REQUEST = "the request never arrives, the connection is reset"
    CUT_REPLY = "the request is executed, the connection is reset instead of the reply"
    HALVE_REPLY = "the request is executed, half of the reply arrives, and then the end of the connection"
    DROP_REPLY = "the request is executed, the reply never arrives and the connection stays silent"
    HOLD_REQUEST = "the request waits in the network until it is let go"
    HOLD_REPLY = "the request is executed, the reply waits in the network until it is let go"


@dataclass(eq=False)
class Fault:
    """One thing that will go wrong once, with the k-th request from now that contains `matching`."""

    what: What
    countdown: int
    matching: bytes
    _loop: asyncio.AbstractEventLoop
    _happened: threading.Event = field(default_factory=threading.Event)
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def happened(self) -> bool:
        return self._happened.is_set()

    @property
    def has_met_its_request(self) -> bool:
        """Whether its request has come; what goes wrong with the reply may still be ahead."""
        return self.countdown <= 0

    def wait(self, within: float = WITHIN) -> None:
        """Wait until it has happened. For a dropped, cut or held reply, the server has then executed the request."""
        if not self._happened.wait(within):
            raise TimeoutError(f"did not happen within {within} s: {self.what.value}")

    def release(self) -> None:
        """Let a held request or reply go."""
        self._loop.call_soon_threadsafe(self._released.set)

    def hits(self, request: bytes) -> bool:
        if self.matching in request:
            self.countdown -= 1
        return self.countdown == 0 and self.matching in request

    async def hold(self) -> None:
        self._happened.set()
        await self._released.wait()

    def happen(self) -> None:
        self._happened.set()


class Proxy:
    """Stands between clients and the server on `target`; `with Proxy(server.port) as proxy: connect(proxy.port)`."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = free_port()
        self.requests = 0
        self._faults: list[Fault] = []
        self._links: set[_Link] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._loop = asyncio.new_event_loop()
        self._flow, self._flow_back = asyncio.Event(), asyncio.Event()
        self._delay = 0.0
        self._listener: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.forward()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def redis_url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def forward(self) -> None:
        """Deliver everything, including what `deaf()` has held back."""
        self._run(self._forward())

    def deaf(self) -> None:
        """Accept connections and requests, and forward nothing in either direction until `forward()`."""
        self._run(self._deaf())

    def mute(self) -> None:
        """Deliver every request and no reply until `forward()`."""
        self._run(self._mute())

    def slow_down(self, seconds: float) -> None:
        """Deliver everything this much later, until `forward()`."""
        self._run(self._slow_down(seconds))

    def strand(self) -> None:
        """Leave the existing connections half open: both ends see them, but nothing arrives any more until `cut()`."""
        self._run(self._strand())

    def refuse(self) -> None:
        """Refuse new connections and cut the existing ones, until `forward()`."""
        self._run(self._refuse())

    def cut(self) -> None:
        """Reset every existing connection; new ones are accepted."""
        self._run(self._cut())

    def cut_request(self, k: int = 1, *, matching: bytes = b"") -> Fault:
        return self._plan(What.CUT_REQUEST, k, matching)

    def cut_reply(self, k: int = 1, *, matching: bytes = b"") -> Fault:
        return self._plan(What.CUT_REPLY, k, matching)

    def halve_reply(self, k: int = 1, *, matching: bytes = b"") -> Fault:
        return self._plan(What.HALVE_REPLY, k, matching)

    def drop_reply(self, k: int = 1, *, matching: bytes = b"") -> Fault:
        return self._plan(What.DROP_REPLY, k, matching)

    def hold_request(self, k: int = 1, *, matching: bytes = b"") -> Fault:
        return self._plan(What.HOLD_REQUEST, k, matching)

    def hold_reply(self, k: int = 1, *, matching: bytes = b"") -> Fault:
        return self._plan(What.HOLD_REPLY, k, matching)

    def hang_up(self) -> None:
        """Reset every connection for its client only: a held request still reaches the server."""
        self._run(self._hang_up())

    def forget(self, fault: Fault) -> None:
        """Cancel a fault that has not happened yet."""
        self._run(self._forget(fault))

    def _plan(self, what: What, k: int, matching: bytes) -> Fault:
        fault = Fault(what, k, matching, self._loop)
        self._run(self._add(fault))
        return fault

    def _run(self, step: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(step, self._loop).result(WITHIN)

    async def _add(self, fault: Fault) -> None:
        self._faults.append(fault)

    async def _forget(self, fault: Fault) -> None:
        if fault in self._faults:
            self._faults.remove(fault)

    async def _forward(self) -> None:
        self._flow.set()
        self._flow_back.set()
        self._delay = 0.0
        if self._listener is None:
            self._listener = await asyncio.start_server(self._serve, HOST, self.port)

    async def _deaf(self) -> None:
        await self._forward()
        self._flow.clear()

    async def _mute(self) -> None:
        await self._forward()
        self._flow_back.clear()

    async def _slow_down(self, seconds: float) -> None:
        await self._forward()
        self._delay = seconds

    async def _strand(self) -> None:
        for link in list(self._links):
            link.is_stranded = True

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        await self._cut()

    async def _cut(self) -> None:
        for link in list(self._links):
            link.reset()

    async def _hang_up(self) -> None:
        for link in list(self._links):
            link.client[1].transport.abort()

    async def _close(self) -> None:
        for _ in range(5):  # a connection that was accepted a moment ago has no link yet, and would stay open
            await asyncio.sleep(0)
        await self._refuse()
        mine = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*[writer.wait_closed() for writer in self._writers], return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(self, reader, writer)
        self.knows(writer)
        self._links.add(link)
        try:
            await link.serve()
        finally:
            self._links.discard(link)
            link.close()

    def knows(self, writer: asyncio.StreamWriter) -> None:
        """Record a connection that has to be closed at the end."""
        self._writers.append(writer)

    async def flow(self) -> None:
        """Wait until the network delivers requests."""
        if self._delay:
            await asyncio.sleep(self._delay)
        await self._flow.wait()

    async def flow_back(self) -> None:
        """Wait until the network delivers replies."""
        await self.flow()
        await self._flow_back.wait()

    def next_fault(self, request: bytes) -> Fault | None:
        self.requests += 1
        hit = [fault for fault in self._faults if fault.hits(request)]
        self._faults = [fault for fault in self._faults if fault.countdown > 0]
        return hit[0] if hit else None


class _Link:
    """One client's connection and its twin to the server."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self.client = reader, writer
        self.writers = [writer]
        self.pending: deque[Fault] = deque()
        self.is_stranded = False
        self.was_ended = asyncio.Event()

    async def serve(self) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self.proxy.flow()
            server = await asyncio.open_connection(HOST, self.proxy.target)
            self.writers.append(server[1])
            self.proxy.knows(server[1])
            pumps = [asyncio.ensure_future(self._requests(*server)), asyncio.ensure_future(self._replies(*server))]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _requests(self, _: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while request := await self.client[0].read(CHUNK):
            await self.proxy.flow()
            if self.is_stranded:
                continue
            fault = self.proxy.next_fault(request)
            if fault and fault.what is What.CUT_REQUEST:
                return self._end(fault)
            if fault and fault.what is What.HOLD_REQUEST:
                await fault.hold()
            elif fault:
                self.pending.append(fault)
            server.write(request)
        return await self._stay_half_open()

    async def _replies(self, server: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        while reply := await server.read(CHUNK):
            await self.proxy.flow_back()
            if self.is_stranded:
                continue
            fault = self.pending.popleft() if self.pending else None
            if fault and fault.what is What.CUT_REPLY:
                return self._end(fault)
            if fault and fault.what is What.HALVE_REPLY:
                self.client[1].write(reply[: len(reply) // 2])
                return fault.happen()
            if fault and fault.what is What.DROP_REPLY:
                return await self._silence(fault, server)
            if fault:
                await fault.hold()
            self.client[1].write(reply)
        return await self._stay_half_open()

    async def _stay_half_open(self) -> None:
        """Do not report the end of one side to the other, if this link is stranded."""
        if self.is_stranded:
            await self.was_ended.wait()

    def _end(self, fault: Fault) -> None:
        self.reset()
        fault.happen()

    async def _silence(self, fault: Fault, server: asyncio.StreamReader) -> None:
        fault.happen()
        while await server.read(CHUNK):
            pass

    def close(self) -> None:
        """Close in good order: a reply that was already written is still delivered."""
        self.was_ended.set()
        for writer in self.writers:
            writer.close()

    def reset(self) -> None:
        """Send RST both ways: data that is still on its way is not delivered."""
        self.was_ended.set()
        for writer in self.writers:
            connection = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
