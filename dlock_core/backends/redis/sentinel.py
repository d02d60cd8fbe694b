"""Follow a master: Sentinels are asked where it is, and with each request it is asked whether it is one.

A server that has become a replica would answer with what it knew before, so its answers count for nothing.
(Source: the guidelines for Sentinel clients in the Redis documentation.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.sentinel import MasterNotFoundError

from dlock_core.backends.redis import addresses
from dlock_core.backends.redis.addresses import of_url as pool_of
from dlock_core.backends.redis.addresses import title, wires
from dlock_core.backends.redis.transport import Refused, answered, converse, packed, twice
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backends.redis.transport import Wire
    from dlock_core.runtime import Runtime

__all__ = ["Service", "following", "of_url"]

PORT: Final = 26379
CHECK: Final = packed([("WAIT", "0", "0")])
"""Waits for nothing, and a replica refuses it, also one that can be written to; ROLE lists all replicas for that."""
REFUSAL: Final = "with replica instances"
LOOK: Final = 1.0
"""Seconds after which the Sentinels are asked again: a master that was replaced takes some time to notice it."""
_BAD: Final = (
    "bad Sentinel URL: expected redis+sentinel://[user:password@]host:port,host:port,host:port/service/db, the user "
    "and password of the Redis servers, with every : / ? # @ , of them percent-encoded; what the Sentinels want, if "
    "anything, follows as ?sentinel_username=…&sentinel_password=…"
)


class Service(NamedTuple):
    """A master that moves, and whom to ask where it is."""

    name: str
    sentinels: list[Any]
    """Clients or pools of redis-py."""
    master: Any
    """A pool that makes connections like those to the master, but for its address."""
    address: str | None = None
    """The host under which we reach it, when that is not the one the Sentinels know."""


def of_url(url: str) -> Service:
    """Read redis+sentinel:// or, for TLS with all, rediss+sentinel://; raises ValueError, without a password."""
    user, sentinels, path, options = addresses.split(url, port=PORT, path=r"/[^/?#]+(?:/\d*)?", bad=_BAD)
    scheme, (name, _, database) = url.partition("+")[0], path[1:].partition("/")
    given = dict(parse_qsl(options[1:], keep_blank_values=True))
    login = {key: given.pop(f"sentinel_{key}") for key in ("username", "password") if f"sentinel_{key}" in given}
    how = urlencode({key: value for key, value in given.items() if key.startswith(("ssl_", "socket_"))})
    pools = [pool_of(f"{scheme}://{host}?{how}") for host in sentinels]
    for pool in pools:
        pool.connection_kwargs |= login
    return Service(unquote(name), pools, pool_of(f"{scheme}://{user}{sentinels[0]}/{database}?{urlencode(given)}"))


def following(client: Any, limit: float) -> tuple[Wire, Wire] | None:
    """Give wires to the master, for threads and for tasks, if Sentinels lead to it; None for any other client.

    `limit`, in seconds, is what asking one Sentinel after the other and connecting may take together.
    """
    service = client if isinstance(client, Service) else _of_client(client)
    if service is None:
        return None
    share = limit / (len(service.sentinels) + 1)
    of_threads, of_tasks = zip(*[wires(sentinel, share) for sentinel in service.sentinels], strict=True)
    threads, tasks = wires(service.master, share)
    return (
        MasterWire(threads, Sentinels(service, of_threads, share), share),
        MasterWire(tasks, Sentinels(service, of_tasks, share), share),
    )


def _of_client(client: Any) -> Service | None:
    pool = getattr(client, "connection_pool", client)
    manager = getattr(pool, "sentinel_manager", None)
    if manager is None:
        return None
    if not manager.sentinels:
        raise ValueError(f"the client of {pool.service_name!r} knows no Sentinel: give Sentinel(...) their addresses")
    if not pool.is_master:
        raise ValueError("leases live on the master, and replicas are never asked: use Sentinel.master_for(...)")
    return Service(pool.service_name, manager.sentinels, pool, getattr(manager, "_force_master_ip", None))


class Sentinels:
    """Know where the master is: asked one after the other, last those that did not answer."""

    def __init__(self, service: Service, known: Sequence[Wire], limit: float) -> None:
        self._service, self._limit = service, limit
        self._known = list(zip([title(sentinel) for sentinel in service.sentinels], known, strict=True))

    async def master(self, runtime: Runtime, most: int | None = None) -> tuple[str, int]:
        """Give the master's host and port; raises RedisError, which names those that were asked and says why."""
        failures: list[tuple[str, BackendUnavailable]] = []
        for name, wire in self._known[:most]:
            try:
                host, port = await self._ask(runtime, wire)
            except BackendUnavailable as error:
                failures.append((name, error))
                self._known = [*self._known[1:], self._known[0]]
            else:
                return self._service.address or host, port
        raise self._nowhere(failures)

    async def told(self, runtime: Runtime) -> dict[str, tuple[str, int] | BackendUnavailable]:
        """Ask every one of them, for the doctor: what it tells, or why it does not."""
        told: dict[str, tuple[str, int] | BackendUnavailable] = {}
        for name, wire in self._known:
            try:
                told[name] = await self._ask(runtime, wire)
            except BackendUnavailable as error:
                told[name] = error
        return told

    async def _ask(self, runtime: Runtime, wire: Wire) -> tuple[str, int]:
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service.name)
        (reply,) = await twice(lambda: converse(wire, runtime, "", [question], self._limit))
        if answered("", reply) is None:
            raise BackendUnavailable("", reason="it knows no such service", refused=True)
        return reply[0].decode(), int(reply[1])

    def _nowhere(self, failures: Sequence[tuple[str, BackendUnavailable]]) -> RedisError:
        said = "; ".join(f"{name}: {error.reason}" for name, error in failures)
        text = f"no Sentinel tells where the master of {self._service.name!r} is: {said}"
        return Refused(text) if all(error.refused for _, error in failures) else MasterNotFoundError(text)

    def close(self) -> None:
        for _, wire in self._known:
            wire.close()


class MasterWire:
    """Connections to whoever is the master; an answer of anybody else is none."""

    def __init__(self, wire: Wire, sentinels: Sentinels, share: float) -> None:
        self._wire, self.sentinels, self._share = wire, sentinels, share
        self._address, self._next_look = ("", 0), 0.0
        self.checkout, self.checkin, self.discard, self.forget = wire.checkout, wire.checkin, wire.discard, wire.forget

    async def exchange(  # noqa: PLR0917 - the hot path: keywords cost
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> list[Any]:
        now, is_new = runtime.now(), not connection.dlock_used
        if is_new or now >= self._next_look:
            await self._look(runtime, insist=is_new)
            limit = max(now + limit - runtime.now(), self._share)
        if is_new:
            connection.host, connection.port = self._address
        elif (connection.host, connection.port) != self._address:
            raise RedisConnectionError(f"{connection.host}:{connection.port} is not the master any more")
        answers = await self._wire.exchange(runtime, connection, data + CHECK, replies + 1, limit, nudge_after)
        refusal = answers.pop()
        if isinstance(refusal, RedisError):
            if REFUSAL in str(refusal):
                raise RedisConnectionError(f"{connection.host}:{connection.port} is not a master, but a replica")
            raise refusal
        return answers

    async def _look(self, runtime: Runtime, *, insist: bool) -> None:
        """Learn where the master is now; if nobody can tell, and we do not insist, it is where it was."""
        self._next_look = runtime.now() + LOOK
        try:
            self._address = await self.sentinels.master(runtime, None if insist else 1)
        except RedisError:
            if insist:
                raise
            self._next_look = runtime.now() + LOOK

    def close(self) -> None:
        self._wire.close()
        self.sentinels.close()
