"""Calls of etcd's JSON gateway: several in one write, answered in order, and never repeated.

An error of etcd is not a no: it raises BackendUnavailable, with the reason and without a secret. Whether to try again
is the engine's decision; its next call goes to the next member.
"""

from __future__ import annotations

import json
from ssl import SSLEOFError
from typing import TYPE_CHECKING, Any, Final

from dlock_core.backends.etcd.connections import ClusterConnections
from dlock_core.backends.etcd.transport import HTTPError
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from dlock_core.backends.etcd.transport import HTTPConnection, HTTPReply, HTTPStream, Member
    from dlock_core.runtime import Runtime

__all__ = ["Answer", "Gateway", "GatewayCall", "Watch"]

GatewayCall = tuple[str, dict[str, Any] | bytes]
"""A path of the gateway and the body: one JSON document, or several as bytes."""
Answer = dict[str, Any]

INVALID_ARGUMENT: Final = 3
PERMISSION_DENIED: Final = 7
UNAUTHENTICATED: Final = 16
EXPIRED_LOGIN_TEXTS: Final = ("invalid auth token", "revision in header is old")
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode
REFUSED_LOGIN_TEXTS: Final = ("authentication failed", "user name is empty", "permission denied")
UNREADABLE: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""The exceptions of reading an answer that does not have etcd's format."""


class Gateway:
    """The members of one cluster and our credentials there; `timeout` is the limit of a single try in seconds."""

    def __init__(
        self, members: Sequence[Member], user: str, password: str, tls: ssl.SSLContext | None, timeout: float
    ) -> None:
        self._connections, self._tls, self._timeout = ClusterConnections(members, tls), tls, timeout
        self._credentials = {"name": user, "password": password} if user else None
        self._auth_token = ""
        self.limit = timeout / min(2, len(members))  # one member may be stuck, and the next one can be tried in time

    async def ask(
        self, runtime: Runtime, name: str, calls: Sequence[GatewayCall], limit: float | None = None
    ) -> list[list[Answer]]:
        """Send all calls in one write; each is answered by one JSON document or several, which may be an error."""
        until = runtime.now() + min(limit or self.limit, self.limit)
        connection = None
        try:
            connection = await self._connections.checkout(runtime, until)
            await self._log_in(runtime, name, connection, until)
            answers = await self._exchange(runtime, connection, calls, until)
        except BaseException as error:
            self._abandon(connection)
            if isinstance(error, OSError):
                raise self._failed(name, connection, error) from error
            raise
        self._connections.checkin(runtime, connection)
        return answers

    async def watch(self, runtime: Runtime, name: str, key: str) -> Watch:
        """Begin to watch for the deletion of a key, on a dedicated connection."""
        until = runtime.now() + self.limit
        connection = None
        try:
            connection = await self._connections.open(runtime, until)
            await self._log_in(runtime, name, connection, until)
            path, body = _written(("watch", {"create_request": {"key": key, "filters": ["NOPUT"]}}))
            stream = await connection.stream(runtime, path, body, self._auth_token, until)
            told = await stream.document(runtime, until)
            begun = told.get("result", {})
            if begun.get("canceled") or not begun.get("created"):
                raise self.failure(name, {"message": str(begun.get("cancel_reason") or told)})
        except BaseException as error:
            self._abandon(connection)
            if isinstance(error, OSError):
                raise self._failed(name, connection, error) from error
            raise
        return Watch(stream, int(begun["header"]["revision"]))

    def each(self) -> list[tuple[str, Gateway]]:
        """Return a gateway to each member alone, by its address."""
        login = self._credentials or {"name": "", "password": ""}
        return [
            (str(member), Gateway([member], login["name"], login["password"], self._tls, self._timeout))
            for member in self._connections.members
        ]

    def close(self) -> None:
        """Close idle connections."""
        self._connections.close()

    def reading(self, name: str) -> Reading:
        """Return a block for sending and reading; an answer that cannot be parsed raises BackendUnavailable."""
        return Reading(self, name)

    def failure(self, name: str, answer: Answer) -> BackendUnavailable:
        """Make an error of an answer without a result, and use the next member if this one may be the cause."""
        told = answer["error"] if isinstance(answer.get("error"), dict) else answer  # a stream wraps it
        code, text = told.get("code", told.get("grpc_code")), str(told.get("message", told))
        if code == UNAUTHENTICATED or any(part in text for part in EXPIRED_LOGIN_TEXTS):
            self._auth_token = ""
            return BackendUnavailable(name, reason=f"etcd: {text}", broken=self._credentials is not None)
        if code == PERMISSION_DENIED or any(part in text for part in REFUSED_LOGIN_TEXTS):
            return BackendUnavailable(name, reason=f"etcd refused our credentials: {text}", refused=True)
        self._connections.skip(self._connections.member)
        return BackendUnavailable(name, reason=f"etcd: {text}", broken=len(self._connections.members) > 1)

    async def _log_in(self, runtime: Runtime, name: str, connection: HTTPConnection, until: float) -> None:
        """Log in if necessary: the auth token is valid for all members, until it was not used for some minutes."""
        if self._credentials is None or self._auth_token:
            return
        call: GatewayCall = ("auth/authenticate", self._credentials)
        ((answer,),) = await self._exchange(runtime, connection, [call], until)
        if "token" in answer:
            self._auth_token = str(answer["token"])
        elif "not enabled" not in str(answer.get("message")):
            raise self.failure(name, answer)

    async def _exchange(
        self, runtime: Runtime, connection: HTTPConnection, calls: Sequence[GatewayCall], until: float
    ) -> list[list[Answer]]:
        requests = [_written(call) for call in calls]
        return [_read(reply) for reply in await connection.exchange(runtime, requests, self._auth_token, until)]

    def _abandon(self, connection: HTTPConnection | None) -> None:
        if connection is not None:
            connection.close()

    def _failed(self, name: str, connection: HTTPConnection | None, error: OSError) -> BackendUnavailable:
        several = len(self._connections.members) > 1
        if connection is None:  # no member could be reached: there is none left to try
            return BackendUnavailable(name, reason=_told(error))
        self._connections.skip(connection.member)
        if connection.was_used:
            self._connections.close()  # the others may be dead, too
        died = connection.was_used and isinstance(error, ConnectionError | SSLEOFError)
        return BackendUnavailable(name, reason=f"{connection.member}: {_told(error)}", broken=died or several)


class Reading:
    """A block in which answers are read: they may come from a proxy or another service in place of etcd."""

    __slots__ = ("_gateway", "_name")

    def __init__(self, gateway: Gateway, name: str) -> None:
        self._gateway, self._name = gateway, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UNREADABLE):
            text = f"an answer is not etcd's: {type(error).__name__}: {error}"
            raise self._gateway.failure(self._name, {"message": text}) from error


class Watch:
    """Reports the deletion of a key that is later than `revision`.

    It begins now: etcd serves a watch that begins in the past only ten times a second.
    """

    def __init__(self, stream: HTTPStream, revision: int) -> None:
        self._stream, self.revision = stream, revision

    async def woken(self, runtime: Runtime, seconds: float) -> bool:
        """Wait for the deletion, or another reason to check (True), or until `seconds` are over (False)."""
        try:
            await self._stream.document(runtime, runtime.now() + seconds)
        except TimeoutError:
            return False
        except OSError:  # the member went away
            return True
        return True

    def close(self) -> None:
        """Stop watching."""
        self._stream.close()


def _written(call: GatewayCall) -> tuple[str, bytes]:
    path, body = call
    return f"/v3/{path}", body if isinstance(body, bytes) else _encode(body).encode()


def _read(reply: HTTPReply) -> list[Answer]:
    try:
        documents = [json.loads(line) for line in reply.body.splitlines() if line]
    except ValueError:
        documents = []
    if not documents or not all(isinstance(document, dict) for document in documents):
        raise HTTPError(f"HTTP {reply.status}: not the JSON gateway of an etcd")
    if reply.status != 200 and "code" not in documents[0]:
        raise HTTPError(f"HTTP {reply.status}")
    return documents


def _told(error: OSError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__}: no answer in time"
