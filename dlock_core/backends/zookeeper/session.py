"""One ZooKeeper session for a process: requests are sent together, and answered within a limit or not at all.

kazoo keeps the connection and the session. This module changes its defaults, which are to wait for a reply without
limit, to stay with a server that is silent for most of the session, and to pause for up to an hour before it connects
again.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

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

from dlock_core.backends.zookeeper.connection import Handler, KazooReply, send, tell
from dlock_core.errors import BackendUnavailable, format_seconds
from dlock_core.options import has_swallowed_options, is_host
from dlock_core.runtime import clock, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlock_core.runtime import Runtime, Signal

__all__ = ["NotSent", "ZooKeeperSession", "checked"]


_LOST: Final = (ConnectionLoss, ConnectionClosedError, SessionExpiredError, SessionMovedError)
_REFUSED: Final = (AuthFailedError, NoAuthError)
_WRITES: Final = (Create2, SetData, Delete)
_RETRY: Final = {"max_tries": -1, "delay": 0.05, "backoff": 1.5, "max_delay": 0.25}


class NotSent(BackendUnavailable):
    """There was no connection: no request was sent, and the servers have nothing of ours."""


class ZooKeeperSession:
    """The session, replaced when it has ended; `timeout` limits a request, `length` is requested (in seconds)."""

    def __init__(self, address: EnsembleAddress, timeout: float, length: float) -> None:
        self._address, self._timeout, self._length = address, timeout, length
        self._guard = threading.RLock()  # A signal handler may also request a session while one is started.
        self._kazoo: Any = None
        self._waiting: set[Signal] = set()
        self._connections = self._dropped = 0
        self._cut = math.inf  # since when there has been no connection
        self._proof = (0, -math.inf)
        self.valid_for = 0.0
        """Seconds after a write for which the session certainly lives: two thirds of what the server granted.

        The leader may learn of a request half a tick late, and a session has at least two ticks, so three quarters are
        safe.
        """

    @property
    def id(self) -> int:
        """The current session, 0 if there is none."""
        return (self._kazoo and self._kazoo._session_id) or 0

    @property
    def proven(self) -> float:
        """When the last write that reached a quorum was sent; a server that is cut off may answer a read."""
        session, sent = self._proof
        return sent if session == self.id else -math.inf

    @property
    def is_connected(self) -> bool:
        """Whether a request would be sent at once."""
        return self._kazoo is not None and self._is_usable(self._kazoo)

    def is_doubtful(self, sent: float) -> bool:
        """Return whether at this time the last proof that the session lives was too old."""
        return sent - self.proven > self.valid_for / 2

    def surely(self, ttl: float, sent: float) -> float:
        """Return the seconds from `sent` for which a grant holds: only a write to a quorum proves the session."""
        return min(ttl, self.proven + self.valid_for - sent)

    async def ask(
        self, runtime: Runtime, name: str, requests: Sequence[Any], *, within: float = math.inf, more: float = 0.0
    ) -> list[Any]:
        """Send requests, and return their answers in order, an error of the server as an exception object.

        `within` and `more` shorten and lengthen the limit, in seconds. Raises BackendUnavailable if an answer is
        missing: the request may or may not have been executed; NotSent if it certainly was not.
        """
        sent, limit = runtime.now(), min(self._timeout, within) + more
        client = await self._connected(runtime, name, limit)
        session, connection = self.id, self._connections
        done = runtime.signal()
        # ZooKeeper answers the requests of a session in order, so only the last reply has to wake us. Waking a thread
        # or a loop costs more than the request.
        replies = [*[KazooReply() for _ in requests[1:]], KazooReply(done)]
        send(client, list(zip(requests, replies, strict=True)))
        if not await runtime.wait(done, max(0.0, sent + limit - runtime.now())):
            self._drop(client, connection)
            raise BackendUnavailable(name, reason=f"no answer within {format_seconds(limit)}")
        answers = [reply.answer for reply in replies]
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, _LOST):
                raise BackendUnavailable(name, reason=f"{type(answer).__name__}: the connection broke", broken=True)
            if isinstance(request, _WRITES) and (not isinstance(answer, Exception) or isinstance(answer, NoNodeError)):
                self._prove(session, sent)
        return answers

    def post(self, request: Any, done: Signal) -> KazooReply:
        """Send one request from kazoo's own thread, which must not wait; the signal is set when it is answered."""
        client, reply = self._kazoo, KazooReply(done)
        if client is not None:
            send(client, [(request, reply)])
        return reply

    def close(self) -> None:
        """End the session, and with it every node that belongs to it."""
        with self._guard:
            client, self._kazoo = self._kazoo, None
        if client is not None:
            ending = threading.Thread(target=_end, args=(client,), name="dlock-zookeeper-close", daemon=True)
            start_thread(ending)
            ending.join(self._timeout)  # do not wait for a server that does not answer

    def abandon(self) -> None:
        """Drop the session in a forked child, because it belongs to the parent."""
        if self._kazoo is not None:
            connection = self._kazoo._connection
            for ours in (connection._socket, connection._read_sock, connection._write_sock):
                with suppress(Exception):
                    ours.close()

    async def _connected(self, runtime: Runtime, name: str, limit: float) -> Any:
        """Return the client once it is connected, which may be over at once, so that it has to connect again."""
        until = runtime.now() + limit
        while not self._is_usable(client := self._alive()):
            signal = runtime.signal()
            self._waiting.add(signal)
            try:
                if not self._is_usable(client) and not await runtime.wait(signal, max(0.0, until - runtime.now())):
                    raise NotSent(name, reason=f"no connection to {self._address.hosts} within {format_seconds(limit)}")
            finally:
                self._waiting.discard(signal)
        return client

    def _is_usable(self, client: Any) -> bool:
        return bool(client.connected) and self._connections != self._dropped

    def _alive(self) -> Any:
        client = self._kazoo
        if client is not None and not self._is_over(client):
            return client
        with self._guard:
            if self._kazoo is client:
                unused = started = self._start()
                if self._kazoo is client:  # otherwise a signal handler has started another one
                    self._kazoo, unused = started, client
                if unused is not None:
                    start_thread(threading.Thread(target=_end, args=(unused,), daemon=True))
            return self._kazoo

    def _is_over(self, client: Any) -> bool:
        """Return whether kazoo has given up, or was cut off for twice the length of its session.

        It would never return to servers that lost their data: they refuse a client that has seen later transactions.
        """
        if client.handler.has_ended:
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
        # kazoo notifies its listeners of the connection, but not of the session length that the servers granted. Its
        # private `_connect` returns that, so it is wrapped; the tests would fail at once if a new kazoo changed it.
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
        """Make kazoo connect to another server, unless it has already done so."""
        if self._is_usable(client) and connection == self._connections:
            self._dropped = connection
            send(client, [(_CONNECTION_DROP, KazooReply())])


def checked(name: str, answer: Any) -> Any:
    """Return an answer; raise BackendUnavailable for an unexpected error of the server, which is not a no."""
    if isinstance(answer, Exception):
        refused = isinstance(answer, _REFUSED)
        reason = "the server refused our credentials" if refused else "the server could not execute the request"
        raise BackendUnavailable(name, reason=f"{reason}: {type(answer).__name__}", refused=refused) from answer
    return answer


def _end(client: Any) -> None:
    client.state_listeners.clear()
    for step in (client.stop, client.close):
        with suppress(Exception):
            step()


quiet = logging.getLogger("dlock.kazoo")
"""kazoo's own log: its debug level shows credentials, and it warns at every attempt to connect."""
quiet.setLevel(logging.ERROR)


_URL: Final = re.compile(
    r"zookeeper://(?:(?P<user>[^:@/?#]+):(?P<password>[^:@/?#]+)@)?(?P<hosts>[^@/?#]+)(?P<chroot>(?:/[^/?#]+)*)/?"
)
_HOST: Final = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+)(?::(?P<port>\d{1,5}))?")
_BAD_URL: Final = (
    "bad ZooKeeper URL: expected zookeeper://[user:password@]host[:port],host[:port]/chroot, "
    "with every : / ? # @ of the password percent-encoded"
)
DEFAULT_PORT: Final = 2181


class EnsembleAddress(NamedTuple):
    """The addresses of the servers, the path that contains everything, and the digest credential, if any."""

    hosts: str
    chroot: tuple[str, ...]
    credential: str = ""

    def __repr__(self) -> str:
        return f"Address({self.hosts}/{'/'.join(self.chroot)})"


def read_url(url: str) -> EnsembleAddress:
    """Parse a URL; raises ValueError, without the password."""
    found = _URL.fullmatch(url)
    if found is None or has_swallowed_options(found["hosts"] + found["chroot"]):
        raise ValueError(_BAD_URL)
    chroot = tuple(found["chroot"].split("/")[1:])
    if not {".", ".."}.isdisjoint(chroot):
        raise ValueError(_BAD_URL)
    credential = f"{unquote(found['user'])}:{unquote(found['password'])}" if found["user"] else ""
    return EnsembleAddress(",".join(_host(text) for text in found["hosts"].split(",")), chroot, credential)


def _host(text: str) -> str:
    found = _HOST.fullmatch(text)
    if found is None or not is_host(found["host"]) or not 0 < int(found["port"] or DEFAULT_PORT) < 1 << 16:
        raise ValueError(_BAD_URL)
    return f"{found['host']}:{found['port'] or DEFAULT_PORT}"
