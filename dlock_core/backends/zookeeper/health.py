"""What makes a ZooKeeper ensemble fit to keep leases."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kazoo.protocol.serialization import Exists

from dlock_core.doctor.clocks import SAMPLE_COUNT, round_trip, wall
from dlock_core.doctor.finding import Finding, ok, unsafe, warning

if TYPE_CHECKING:
    from dlock_core.backends.zookeeper.session import ZooKeeperSession
    from dlock_core.runtime import Runtime

__all__ = ["diagnose"]

MIN_VERSION: Final = (3, 5)
REPLY_TIMEOUT_S: Final = 2.0
"""Time limit in seconds of a server's answer to `srvr`."""
MIN_SESSION_S: Final = 4.0
"""Session length in seconds below which a pause for garbage collection may end it."""


async def diagnose(session: ZooKeeperSession, hosts: str, runtime: Runtime) -> list[Finding]:
    """Examine the session, and every server by the command `srvr`, which ZooKeeper allows by default."""
    await session.ask(runtime, "", [Exists("/", None)])
    seconds = []
    for _ in range(SAMPLE_COUNT):
        sent = wall()
        await session.ask(runtime, "", [Exists("/", None)])
        seconds.append(wall() - sent)
    told = {host: await runtime.call(_srvr, host) for host in hosts.split(",")}
    found = [_servers(told), _session(session.valid_for * 1.5), round_trip(sorted(seconds)[SAMPLE_COUNT // 2])]
    found.append(ok("clock", "no lock depends on it", "sessions are counted in the servers' ticks"))
    return found + [replace(one, part=host) for host, text in told.items() for one in _server(text)]


def _srvr(host: str) -> str | OSError:
    """Return one server's answer, which begins with its version."""
    name, _, port = host.rpartition(":")
    try:
        with socket.create_connection((name.strip("[]"), int(port)), REPLY_TIMEOUT_S) as connection:
            connection.sendall(b"srvr")
            with connection.makefile("rb") as answer:
                return answer.read(65536).decode(errors="replace")
    except OSError as error:
        return error


def _servers(told: dict[str, str | OSError]) -> Finding:
    answering, number = sum(isinstance(text, str) for text in told.values()), len(told)
    measured = f"{answering} of the {number} servers of the URL answer"
    if answering < number:
        return warning("majority", measured, "without a majority no lock can be taken", "start the others")
    if number == 1:
        return warning("majority", measured, "while it is away no lock can be taken", "name three or five servers")
    return ok("majority", measured)


def _session(seconds: float) -> Finding:
    measured = f"{seconds:.1f} s: so long does a dead process keep its locks"
    if seconds >= MIN_SESSION_S:
        return ok("session", measured)
    return warning("session", measured, "a short pause of a living process ends all its leases", "raise the session")


def _server(text: str | OSError) -> list[Finding]:
    if isinstance(text, OSError):
        reason = "it takes no part in majorities"
        return [warning("reach", f"{type(text).__name__}: {text}", reason, "start it, or correct the address")]
    version, mode = re.search(r"version: (\d+)\.(\d+)[\w.]*", text), re.search(r"Mode: (\w+)", text)
    if version is None:
        return [ok("version", "not told", "the server's 4lw.commands.whitelist leaves out srvr")]
    return [_version(version), ok("role", mode[1] if mode else "unknown")]


def _version(found: re.Match[str]) -> Finding:
    text = f"ZooKeeper {found[0].removeprefix('version: ')}"
    if (int(found[1]), int(found[2])) >= MIN_VERSION:
        return ok("version", text)
    return unsafe("version", text, "it lacks requests that dlock makes", "upgrade to 3.5 or newer")
