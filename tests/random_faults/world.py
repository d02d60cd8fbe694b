"""The servers of a run, the proxies in front of them, and their addresses for the workers."""

import shutil
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tests import redis_cluster, redis_sentinel, servers
from tests.etcd_servers import make as make_etcd
from tests.proxy import Proxy
from tests.random_faults.items import TABLES, ZOOKEEPER_SESSION_S, every_item
from tests.random_faults.sqla_clients import engine_of
from tests.servers import Server
from tests.zookeeper_servers import zookeeper

CLOCK_SOURCE: Final = Path(__file__).parents[1] / "faults" / "clock.c"
DATABASES: Final = ("postgresql", "mariadb")
IN_DATABASE: Final = ("table", "session", "advisory", "version")
TIMEOUT_S: Final = 0.5
NODES: Final = 3


class World:
    """The servers that the given stores need, and PostgreSQL."""

    def __init__(self, directory: Path, stores: list[str], *, proxied: bool = True) -> None:
        self.directory, self.stores, self.proxied = directory, stores, proxied
        needed = {item.database for item in every_item(stores).values()}
        self.databases = [name for name in DATABASES if name in {"postgresql", *needed}]
        self.servers: dict[str, Server] = {}
        """By the name that faults use."""
        self.proxies: dict[str, Proxy] = {}
        self.clocks: dict[str, Path] = {}
        """Files that contain the seconds by which a server's clock is stepped."""
        self.sentinel: redis_sentinel.Group | None = None
        self.cluster: redis_cluster.Cluster | None = None
        self.database_file = directory / "shop.sqlite3"
        self._stack = ExitStack()
        self._shim = self._compiled()

    def start(self) -> None:
        steps = [getattr(self, f"_{database}") for database in self.databases]
        steps += [getattr(self, f"_{store}") for store in self.stores if store not in IN_DATABASE]
        for step in steps:
            step()
        self._start_all()
        self._create_tables()

    def stop(self) -> None:
        self._stack.close()
        for proxy in self.proxies.values():
            proxy.__exit__(None, None, None)
        for server in self.servers.values():
            server.kill()

    def config(self) -> dict[str, Any]:
        """Return the configuration for the workers."""
        options = {"timeout": TIMEOUT_S}
        urls = {
            "redis": lambda: (f"redis://{self._ports('redis')}/0", options),
            "turned": lambda: (f"redis://{self._ports('turned')}/0", options),
            "sentinel": lambda: (self.sentinel.url if self.sentinel else "", options),
            "cluster": lambda: (self.cluster.url if self.cluster else "", options),
            "redlock": lambda: ("redlock://" + self._ports("redlock"), options),
            "etcd": lambda: ("etcd://" + self._ports("etcd"), {"timeout": 1.0}),
            "zookeeper": lambda: ("zookeeper://" + self._ports("zookeeper"), {"session": ZOOKEEPER_SESSION_S}),
        }
        made = {name: urls[name]() for name in self.stores if name in urls}
        ports = {name: self._port(name) for name in self.databases}
        return {
            "directory": str(self.directory),
            "stores": {name: {"url": url, "options": given} for name, (url, given) in made.items()},
            "databases": ports | {"sqlite": str(self.database_file)},
        }

    def direct(self) -> dict[str, Any]:
        """Return the databases' addresses without the proxies, for the runner itself."""
        ports = {name: self.servers[name].port for name in self.databases}
        return {"databases": ports | {"sqlite": str(self.database_file)}}

    def _ports(self, store: str) -> str:
        return ",".join(f"127.0.0.1:{self._port(name)}" for name in self.servers if name.startswith(store))

    def _port(self, name: str) -> int:
        """Return the port through which workers reach a server."""
        return (self.proxies if self.proxied else self.servers)[name].port

    def _serve(self, name: str, server: Server) -> None:
        self.servers[name] = server
        if self.proxied:
            self.proxies[name] = Proxy(server.port)

    def _start_all(self) -> None:
        for proxy in self.proxies.values():
            proxy.__enter__()
        for server in self.servers.values():
            server.start()
        if self.sentinel is not None:
            self._stack.callback(self.sentinel.stop)
            self.sentinel.start()
        if self.cluster is not None:
            self._stack.callback(self.cluster.stop)
            self.cluster.start()

    def _postgresql(self) -> None:
        server = servers.postgresql(self.directory / "postgresql", servers.free_port())
        server.stop_signal = signal.SIGQUIT  # ends it and its child processes like a crash
        self._serve("postgresql", server)

    def _mariadb(self) -> None:
        server = servers.mariadb(self.directory / "mariadb", servers.free_port())
        # Commits must survive a crash of the server, and a wait for a row must not last a minute.
        kept = ["--innodb-flush-log-at-trx-commit=2", "--innodb-lock-wait-timeout=8"]
        server.command = [*server.command, *kept]
        self._serve("mariadb", server)

    def _redis(self) -> None:
        self._serve("redis", servers.redis(self.directory / "redis"))

    def _turned(self) -> None:
        self._serve("turned", self._with_clock("turned", servers.redis(self.directory / "turned")))

    def _redlock(self) -> None:
        for place in range(NODES):
            name = f"redlock{place}"
            self._serve(name, self._with_clock(name, servers.redis(self.directory / name)))

    def _sentinel(self) -> None:
        (self.directory / "sentinel").mkdir()
        self.sentinel = redis_sentinel.make(self.directory / "sentinel")

    def _cluster(self) -> None:
        self.cluster = redis_cluster.Cluster(self.directory / "cluster")

    def _etcd(self) -> None:
        (self.directory / "etcd").mkdir()
        [member] = make_etcd(self.directory / "etcd", 1).members
        self._serve("etcd", member)

    def _zookeeper(self) -> None:
        self._serve("zookeeper", zookeeper(self.directory / "zookeeper"))

    def _compiled(self) -> Path | None:
        """Compile the library that steps a server's clock; without a compiler, no clock is stepped."""
        compiler = shutil.which("gcc")
        if compiler is None:
            return None
        library = self.directory / "clock.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, CLOCK_SOURCE, "-ldl"], check=True)
        return library

    def _with_clock(self, name: str, server: Server) -> Server:
        if self._shim is not None:
            self.clocks[name] = self.directory / f"{name}.clock"
            self.clocks[name].write_text("0")
            variables = [f"LD_PRELOAD={self._shim}", f"CLOCK_FILE={self.clocks[name]}"]
            server.command = ["env", *variables, *server.command]
        return server

    def _create_tables(self) -> None:
        from sqlalchemy import text

        from sqla_dlock import tables

        items = every_item(self.stores).values()
        for name in (*self.databases, "sqlite"):
            engine = engine_of(name, self.direct())
            tables.fence_metadata.create_all(engine)
            with engine.begin() as connection:
                for table in TABLES:
                    connection.execute(text(table))
                for item in items:
                    if item.database == name:
                        connection.execute(
                            text("INSERT INTO item (name, value, current, version) VALUES (:key, 0, 0, 1)"),
                            {"key": item.key},
                        )
                        connection.execute(text("INSERT INTO orders VALUES (:key, 0, 'paid')"), {"key": item.key})
            if name == "postgresql":
                tables.lease_metadata.create_all(engine)
            engine.dispose()
