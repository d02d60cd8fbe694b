"""The runner's view of the workers: it starts, kills and replaces them, and resumes those that are stopped."""

import json
import os
import random
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from tests.random_faults import nursery
from tests.random_faults.history import Recorder, now

CREW: Final = (
    "django", "django", "django-async", "django-uvicorn", "sqla", "sqla", "sqla-asyncpg", "core", "core-async",
)  # fmt: skip
TASK_KINDS: Final = ("django-async", "django-uvicorn", "sqla-asyncpg", "core-async")
MAX_DEATHS: Final = 20
LOOK_EVERY_S: Final = 0.05
STOPS_S: Final = (0.3, 4.0)
"""The shortest and longest time for which a worker stays stopped; the longest exceeds twice the usual ttl."""


@dataclass(eq=False)
class Member:
    """One place in the crew, and its present process."""

    kind: str
    place: int
    generation: int = 0
    process: BaseProcess | None = None
    resume_at: float | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.place}.{self.generation}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        assert self.process.pid is not None
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    @property
    def stands_still(self) -> bool:
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False


class Crew:
    """All workers of a run."""

    def __init__(self, config: dict[str, Any], recorder: Recorder, kinds: tuple[str, ...] = CREW) -> None:
        self._directory = Path(config["directory"])
        self._config = self._directory / "config.json"
        self._config.write_text(json.dumps(config))
        self._chance = random.Random(f"{config['seed']} crew")
        self._recorder = recorder
        self._lock = threading.Lock()
        self.members = [Member(kind, place) for place, kind in enumerate(kinds)]
        self.is_storm = False
        self.deaths = 0
        """How many workers have died by themselves."""

    def start(self) -> None:
        for member in self.members:
            self._begin(member)

    def say(self, cycle: int, name: str, stores: list[str]) -> None:
        """Announce the phase to all workers."""
        path = self._directory / "phase.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"cycle": cycle, "name": name, "stores": stores}))
        new.replace(path)

    def stop(self, place: int) -> None:
        """Send SIGSTOP; the worker is resumed after a while."""
        member = self.members[place % len(self.members)]
        with suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGSTOP)

    def kill(self, place: int) -> None:
        """Kill a worker with SIGKILL, and replace it."""
        member = self.members[place % len(self.members)]
        with self._lock:
            assert member.process is not None
            member.process.kill()
            self._recorder.write("kill", worker=member.name, killed=member.pid)
            self._replace(member)

    def look_after(self) -> None:
        """Resume the workers whose stop is over, and replace dead ones; call this every LOOK_EVERY_S."""
        for member in self.members:
            with self._lock:
                if not member.is_alive:
                    code = member.process and member.process.exitcode
                    self._recorder.write("died", worker=member.name, code=code)
                    self.deaths += 1
                    if self.deaths > MAX_DEATHS:
                        said = (self._directory / f"{member.name}.log").read_text()
                        raise RuntimeError(f"workers die again and again: {said}")
                    self._replace(member)
                elif member.stands_still:
                    self._resume(member)

    def _resume(self, member: Member) -> None:
        if member.resume_at is None:
            member.resume_at = now() + (self._chance.uniform(*STOPS_S) if self.is_storm else 0)
            self._recorder.write("stop", worker=member.name, stopped=member.pid)
        if now() >= member.resume_at or not self.is_storm:
            member.resume_at = None
            self._recorder.write("resume", worker=member.name, resumed=member.pid)
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGCONT)

    def _replace(self, member: Member) -> None:
        assert member.process is not None
        member.process.join()
        member.generation += 1
        member.resume_at = None
        self._begin(member)

    def dump_stacks(self, member: Member) -> str:
        """Return what each thread and each task of a worker is doing."""
        os.kill(member.pid, signal.SIGUSR1)
        tasks = self._directory / f"{member.name}.tasks"
        if member.kind in TASK_KINDS:
            os.kill(member.pid, signal.SIGUSR2)
        threading.Event().wait(1.0)
        stacks = (self._directory / f"{member.name}.stacks").read_text()
        return f"{stacks}\n{tasks.read_text()}" if tasks.exists() else stacks

    def end(self, within: float) -> list[str]:
        """Wait for the workers to end, kill those that have not, and return their names and stacks."""
        late = []
        for member in self.members:
            assert member.process is not None
            member.process.join(within)
            if member.process.is_alive():
                late.append(f"{member.name}\n{self.dump_stacks(member)}")
                member.process.kill()
                member.process.join()
        return late

    def kill_all(self) -> None:
        for member in self.members:
            if member.process is not None:
                member.process.kill()
                member.process.join()

    def _begin(self, member: Member) -> None:
        log = self._directory / f"{member.name}.log"
        member.process = nursery.start("tests.random_faults.worker", log, str(self._config), member.kind, member.name)
