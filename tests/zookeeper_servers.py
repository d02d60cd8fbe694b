"""Real ZooKeeper servers for tests: one alone, or an ensemble of three, on top of `tests.servers`.

Ticks are short, to allow short sessions; the heap is small, and nothing is forced to disk.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.servers import Server, ServerMissing, find, free_port
from tests.waiting import until

JARS: Final = (Path("/usr/share/java/zookeeper.jar"), Path("/usr/share/java/slf4j-simple.jar"))
MISSING: Final = "ZooKeeper is missing: apt-get install zookeeper default-jre-headless"
TICK: Final = 100
"""Milliseconds: a session may be as short as 500."""
DEAD_AFTER: Final = 10
"""Ticks of silence after which a member is taken for dead by its leader: a second."""


def zookeeper(directory: Path, *options: str) -> Server:
    """Return a single server; the options are Java's, such as "-Dzookeeper.forceSync=yes"."""
    return _server(directory, free_port(), options=options)


@dataclass
class Ensemble:
    """Three servers, one of which leads."""

    members: list[Server]

    def start(self) -> None:
        for member in self.members:
            member.start()
        self.wait()

    def stop(self) -> None:
        for member in self.members:
            member.stop()

    @property
    def url(self) -> str:
        return "zookeeper://" + ",".join(f"127.0.0.1:{member.port}" for member in self.members)

    @property
    def leader(self) -> Server:
        self.wait()
        return next(member for member in self.members if mode(member) == "leader")

    @property
    def followers(self) -> list[Server]:
        self.wait()
        return [member for member in self.members if mode(member) == "follower"]

    def wait(self) -> None:
        """Wait until all have agreed on a leader."""
        until(lambda: sorted(mode(member) for member in self.members) == ["follower", "follower", "leader"])


def ensemble(directory: Path, *, dead_after: int = DEAD_AFTER) -> Ensemble:
    """Return three servers; on a loaded machine a living member may be silent for some seconds, and an election follows."""
    directory.mkdir(mode=0o700)
    ports = [(free_port(), free_port(), free_port()) for _ in range(3)]
    peers = [f"server.{number}=127.0.0.1:{a}:{b};127.0.0.1:{port}" for number, (a, b, port) in enumerate(ports, 1)]
    return Ensemble(
        [
            _server(directory / f"zookeeper{number}", port, f"syncLimit={dead_after}", *peers, number=number)
            for number, (_, _, port) in enumerate(ports, 1)
        ]
    )


def mode(server: Server) -> str:
    """Return "leader", "follower" or "standalone", or an empty text when it does not serve."""
    return next((line.partition(": ")[2] for line in asked(server, "srvr") if line.startswith("Mode: ")), "")


def asked(server: Server, word: str) -> Iterator[str]:
    """Yield the lines of its answer to one of ZooKeeper's four-letter words; none when it does not answer."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 1) as connection:
        connection.sendall(word.encode())
        with connection.makefile() as answer:
            yield from answer.read().splitlines()


def _server(directory: Path, port: int, *peers: str, number: int = 0, options: Sequence[str] = ()) -> Server:
    if not all(jar.exists() for jar in JARS):
        raise ServerMissing(MISSING)
    settings = [
        f"tickTime={TICK}", "initLimit=50", f"dataDir={directory}", "admin.enableServer=false",
        "minSessionTimeout=500", "maxSessionTimeout=60000", "4lw.commands.whitelist=*", "maxClientCnxns=0",
        *(peers or [f"clientPort={port}", "clientPortAddress=127.0.0.1"]),
    ]  # fmt: skip
    text = "\\n".join(settings)
    java = find("java", package="default-jre-headless")
    small = ["-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
    fast = ["-Dzookeeper.forceSync=no", "-Dzookeeper.extendedTypesEnabled=true", "-Dzookeeper.preAllocSize=1024"]
    often = ["-Dznode.container.checkIntervalMs=1000"]
    where = ["-cp", ":".join(map(str, JARS)), "org.apache.zookeeper.server.quorum.QuorumPeerMain"]
    return Server(
        directory=directory,
        port=port,
        prepare=[["sh", "-c", f"printf '{text}\\n' > zoo.cfg; echo {number} > myid"]],
        command=[java, *small, *fast, *often, *options, *where, str(directory / "zoo.cfg")],
        ready="ZooKeeper audit is disabled",
        url=f"zookeeper://127.0.0.1:{port}",
    )
