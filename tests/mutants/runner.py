"""Puts the mutants into a copy of the project, one after the other, and runs the tests of their part on each."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.mutants import lua, python
from tests.mutants.mutant import Mutant
from tests.mutants.parts import Part

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / ".mutants"
NOT_COPIED: Final = shutil.ignore_patterns(".git", ".venv", ".mutants", ".nox", ".*_cache", "__pycache__", "*.egg-info")
LANGUAGES: Final = {".py": python.mutants, ".lua": lua.mutants}
PATIENCE: Final = 4
"""A stage may take so many times as long as it takes without a mutant, and `LEAST_S` more."""
LEAST_S: Final = 20.0


def mutants_of(part: Part) -> list[Mutant]:
    paths = sorted({path for pattern in part.files for path in ROOT.glob(pattern)})
    return [each for path in paths for each in LANGUAGES[path.suffix](str(path.relative_to(ROOT)), path.read_text())]


def sample(mutants: Sequence[Mutant], size: int, seed: int) -> list[Mutant]:
    """Choose some at random; the same for the same seed. All of them when the size is 0."""
    return list(mutants) if not 0 < size < len(mutants) else random.Random(seed).sample(list(mutants), size)


@dataclass
class Results:
    """What has become of each mutant, in a file that is added to: a run that was broken off goes on where it stopped."""

    path: Path

    def read(self) -> dict[str, str]:
        if not self.path.exists():
            return {}
        told = [json.loads(line) for line in self.path.read_text().splitlines()]
        return {each["key"]: each["outcome"] for each in told}

    def add(self, mutant: Mutant, outcome: str) -> None:
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"key": mutant.key, "outcome": outcome, "mutant": str(mutant)}) + "\n")


class Sandbox:
    """A copy of the project, in which tests are run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = 0

    def read(self, file: str) -> str:
        return (self._folder / file).read_text()

    def write(self, file: str, text: str) -> None:
        path = self._folder / file
        path.write_text(text)
        # Python takes a compiled file for the same by its size and its second: no two texts have the same second.
        self._written += 1
        os.utime(path, (1e9 + self._written, 1e9 + self._written))

    def passes(self, stage: str, within: float | None = None) -> bool | None:
        """Run the tests until one fails; None when they took too long."""
        command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:randomly", *shlex.split(stage)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DLOCK_TEST_")}
        environment |= {"PYTHONPATH": str(self._folder), "PYTHONPYCACHEPREFIX": str(self._folder / ".pycache")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with (self._folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = process.wait(within)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status in {4, 5}:
            raise RuntimeError(f"there are no such tests: {stage}\n{self.output()}")
        return status == 0

    def output(self) -> str:
        return (self._folder / "output.txt").read_text()[-2000:]


@contextmanager
def sandbox() -> Iterator[Sandbox]:
    with TemporaryDirectory(prefix="mutants-") as home:
        Path(home).chmod(0o755)  # the accounts of servers go through it
        folder = Path(home) / "dlock"
        shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
        yield Sandbox(folder)


def run(part: Part, mutants: Sequence[Mutant], results: Results) -> Iterator[tuple[Mutant, str]]:
    """Yield what becomes of each mutant that has no result yet: "killed", "timeout" or "survived"."""
    known = results.read()
    todo = [each for each in mutants if each.key not in known]
    if not todo:
        return
    with sandbox() as place:
        limits = {stage: PATIENCE * _seconds(place, stage) + LEAST_S for stage in part.stages}
        for mutant in todo:
            original = place.read(mutant.file)
            place.write(mutant.file, mutant.source)
            outcome = _outcome(place, limits)
            place.write(mutant.file, original)
            results.add(mutant, outcome)
            yield mutant, outcome


def _seconds(place: Sandbox, stage: str) -> float:
    """How long the tests take on the code as it is, which they have to pass."""
    started = time.monotonic()
    if not place.passes(stage):
        raise RuntimeError(f"without any mutant this fails: pytest {stage}\n{place.output()}")
    return time.monotonic() - started


def _outcome(place: Sandbox, limits: dict[str, float]) -> str:
    for stage, limit in limits.items():
        passed = place.passes(stage, limit)
        if passed is None:
            return "timeout"
        if not passed:
            return "killed"
    return "survived"
