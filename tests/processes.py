"""Other processes for tests: start them, talk to them, stop and kill them.

A function that runs in another process is importable, and gets a `Link` to the test as its first argument. The process
is not forked from the test's, so it has nothing that the test made or patched. It is forked from a server that has only
imported `preloaded`, because a new interpreter takes 1.5 s of CPU time for that, and the suite starts hundreds.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final

from tests.waiting import until

FORKSERVER: Final = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.preloaded"])
WITHIN: Final = 60.0


class Link:
    """One end of a conversation between the test and its worker; what it carries must pickle."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def say(self, word: object) -> None:
        self.pipe.send(("word", word))

    def hear(self, within: float = WITHIN) -> Any:
        """Return the other end's next word; raise EOFError when it has died, RuntimeError with its traceback when it has failed."""
        return self.expect("word", within)

    def expect(self, wanted: str, within: float) -> Any:
        if not self.pipe.poll(within):
            raise TimeoutError(f"no {wanted} within {within} s")
        kind, content = self.pipe.recv()
        if kind != wanted:
            raise RuntimeError(f"expected a {wanted}, got a {kind}: {content}")
        return content


def pause(pid: int) -> None:
    """Send SIGSTOP, and return when all threads of the process have stopped."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _stands_still(pid))


def _stands_still(pid: int) -> bool:
    """Return whether every thread has stopped; one that is inside the kernel stops when it leaves it."""
    states = [file.read_text().rpartition(")")[2].split()[0] for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) <= {"T", "Z"}


class Worker(Link):
    """A process that runs `function(link, *args)`."""

    def __init__(self, function: Callable[..., object], *args: object, barrier: Barrier | None = None) -> None:
        ours, theirs = FORKSERVER.Pipe()
        super().__init__(ours)
        call = (dict(os.environ), theirs, function.__module__, function.__qualname__, args, barrier)
        self.process = FORKSERVER.Process(target=_work, args=call, daemon=True)
        self.process.start()
        theirs.close()

    def result(self, within: float = WITHIN) -> Any:
        """Return what the function returned; raise RuntimeError with the traceback if it raised."""
        content = self.expect("result", within)
        self.process.join(within)
        return content

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end; the kernel closes the sockets and locks of the process."""
        self.process.kill()
        self.process.join()

    def pause(self) -> None:
        """Send SIGSTOP, and return when the process has really stopped."""
        pause(self._pid)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    @property
    def _pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid


@contextlib.contextmanager
def worker(function: Callable[..., object], *args: object) -> Iterator[Worker]:
    """Run a worker for one test: `with worker(hold, "order:42") as holder: holder.hear(); holder.kill()`. The block ends with a kill."""
    one = Worker(function, *args)
    try:
        yield one
    finally:
        one.kill()
        one.pipe.close()


def run(function: Callable[..., object], arguments: Iterable[tuple[object, ...]], within: float = WITHIN) -> list[Any]:
    """Run one process for each tuple of arguments, all released at the same moment, and return their results in order."""
    calls = list(arguments)
    barrier = FORKSERVER.Barrier(len(calls))
    workers = [Worker(function, *args, barrier=barrier) for args in calls]
    try:
        return [one.result(within) for one in workers]
    finally:
        for one in workers:
            one.kill()
            one.pipe.close()


def _work(
    environment: dict[str, str],
    pipe: Connection,
    module: str,
    name: str,
    args: tuple[object, ...],
    barrier: Barrier | None,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    try:
        function = _find(module, name)
        if barrier is not None:
            barrier.wait(WITHIN)
        content = ("result", function(Link(pipe), *args))
    except BaseException:
        content = ("failure", traceback.format_exc())
    with contextlib.suppress(BrokenPipeError):
        pipe.send(content)


def _find(module: str, name: str) -> Callable[..., object]:
    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()  # done by `preloaded`, unless something else has started the server
    function: Callable[..., object] = getattr(importlib.import_module(module), name)
    return function
