"""Follow a master: the Sentinels report its address, and each request checks whether the server is a master.

A server that has become a replica would answer with outdated data, so its answers are discarded. (Source: the
guidelines for Sentinel clients in the Redis documentation.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.sentinel import MasterNotFoundError

from dlock_core.backends.redis.addresses import pool_from_url, split_hosts, title, transports
from dlock_core.backends.redis.transport import Refused, pack_commands, raise_for_error, retry_once, send_commands
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backends.redis.transport import Transport
    from dlock_core.runtime import Runtime

__all__ = ["Service", "service_from_url", "transports_to_master"]

PORT: Final = 26379
MASTER_PROBE: Final = pack_commands([("WAIT", "0", "0")])
"""A WAIT for no replicas returns at once, and every replica refuses it, even a writable one. ROLE would cost more."""
REPLICA_REFUSAL: Final = "with replica instances"
MASTER_LOOKUP_INTERVAL_S: Final = 1.0
"""How often the Sentinels are queried: a master that was replaced takes some time to notice it."""
_BAD: Final = (
    "bad Sentinel URL: expected redis+sentinel://[user:password@]host:port,host:port,host:port/service/db, the user "
    "and password of the Redis servers, with every : / ? # @ , of them percent-encoded; what the Sentinels want, if "
    "anything, follows as ?sentinel_username=…&sentinel_password=…"
)


class Service(NamedTuple):
    """The name of a master that Sentinels monitor, and the Sentinels."""

    name: str
    sentinels: list[Any]
    """Clients or pools of redis-py."""
    master: Any
    """A pool that makes connections like those to the master, except for the address."""
    address: str | None = None
    """The host at which the master is reached, if that is not the one that the Sentinels report."""


def service_from_url(url: str) -> Service:
    """Parse redis+sentinel:// or, for TLS everywhere, rediss+sentinel://; raises ValueError, without a password."""
    user, sentinels, path, options = split_hosts(url, port=PORT, path=r"/[^/?#]+(?:/\d*)?", bad=_BAD)
    scheme, (name, _, database) = url.partition("+")[0], path[1:].partition("/")
    given = dict(parse_qsl(options[1:], keep_blank_values=True))
    login = {key: given.pop(f"sentinel_{key}") for key in ("username", "password") if f"sentinel_{key}" in given}
    how = urlencode({key: value for key, value in given.items() if key.startswith(("ssl_", "socket_"))})
    pools = [pool_from_url(f"{scheme}://{host}?{how}") for host in sentinels]
    for pool in pools:
        pool.connection_kwargs |= login
    return Service(
        unquote(name), pools, pool_from_url(f"{scheme}://{user}{sentinels[0]}/{database}?{urlencode(given)}")
    )


def transports_to_master(client: Any, limit: float) -> tuple[Transport, Transport] | None:
    """Return transports to the master, for threads and for tasks; None for a client that does not follow Sentinels.

    `limit` is the time in seconds for querying one Sentinel after the other and connecting.
    """
    service = client if isinstance(client, Service) else _service_of_client(client)
    if service is None:
        return None
    share = limit / (len(service.sentinels) + 1)
    of_threads, of_tasks = zip(*[transports(sentinel, share) for sentinel in service.sentinels], strict=True)
    threads, tasks = transports(service.master, share)
    return (
        MasterTransport(threads, Sentinels(service, of_threads, share), share),
        MasterTransport(tasks, Sentinels(service, of_tasks, share), share),
    )


def _service_of_client(client: Any) -> Service | None:
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
    """The Sentinels of a service: queried one after the other, those that did not answer last."""

    def __init__(self, service: Service, known: Sequence[Transport], limit: float) -> None:
        self._service, self._limit = service, limit
        self._known = list(zip([title(sentinel) for sentinel in service.sentinels], known, strict=True))

    async def master(self, runtime: Runtime, max_sentinels: int | None = None) -> tuple[str, int]:
        """Return the master's host and port; raises RedisError, which names the Sentinels that were queried."""
        failures: list[tuple[str, BackendUnavailable]] = []
        for name, transport in self._known[:max_sentinels]:
            try:
                host, port = await self._ask(runtime, transport)
            except BackendUnavailable as error:
                failures.append((name, error))
                self._known = [*self._known[1:], self._known[0]]
            else:
                return self._service.address or host, port
        raise self._no_master(failures)

    async def ask_all(self, runtime: Runtime) -> dict[str, tuple[str, int] | BackendUnavailable]:
        """Return the answer of every Sentinel, or the error instead: for the doctor."""
        told: dict[str, tuple[str, int] | BackendUnavailable] = {}
        for name, transport in self._known:
            try:
                told[name] = await self._ask(runtime, transport)
            except BackendUnavailable as error:
                told[name] = error
        return told

    async def _ask(self, runtime: Runtime, transport: Transport) -> tuple[str, int]:
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service.name)
        (reply,) = await retry_once(lambda: send_commands(transport, runtime, "", [command], self._limit))
        if raise_for_error("", reply) is None:
            raise BackendUnavailable("", reason="it does not know this service", refused=True)
        return reply[0].decode(), int(reply[1])

    def _no_master(self, failures: Sequence[tuple[str, BackendUnavailable]]) -> RedisError:
        said = "; ".join(f"{name}: {error.reason}" for name, error in failures)
        text = f"no Sentinel tells where the master of {self._service.name!r} is: {said}"
        return Refused(text) if all(error.refused for _, error in failures) else MasterNotFoundError(text)

    def close(self) -> None:
        for _, transport in self._known:
            transport.close()


class MasterTransport:
    """Connections to the current master; an answer from any other server does not count."""

    def __init__(self, transport: Transport, sentinels: Sentinels, share: float) -> None:
        self._wire, self.sentinels, self._share = transport, sentinels, share
        self._address, self._next_lookup = ("", 0), 0.0
        self.checkout, self.checkin, self.discard, self.forget = (
            transport.checkout,
            transport.checkin,
            transport.discard,
            transport.forget,
        )

    async def exchange(  # noqa: PLR0917 - the hot path: keywords cost
        self, runtime: Runtime, connection: Any, data: bytes, replies: int, limit: float, nudge_after: float = 0.0
    ) -> list[Any]:
        now, is_new = runtime.now(), not connection.dlock_is_reused
        if is_new or now >= self._next_lookup:
            await self._look_up_master(runtime, must_answer=is_new)
            limit = max(now + limit - runtime.now(), self._share)
        if is_new:
            connection.host, connection.port = self._address
        elif (connection.host, connection.port) != self._address:
            raise RedisConnectionError(f"{connection.host}:{connection.port} is not the master any more")
        answers = await self._wire.exchange(runtime, connection, data + MASTER_PROBE, replies + 1, limit, nudge_after)
        refusal = answers.pop()
        if isinstance(refusal, RedisError):
            if REPLICA_REFUSAL in str(refusal):
                raise RedisConnectionError(f"{connection.host}:{connection.port} is not a master, but a replica")
            raise refusal
        return answers

    async def _look_up_master(self, runtime: Runtime, *, must_answer: bool) -> None:
        """Look up the current master. Without an answer it is assumed unchanged, unless `must_answer`."""
        self._next_lookup = runtime.now() + MASTER_LOOKUP_INTERVAL_S
        try:
            self._address = await self.sentinels.master(runtime, None if must_answer else 1)
        except RedisError:
            if must_answer:
                raise
            self._next_lookup = runtime.now() + MASTER_LOOKUP_INTERVAL_S

    def close(self) -> None:
        self._wire.close()
        self.sentinels.close()
