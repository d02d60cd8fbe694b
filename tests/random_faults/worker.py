"""A worker process: `main(CONFIG, KIND, NAME)`. It works until the phase file announces the end.

It also injects faults itself: it stops at a stage, forks, cancels its tasks, or is interrupted by a signal handler that
raises.
"""

import asyncio
import faulthandler
import gc
import json
import logging
import os
import random
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

from dlock_core import DLockError, NotHeld
from tests.random_faults import sabotage
from tests.random_faults.attempt import Attempt, Chooser, Refused, TimeLimit
from tests.random_faults.crew import TASK_KINDS
from tests.random_faults.history import Recorder

TASKS: Final = 2
INTERRUPT_RATE, CANCEL_RATE, FORK_RATE = 0.06, 0.1, 0.01
INTERRUPT_WITHIN_S, CANCEL_WITHIN_S = 0.04, 0.08
FORK_WITHIN_S: Final = 20
DRIVERS: Final = ("django.db", "sqlalchemy", "asyncpg", "psycopg", "pymysql", "MySQLdb", "sqlite3")
NOT_OF_DRIVERS: Final = (
    "MissingGreenlet",
    "InvalidRequestError",
    "IllegalStateChangeError",
    "TransactionManagementError",
    "ProgrammingError",
)
"""Errors of frameworks and drivers that show a mistake in a program, such as a wrong statement, and not a fault."""
OUT_OF_STEP: Final = "Commands out of sync"
"""mysqlclient's error 2014 is also a ProgrammingError: a signal handler raised before a reply was read."""


class Phase:
    """The runner's order to the workers: to work on some stores, be quiet, or end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cycle, self.name, self.stores = -1, "quiet", list[str]()

    def look(self) -> str:
        said = json.loads(self._path.read_text())
        self.cycle, self.name, self.stores = said["cycle"], said["name"], said["stores"]
        return self.name


class Worker:
    """The common part of both kinds of worker."""

    def __init__(self, config: dict[str, Any], kind: str, name: str) -> None:
        directory = Path(config["directory"])
        self.kind, self.name, self.config = kind, name, config
        self.recorder = Recorder(directory / f"{name}.history")
        self.phase = Phase(directory / "phase.json")
        self.client = client_of(kind, config)
        self.chance = random.Random(f"{config['seed']} {name}")
        self.chooser = Chooser(f"{config['seed']} {name} wishes", self.client.databases)
        self.count, self.busy, self.is_armed = 0, 0, False
        self.idle_in: int | None = None

    def next_attempt(self) -> Attempt | None:
        is_core = self.kind.startswith("core")
        stores = [store for store in self.phase.stores if self.kind not in LEFT_OUT.get(store, ())]
        wish = self.chooser.wish(stores, only_one=is_core) if stores else None
        if wish is None:
            time.sleep(0.01)
            return None
        self.count += 1
        self.busy += 1
        section = f"{self.name}-{self.count}"
        attempt = Attempt(section, wish, self.recorder, self.chance, self.config["stop_rate"])
        attempt.goes_on_when_cancelled = self.kind in {"django-async", "django-uvicorn"}
        items = [item.key for item in wish.items]
        options = {key: value for key, value in wish.options.items() if key != "ttl"}
        self.recorder.write(
            "begin", section, kind=self.kind, items=items, act=wish.act.__name__, options=options, manner=wish.manner
        )
        return attempt

    def ended(self, attempt: Attempt, error: BaseException | None) -> None:
        outcome = attempt.outcome(error)
        what = type(error).__name__ if error else ""
        self.busy -= 1
        strange = traceback.format_exception(error) if error and not is_expected(error) else []
        detail = f"{error}"[:200] if error else ""
        self.recorder.write(
            "end", attempt.section, outcome=outcome, error=what, detail=detail, sure=attempt.sure, tries=attempt.tries,
            is_granted=attempt.is_granted, shared=attempt.wish.is_shared, strange="".join(strange)[-4000:],
        )  # fmt: skip

    def is_over(self) -> bool:
        """Return whether the phase is the end; in a quiet one, record once that nothing is under way."""
        name = self.phase.look()
        if name == "quiet" and self.idle_in != self.phase.cycle and not self.busy:
            self.idle_in = self.phase.cycle
            gc.collect()  # free objects to which tracebacks refer, such as sessions, now and not by chance
            files = len(list(Path("/proc/self/fd").iterdir()))
            self.recorder.write("idle", cycle=self.phase.cycle, threads=threading.active_count(), files=files)
        return name == "end"


class BlockingWorker(Worker):
    """Runs one section after the other."""

    def work(self) -> None:
        signal.signal(signal.SIGALRM, self._raise)
        while not self.is_over():
            if self.phase.name == "quiet":
                time.sleep(0.02)
            elif (attempt := self.next_attempt()) is not None:
                self._try(attempt)
        self.client.close()

    def _try(self, attempt: Attempt) -> None:
        error: BaseException | None = None
        try:
            with self._interrupted():
                if self.chance.random() < FORK_RATE:
                    attempt.after_grant = self._fork
                self.client.play(attempt)
        except BaseException as raised:
            error = raised
        self._disarm()
        self.ended(attempt, error)
        if error is not None and not isinstance(error, DLockError):
            self.client.clean_up()

    @contextmanager
    def _interrupted(self) -> Iterator[None]:
        if self.chance.random() < INTERRUPT_RATE:
            self.is_armed = True
            signal.setitimer(signal.ITIMER_REAL, self.chance.uniform(1e-4, INTERRUPT_WITHIN_S))
        yield
        self._disarm()

    def _disarm(self) -> None:
        self.is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.recorder.is_writing:
            signal.setitimer(signal.ITIMER_REAL, 0.001)
        elif self.is_armed:
            self.is_armed = False
            self.recorder.write("interrupt")
            raise TimeLimit

    def _fork(self, attempt: Attempt) -> None:
        """Try to release our leases in a forked child."""
        self._disarm()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(FORK_WITHIN_S)
            os._exit(_release_in_child(attempt))
        _, status = os.waitpid(child, 0)
        self.recorder.write("fork", attempt.section, status=status)


class TaskWorker(Worker):
    """Runs sections in a few tasks of one event loop."""

    def work(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, self._dump_tasks)
        await asyncio.gather(*[self._one() for _ in range(TASKS)])
        await self.client.aclose()

    async def _one(self) -> None:
        while not self.is_over():
            if self.phase.name == "quiet":
                await asyncio.sleep(0.02)
            elif (attempt := self.next_attempt()) is not None:
                await self._try(attempt)

    async def _try(self, attempt: Attempt) -> None:
        error: BaseException | None = None
        task = asyncio.ensure_future(self.client.aplay(attempt))
        if self.chance.random() < CANCEL_RATE:
            asyncio.get_running_loop().call_later(self.chance.uniform(1e-4, CANCEL_WITHIN_S), self._cancel, task)
        try:
            await task
        except BaseException as raised:
            error = raised
        self.ended(attempt, error)
        if error is not None and not isinstance(error, DLockError):
            await self.client.aclean_up()

    def _dump_tasks(self) -> None:
        """Write to a file where each task waits: thread stacks only show that the event loop waits."""
        path = Path(self.config["directory"], f"{self.name}.tasks")
        path.write_text("\n".join(f"{task.get_name()}: {_awaits(task.get_coro())}" for task in asyncio.all_tasks()))

    def _cancel(self, task: asyncio.Future[Any]) -> None:
        if task.cancel():
            self.recorder.write("cancel")


LEFT_OUT: Final = {
    "advisory": ("core", "core-async", "django-async", "django-uvicorn"),
    "version": ("core", "core-async"),
}
"""The kinds of workers that cannot use a store, by store."""


def client_of(kind: str, config: dict[str, Any]) -> Any:
    """Prepare and return the client of a kind of worker."""
    if kind.startswith("django"):
        from tests.random_faults import django_clients

        django_clients.prepare(config)
        if kind == "django-uvicorn":
            from tests.random_faults.django_served import ServedDjangoClient  # only after Django is configured

            return ServedDjangoClient()
        return django_clients.AsyncDjangoClient() if kind == "django-async" else django_clients.DjangoClient()
    if kind.startswith("sqla"):
        from tests.random_faults import sqla_clients

        return (sqla_clients.AsyncpgClient if kind == "sqla-asyncpg" else sqla_clients.SqlaClient)(config)
    from tests.random_faults import core_clients

    return (core_clients.AsyncCoreClient if kind == "core-async" else core_clients.CoreClient)(config)


def _awaits(coroutine: Any) -> str:
    """Return the places at which a coroutine waits, from the outermost frame to the innermost."""
    frames: list[str] = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        frames.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else repr(coroutine))
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return " > ".join(frames)


def is_expected(error: BaseException) -> bool:
    """Return whether the faults explain an error; any other is worth a look."""
    if type(error).__name__ in NOT_OF_DRIVERS:
        return OUT_OF_STEP in str(error)
    if isinstance(error.__context__, TimeLimit) and _was_raised_by(threading, error):
        return True  # when a signal handler raises inside Thread.start(), Python raises a KeyError
    if isinstance(error, DLockError | TimeLimit | Refused | OSError | asyncio.CancelledError):
        return True
    return any(base.__module__.startswith(DRIVERS) for base in type(error).__mro__)


def _was_raised_by(module: ModuleType, error: BaseException) -> bool:
    """Return whether the innermost frame of an error is in this module."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename == module.__file__


def _release_in_child(attempt: Attempt) -> int:
    try:
        for lease in attempt.leases.values():
            lease.release()
    except NotHeld:
        return 0
    except BaseException:
        return 2
    return 1


def main(path: str, kind: str, name: str) -> None:
    config = json.loads(Path(path).read_text())
    config["name"] = os.environ["PGAPPNAME"] = name
    faulthandler.enable()
    dump = Path(config["directory"], f"{name}.stacks").open("w")  # noqa: SIM115 - kept open for the signal
    faulthandler.register(signal.SIGUSR1, dump)
    logging.disable()
    warnings.simplefilter("ignore")
    make = TaskWorker if kind in TASK_KINDS else BlockingWorker
    worker = make(config, kind, name)
    sabotage.commit(config)
    worker.recorder.write("start", kind=kind)
    worker.work()
    worker.recorder.write("finished")
