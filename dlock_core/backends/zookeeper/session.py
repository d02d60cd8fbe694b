"""One ZooKeeper session for a process: requests are sent in one go, and answered within a limit or not at all.

kazoo keeps the connection and the session. What it would do by default and must not: wait for a reply for ever, stay
with a server that is silent for most of the session, or pause for up to an hour before it connects again.
"""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    ConnectionClosedError,
    ConnectionLoss,
    NoAuthError,
    NoNodeError,
    SessionExpiredError,
    SessionMovedError,
)
from kazoo.protocol.connection import _CONNECTION_DROP
from kazoo.protocol.serialization import Create2, Delete, SetData
from kazoo.protocol.states import KazooState

from dlock_core.backends.zookeeper.wire import Handler, Reply, quiet, tell
from dlock_core.errors import BackendUnavailable
from dlock_core.runtime import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlock_core.backends.zookeeper.address import Address
    from dlock_core.runtime import Runtime, Signal

__all__ = ["Session", "good"]

_LOST: Final = (ConnectionLoss, ConnectionClosedError, SessionExpiredError, SessionMovedError)
_REFUSED: Final = (AuthFailedError, NoAuthError)
_WRITES: Final = (Create2, SetData, Delete)
_RETRY: Final = {"max_tries": -1, "delay": 0.05, "backoff": 1.5, "max_delay": 0.25}


class Session:
    """The session, made anew when it has ended; `timeout` bounds a request, `length` is asked for (seconds)."""

    def __init__(self, address: Address, timeout: float, length: float) -> None:
        self._address, self._timeout, self._length = address, timeout, length
        self._guard = threading.Lock()
        self._kazoo: Any = None
        self._waiting: set[Signal] = set()
        self._connections = self._dropped = 0
        self._cut = math.inf  # since when there is no connection
        self._proof = (0, -math.inf)
        self.valid_for = 0.0
        """Seconds after a write for which the session surely lives: two thirds of what the server granted.

        The leader may hear of a request half a tick late, and a session has at least two ticks, so three quarters hold.
        """

    @property
    def id(self) -> int:
        """The present session, 0 when there is none."""
        return (self._kazoo and self._kazoo._session_id) or 0

    @property
    def proven(self) -> float:
        """When the last write was sent that a quorum has seen; a read may be answered by a server that is cut off."""
        session, sent = self._proof
        return sent if session == self.id else -math.inf

    @property
    def is_connected(self) -> bool:
        """A question would be sent at once."""
        return self._kazoo is not None and self._is_usable(self._kazoo)

    def is_doubtful(self, sent: float) -> bool:
        """Tell whether at this time it was long since the session was known to live."""
        return sent - self.proven > self.valid_for / 2

    def surely(self, ttl: float, sent: float) -> float:
        """Give the seconds from `sent` for which a grant holds: only what a quorum has seen proves that we live."""
        return min(ttl, self.proven + self.valid_for - sent)

    async def ask(
        self, runtime: Runtime, name: str, requests: Sequence[Any], *, within: float = math.inf, more: float = 0.0
    ) -> list[Any]:
        """Send requests and give their answers in order, an error of the server as an exception object.

        `within` and `more` shorten and lengthen the limit, in seconds. Raises BackendUnavailable when an answer is
        missing: what was asked may have been done, or not.
        """
        sent, limit = runtime.now(), min(self._timeout, within) + more
        client = await self._connected(runtime, name, limit)
        session, connection = self.id, self._connections
        done = runtime.signal()
        replies = [*[Reply() for _ in requests[1:]], Reply(done)]  # they are answered in order
        for request, reply in zip(requests, replies, strict=True):
            client._call(request, reply)
        if not await runtime.wait(done, max(0.0, sent + limit - runtime.now())):
            self._drop(client, connection)
            raise BackendUnavailable(name, reason=f"no answer within {limit:.3g} s")
        answers = [reply.answer for reply in replies]
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, _LOST):
                raise BackendUnavailable(name, reason=f"{type(answer).__name__}: the connection broke", broken=True)
            if isinstance(request, _WRITES) and (not isinstance(answer, Exception) or isinstance(answer, NoNodeError)):
                self._prove(session, sent)
        return answers

    def post(self, request: Any, done: Signal) -> Reply:
        """Send one request from kazoo's own thread, which must not wait; the signal tells that it was answered."""
        client, reply = self._kazoo, Reply(done)
        if client is not None:
            client._call(request, reply)
        return reply

    def close(self) -> None:
        """End the session, and with it every node that belongs to it."""
        with self._guard:
            client, self._kazoo = self._kazoo, None
        if client is not None:
            ending = threading.Thread(target=_end, args=(client,), name="dlock-zookeeper-close", daemon=True)
            ending.start()
            ending.join(self._timeout)  # a server that does not answer is not waited for

    def abandon(self) -> None:
        """Let go of the session in a forked child: it is the parent's."""
        if self._kazoo is not None:
            connection = self._kazoo._connection
            for ours in (connection._socket, connection._read_sock, connection._write_sock):
                with suppress(Exception):
                    ours.close()

    async def _connected(self, runtime: Runtime, name: str, limit: float) -> Any:
        client = self._alive()
        if not self._is_usable(client):
            signal = runtime.signal()
            self._waiting.add(signal)
            try:
                if not self._is_usable(client):
                    await runtime.wait(signal, limit)
            finally:
                self._waiting.discard(signal)
        if not self._is_usable(client):
            raise BackendUnavailable(name, reason=f"no connection to {self._address.hosts} within {limit:.3g} s")
        return client

    def _is_usable(self, client: Any) -> bool:
        return bool(client.connected) and self._connections != self._dropped

    def _alive(self) -> Any:
        client = self._kazoo
        if client is not None and not self._is_over(client):
            return client
        with self._guard:
            if self._kazoo is client:
                self._kazoo = self._start()
                if client is not None:
                    threading.Thread(target=_end, args=(client,), daemon=True).start()
            return self._kazoo

    def _is_over(self, client: Any) -> bool:
        """Tell whether kazoo has given up, or was cut off for twice as long as its session may live.

        It would never come back to servers that lost their data: they refuse a client who has seen more than they.
        """
        if not client._connection._connection_routine.is_alive():
            return True
        return not client.connected and clock() - self._cut > 3 * self.valid_for

    def _start(self) -> Any:
        credential = self._address.credential
        client = KazooClient(
            hosts=self._address.hosts,
            timeout=self._length,
            handler=Handler(self._timeout),
            connection_retry=dict(_RETRY),
            auth_data=[("digest", credential)] if credential else None,
            logger=quiet,
        )
        client._connection._connect = self._noting(client)
        client.add_listener(self._changed)
        self._cut = math.inf
        client.start_async()
        return client

    def _noting(self, client: Any) -> Callable[..., tuple[float, float]]:
        connect: Callable[..., tuple[float, float]] = client._connection._connect

        def noting(*where: Any) -> tuple[float, float]:
            limits = connect(*where)
            self.valid_for = limits[0] / 1000  # kazoo's own limit for silence, in milliseconds
            client._connection._socket.hold_for(client._queue)
            return limits

        return noting

    def _changed(self, state: str) -> None:
        self._cut = min(self._cut, clock()) if state != KazooState.CONNECTED else math.inf
        if state == KazooState.CONNECTED:
            self._connections += 1
            for signal in list(self._waiting):
                tell(signal)

    def _prove(self, session: int, sent: float) -> None:
        if session == self.id and sent > self.proven:
            self._proof = (session, sent)

    def _drop(self, client: Any, connection: int) -> None:
        """Have kazoo go to another server, unless it has done so already."""
        if self._is_usable(client) and connection == self._connections:
            self._dropped = connection
            client._call(_CONNECTION_DROP, Reply())


def good(name: str, answer: Any) -> Any:
    """Turn an error of the server that nobody expected into BackendUnavailable: it has not said no."""
    if isinstance(answer, Exception):
        refused = isinstance(answer, _REFUSED)
        reason = "the server refused our credentials" if refused else "the server could not do it"
        raise BackendUnavailable(name, reason=f"{reason}: {type(answer).__name__}", refused=refused) from answer
    return answer


def _end(client: Any) -> None:
    client.state_listeners.clear()
    with suppress(Exception):
        client.stop()
        client.close()
