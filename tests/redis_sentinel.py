"""A master, its replicas and three Sentinels for tests, on free ports; they know each other from the start and end with us.

with group(directory) as shop: connect(shop.url); shop.fail_over()

Sentinels fail over only on request: a slow machine is not taken for a dead master.
"""

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import redis

from tests import servers, waiting
from tests.conftest import give_up
from tests.servers import Server, ServerMissing, free_port

HOST: Final = "127.0.0.1"
SERVICE: Final = "shop"
PATIENT, HASTY = 3_600_000, 300
"""Milliseconds of silence after which a master counts as down."""


@dataclass(kw_only=True)
class Group:
    """A master, its replicas, and the Sentinels that may move the master."""

    servers: list[Server]
    sentinels: list[Server]
    password: str = ""
    """The password of the Redis servers."""
    sentinel_password: str = ""
    authority: str = ""
    """The file with the certificate of the authority, if the servers use TLS."""

    @property
    def url(self) -> str:
        return self.url_of([sentinel.port for sentinel in self.sentinels])

    def url_of(self, ports: list[int]) -> str:
        user = f":{self.password}@" if self.password else ""
        query = f"?sentinel_password={self.sentinel_password}" if self.sentinel_password else ""
        scheme = "rediss" if self.authority else "redis"
        return f"{scheme}+sentinel://{user}" + ",".join(f"{HOST}:{port}" for port in ports) + f"/{SERVICE}{query}"

    def start(self) -> None:
        for server in (*self.servers, *self.sentinels):
            server.start()
        self.settle()

    def stop(self) -> None:
        for server in (*self.sentinels, *self.servers):
            server.kill()

    def client(self, server: Server) -> redis.Redis:
        password = self.sentinel_password if server in self.sentinels else self.password
        tls = {"ssl": True, "ssl_ca_certs": self.authority} if self.authority else {}
        return redis.Redis(HOST, server.port, password=password or None, socket_timeout=10, **tls)  # type: ignore[arg-type]

    def ask(self, server: Server, *command: Any) -> Any:
        """Send a command to one server or Sentinel."""
        with self.client(server) as client:
            return client.execute_command(*command)

    def master(self) -> Server:
        """Return the master, as the first Sentinel sees it."""
        _, port = self.ask(self.sentinels[0], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def replicas(self) -> list[Server]:
        master = self.master()
        return [server for server in self.servers if server is not master]

    def fail_over(self, *, pause: bool = False, patience: int = HASTY) -> Server:
        """Kill (or pause) the master, and return the new one when every Sentinel knows it."""
        old = self.master()
        old.pause() if pause else old.kill()
        self.be(patience)
        new = self.moved(old)
        self.be(PATIENT)
        return new

    def moved(self, old: Server) -> Server:
        """Wait until another server is the master, and return it."""
        until(lambda: self.master() is not old and self.role(self.master()) == b"master")
        port = str(self.master().port).encode()
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        until(lambda: all(self.ask(sentinel, *question)[1] == port for sentinel in self.sentinels))
        return self.master()

    def be(self, patience: int) -> None:
        for sentinel in self.sentinels:
            self.ask(sentinel, "SENTINEL", "SET", SERVICE, "down-after-milliseconds", patience)

    def role(self, server: Server) -> bytes:
        answer: bytes = self.ask(server, "ROLE")[0]
        return answer

    def settle(self) -> None:
        """Wait until every replica is in sync, and the Sentinels know it and each other."""
        master = self.master()
        until(lambda: self._in_step(self.ask(master, "ROLE")))
        for sentinel in self.sentinels:
            until(lambda sentinel=sentinel: self._is_ready(sentinel))  # type: ignore[misc]

    def _in_step(self, role: Any) -> bool:
        return role[0] == b"master" and sum(int(offset) > 0 for *_, offset in role[2]) == len(self.servers) - 1

    def _is_ready(self, sentinel: Server) -> bool:
        with self.client(sentinel) as client:
            peers = client.execute_command("SENTINEL", "SENTINELS", SERVICE)
            replicas = client.execute_command("SENTINEL", "REPLICAS", SERVICE)
        return all(is_linked(each) for each in (*peers, *replicas)) and len(replicas) == len(self.servers) - 1


def is_linked(instance: Any) -> bool:
    fields = instance if isinstance(instance, dict) else dict(zip(instance[::2], instance[1::2], strict=True))
    known = {str(key if isinstance(key, str) else key.decode()): value for key, value in fields.items()}
    flags, status = known["flags"], known.get("master-link-status", b"ok")
    return not any(bad in str(flags) for bad in ("disconnected", "s_down")) and str(status) in {"ok", "b'ok'"}


def until(condition: Callable[[], object]) -> None:
    """Wait for what no event announces; while a server cannot be asked, it has not happened."""

    def is_so() -> object:
        with contextlib.suppress(redis.RedisError):
            return condition()
        return False

    waiting.until(is_so)


def make(
    directory: Path, replicas: int = 1, password: str = "", sentinel_password: str = "", tls: Path | None = None
) -> Group:
    quick = ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"]
    quick += ["--requirepass", password, "--masterauth", password] if password else []
    data = [servers.redis(directory / f"r{number}", *quick) for number in range(1 + replicas)]
    for server in data:
        server.command = [*server.command, *over_tls(server.port, tls)]
    master, *behind = data
    for server in behind:
        server.command = [*server.command, "--replicaof", HOST, str(master.port)]
    peers = [(secrets.token_hex(20), free_port()) for _ in range(3)]
    lines = [
        f"sentinel monitor {SERVICE} {HOST} {master.port} 2",
        f"sentinel down-after-milliseconds {SERVICE} {PATIENT}",
        f"sentinel failover-timeout {SERVICE} 3000",
        *(f"sentinel known-replica {SERVICE} {HOST} {server.port}" for server in behind),
    ]
    if password:
        lines.append(f"sentinel auth-pass {SERVICE} {password}")
    if sentinel_password:
        lines += [f"requirepass {sentinel_password}", f"sentinel sentinel-pass {sentinel_password}"]
    sentinels = [_sentinel(directory / f"s{place}", place, peers, lines, tls) for place in range(3)]
    authority = str(tls / "ca.pem") if tls else ""
    return Group(
        servers=data,
        sentinels=sentinels,
        password=password,
        sentinel_password=sentinel_password,
        authority=authority,
    )


def over_tls(port: int, directory: Path | None) -> list[str]:
    """Return the options of a server that speaks only TLS, with the certificate in a directory."""
    if directory is None:
        return []
    files = {"cert": "cert.pem", "key": "key.pem", "ca-cert": "ca.pem"}
    options = [word for kind, name in files.items() for word in (f"--tls-{kind}-file", str(directory / name))]
    return ["--port", "0", "--tls-port", str(port), *options, "--tls-auth-clients", "no", "--tls-replication", "yes"]


def _sentinel(directory: Path, place: int, peers: list[tuple[str, int]], lines: list[str], tls: Path | None) -> Server:
    (me, port), file = peers[place], directory / "sentinel.conf"
    others = [f"sentinel known-sentinel {SERVICE} {HOST} {at} {peer}" for peer, at in peers if peer != me]
    text = "\n".join([f"port {port}", f"bind {HOST}", f"dir {directory}", f"sentinel myid {me}", *lines, *others])
    return Server(
        directory=directory,
        port=port,
        prepare=[["sh", "-c", f'printf "%s\\n" "$0" > "{file}"', text]],
        command=[servers.redis_system(), str(file), "--sentinel", *over_tls(port, tls)],
        ready="+monitor",
        url=f"redis://{HOST}:{port}",
    )


@contextlib.contextmanager
def group(directory: Path, **options: Any) -> Iterator[Group]:
    """Run a group for a fixture, with the options of `make`; skip, or fail under CI, without Redis."""
    try:
        shop = make(directory, **options)
    except ServerMissing as missing:
        give_up(str(missing))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        shop.start()
        yield shop
    finally:
        shop.stop()
        shutil.rmtree(directory, ignore_errors=True)
