"""Checks whether a Redis or Valkey is fit to store leases."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from dlock_core.backends.redis.transport import raise_for_error, retry_once, send_commands
from dlock_core.doctor.clocks import SAMPLE_COUNT, Sample, clock, round_trip, timing, wall
from dlock_core.doctor.finding import Finding, ok, unsafe, warning
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from dlock_core.backends.redis.transport import Transport
    from dlock_core.doctor.clocks import Timing
    from dlock_core.runtime import Runtime

__all__ = ["diagnose", "judge", "measure", "of_node"]

MIN_VERSION: Final = (6, 2)
FULL_SHARE: Final = 0.8
TIMEOUT_S: Final = 2.0
"""The time limit of each of the doctor's requests."""

Info = dict[str, str]


class Server(Protocol):
    """A server that can be examined: a store, or one node of a store."""

    def transport(self, runtime: Runtime) -> Transport:
        """Return its connections."""


class LedServer(Server, Protocol):
    """A server that may be found through Sentinels."""

    def wire(self, runtime: Runtime) -> Transport:
        """Return the transport that uses these Sentinels."""


async def diagnose(backend: LedServer, runtime: Runtime) -> list[Finding]:
    """Examine one server, and its Sentinels, if any; raises BackendUnavailable."""
    found = judge(*await measure(backend, runtime))
    sentinels = getattr(backend.wire(runtime), "sentinels", None)
    return found if sentinels is None else [*_sentinels(await sentinels.ask_all(runtime)), *found]


async def measure(backend: Server, runtime: Runtime) -> tuple[Info | Exception, Timing]:
    """Return the server's INFO, or the error instead, and the timing of the requests."""
    answers = await retry_once(lambda: _ask(backend, runtime, "INFO"))
    info = answers if isinstance(answers, Exception) else _read(answers)
    return info, timing([await _sample(backend, runtime) for _ in range(SAMPLE_COUNT)])


def judge(info: Info | Exception, found: Timing) -> list[Finding]:
    """Judge what was measured at one server."""
    reason = "keys expire, and tokens are drawn, by its clock: after a step back the fence refuses new holders at first"
    near = [round_trip(found.round_trip), clock(found, reason)]
    if isinstance(info, Exception):
        remedy = "ACL SETUSER … +info, for the user that the doctor logs in with"
        return [warning("info", str(info), "eviction, persistence and replication are not known", remedy), *near]
    looks = (_version, _role, _eviction, _memory, _persistence, _clients)
    return [*[look(info) for look in looks], *near]


async def _ask(backend: Server, runtime: Runtime, command: str) -> Any:
    (reply,) = await send_commands(backend.transport(runtime), runtime, "", [(command,)], TIMEOUT_S)
    return reply


async def _sample(backend: Server, runtime: Runtime) -> Sample:
    sent = wall()
    seconds, micros = raise_for_error("", await _ask(backend, runtime, "TIME"))
    return Sample(sent, wall(), int(seconds) + int(micros) / 1_000_000)


def _read(text: bytes | str) -> Info:
    lines = (text.decode(errors="replace") if isinstance(text, bytes) else text).splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def _version(info: Info) -> Finding:
    name, number = ("Valkey", info["valkey_version"]) if "valkey_version" in info else ("Redis", info["redis_version"])
    if tuple(map(int, re.findall(r"\d+", number)[:2])) >= MIN_VERSION:
        return ok("version", f"{name} {number}")
    return unsafe(
        "version", f"{name} {number}", "its scripts lack commands that dlock needs", "upgrade to 6.2 or newer"
    )


def _role(info: Info) -> Finding:
    replicas = int(info.get("connected_slaves", 0))
    if info.get("role") != "master":
        reason = "a replica refuses to write: no lease is granted here"
        return unsafe("replication", f"a replica of {info.get('master_host')}", reason, "name the primary")
    if not replicas:
        return ok("replication", "a primary without replicas")
    reason = "replicas follow later: after a failover a lease may be forgotten, and two may believe that they hold it"
    remedy = "protect data with the fence (the default); or take a store that decides by majority"
    return warning("replication", f"a primary with {replicas} replicas", reason, remedy)


def _eviction(info: Info) -> Finding:
    policy, limit = info.get("maxmemory_policy", "?"), int(info.get("maxmemory", 0))
    measured = f"maxmemory-policy {policy}, maxmemory {limit or 'unlimited'}, {info.get('evicted_keys', '?')} evicted"
    if policy == "noeviction":
        return ok("eviction", measured)
    reason = "leases have an expiry: under memory pressure Redis may throw one away while it is held"
    remedy = "CONFIG SET maxmemory-policy noeviction, or an instance for locks alone"
    return (unsafe if limit else warning)("eviction", measured, reason, remedy)


def _memory(info: Info) -> Finding:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    measured = f"{used / 1e6:.1f} MB of {f'{limit / 1e6:.1f} MB' if limit else 'unlimited memory'}"
    if used < FULL_SHARE * (limit or used + 1) or not limit:
        return ok("memory", measured)
    return warning("memory", measured, "a full server grants no lease (OOM)", "raise maxmemory, or tidy up")


def _persistence(info: Info) -> Finding:
    append, saved = info.get("aof_enabled") == "1", info.get("rdb_last_bgsave_status", "ok")
    writes = info.get("aof_last_write_status", "ok") if append else saved
    measured = f"append-only file {'on' if append else 'off'}, last write {writes}"
    if writes != "ok":
        reason = "it may refuse to write what it cannot save, and it forgets every lease when it restarts"
        return unsafe("persistence", measured, reason, "look at its log and its disk")
    if append:
        return ok("persistence", measured)
    reason = "a restart forgets every lease: others are let in while holders are at work, and only the fence stops them"
    return warning("persistence", measured, reason, "appendonly yes; appendfsync everysec is enough")


def _clients(info: Info) -> Finding:
    used, most = int(info.get("connected_clients", 0)), int(info.get("maxclients", 0) or 10_000)
    measured = f"{used} of {most} connections in use"
    if used < FULL_SHARE * most:
        return ok("connections", measured)
    reason = "every waiter keeps a connection; a process that gets none can neither wait nor renew"
    return warning("connections", measured, reason, "raise maxclients, or find out which client keeps so many")


def _sentinels(answers: dict[str, tuple[str, int] | BackendUnavailable]) -> list[Finding]:
    masters = {address for address in answers.values() if isinstance(address, tuple)}
    answering = sum(isinstance(address, tuple) for address in answers.values())
    measured = f"{answering} of {len(answers)} Sentinels answer"
    if len(masters) > 1:
        remedy = "look again in a minute; if it stays, compare what they log"
        one = unsafe("sentinels", measured, "they do not agree on the master: two servers may take writes", remedy)
    elif answering < 3:
        reason = "with fewer than three, no failover happens while one of them is away"
        one = warning("sentinels", measured, reason, "run three, apart from each other, and name all of them")
    else:
        one = ok("sentinels", measured)
    downs = {name: error for name, error in answers.items() if isinstance(error, BackendUnavailable)}
    return [one, *[replace(_away(error), part=name) for name, error in downs.items()]]


def _away(error: BackendUnavailable) -> Finding:
    return warning("reach", error.reason, "it takes no part in failovers", "start it, or correct the address")


def of_node(part: str, findings: list[Finding]) -> list[Finding]:
    """Return the findings with the name of the node that they concern."""
    return [replace(one, part=part) for one in findings]
