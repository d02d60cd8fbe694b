"""Redis servers whose clocks are really set forward and back."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from tests import servers
from tests.conftest import give_up
from tests.waiting import until


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a library that changes the clock of the server into which it is loaded."""
    compiler = shutil.which("gcc")
    if compiler is None:
        give_up("gcc is missing: apt-get install gcc")
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([str(compiler), "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return library


class Turned:
    """A Redis with its own clock."""

    def __init__(self, shim: Path, directory: Path) -> None:
        self._file = directory.with_suffix(".clock")
        self._file.write_text("0")
        self.server = servers.redis(directory)
        variables = [f"LD_PRELOAD={shim}", f"CLOCK_FILE={self._file}"]
        self.server.command = ["env", *variables, *self.server.command]
        self.server.start()

    def set(self, seconds: int) -> None:
        """Set the clock ahead of the machine's by this many seconds, or behind it if negative."""
        new = self._file.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self._file)  # The server never reads an empty file.
        with redis.Redis.from_url(self.server.url) as client:
            until(lambda: abs(client.time()[0] - time.time() - seconds) < 5)  # A server may keep the time for a while.


@pytest.fixture
def start(shim: Path, tmp_path: Path) -> Iterator[Callable[[], Turned]]:
    """Yield a function that starts such a server."""
    with ExitStack() as stack:

        def begin() -> Turned:
            turned = Turned(shim, tmp_path / f"redis{len(list(tmp_path.iterdir()))}")
            stack.callback(turned.server.stop)
            return turned

        yield begin
