"""Puts the mutants into a copy of the project, one after the other, and runs on each the tests that can notice it.

Which tests these are is recorded first. They run in a fork of a process that has imported everything else: first those
that have killed most mutants of the file, then one of each function on each database before a second of any, and the
quickest first.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.mutants import lua, python, recording
from tests.mutants.mutant import Mutant
from tests.mutants.parts import EXPLAINED, Part
from tests.mutants.recording import Test

ROOT: Final = Path(__file__).parents[2]
RESULTS: Final = ROOT / ".mutants"
NOT_COPIED: Final = shutil.ignore_patterns(".git", ".venv", ".mutants", ".nox", ".*_cache", "__pycache__", "*.egg-info")
LANGUAGES: Final = {".py": python.mutants, ".lua": lua.mutants}
FIRST: Final = 12
"""This many tests are tried before the rest is even collected."""
BUDGET_S: Final = 45.0
"""A mutant survives if it survives one test of each function, and tests of this many seconds in all."""
PYTEST: Final = ("-qx", "-p", "no:randomly", "--assert=plain", "--tb=line")


def mutants_of(part: Part) -> list[Mutant]:
    return [each for path in files_of(part) for each in LANGUAGES[path.suffix](_name(path), path.read_text())]


def files_of(part: Part) -> list[Path]:
    return _found(part.files)


def _found(patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def sample(mutants: Sequence[Mutant], size: int, seed: int) -> list[Mutant]:
    """Choose mutants at random, the same for the same seed; all of them if the size is 0."""
    return list(mutants) if not 0 < size < len(mutants) else random.Random(seed).sample(list(mutants), size)


@dataclass
class Results:
    """The outcome for each mutant, in a file that grows: a run that was aborted continues where it stopped."""

    path: Path

    def read(self) -> dict[str, str]:
        if not self.path.exists():
            return {}
        told = [json.loads(line) for line in self.path.read_text().splitlines()]
        return {each["key"]: each["outcome"] for each in told}

    def add(self, mutant: Mutant, outcome: str, by: str = "") -> None:
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"key": mutant.key, "outcome": outcome, "mutant": str(mutant), "by": by}) + "\n")


@dataclass
class Sandbox:
    """A copy of the project in which tests run."""

    folder: Path
    _written: int = 0
    _zygote: subprocess.Popen[str] | None = None

    def write(self, file: str, text: str) -> None:
        path = self.folder / file
        path.write_text(text)
        # Python checks a compiled file by its source's size and time in seconds: no two texts may have the same time.
        self._written += 1
        os.utime(path, (1e9 + self._written, 1e9 + self._written))

    def environment(self) -> dict[str, str]:
        ours = [name for name in os.environ if name.startswith("DLOCK_TEST_") and name != "DLOCK_TEST_MYSQLD"]
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        kept.pop("PYTHONDONTWRITEBYTECODE", None)
        return kept | {"PYTHONPATH": str(self.folder), "PYTHONPYCACHEPREFIX": str(self.folder / ".pycache")}

    def record(self, files: Sequence[Path], tests: Sequence[Path]) -> list[Test]:
        """Run these tests on files with notes in them, and return which test runs which lines."""
        for path in files:
            self.write(_name(path), recording.noting(_name(path), path.read_text()))
        told = self.folder / "told"
        told.mkdir()
        command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.recording", "-q", "-p", "no:randomly"]
        command += ["-n", "2", "--dist", "loadfile", *map(_name, tests)]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment() | {recording.FOLDER: str(told)},
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        sys.stdout.write(f"{done.stdout[-3000:]}\n")
        if done.returncode not in {0, 1}:
            raise RuntimeError(f"the tests of this part cannot be recorded:\n{done.stdout}{done.stderr}")
        for path in files:
            self.write(_name(path), path.read_text())
        return recording.read(told.glob("*.jsonl"))

    def run(self, tests: Sequence[Test]) -> dict[str, Any]:
        """Run these tests, in this order, until one fails."""
        files = list(dict.fromkeys(test.file for test in tests))
        self._written += 1
        order = {
            "home": str(self.folder.parent / f"r{self._written}"),
            "arguments": [*PYTEST, "-p", "tests.mutants.chosen", *files],
            "chosen": {test.name: test.seconds for test in tests},
            "within": 30 + 4 * sum(test.seconds for test in tests),
        }
        assert self._zygote
        assert self._zygote.stdin
        assert self._zygote.stdout
        self._zygote.stdin.write(json.dumps(order) + "\n")
        self._zygote.stdin.flush()
        answer: dict[str, Any] = json.loads(self._zygote.stdout.readline())
        return answer

    @contextmanager
    def alive(self, modules: Sequence[str]) -> Iterator[None]:
        with subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.zygote"],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as self._zygote:
            assert self._zygote.stdin
            self._zygote.stdin.write(json.dumps(modules) + "\n")
            yield
            self._zygote.stdin.close()


@contextmanager
def sandbox() -> Iterator[Sandbox]:
    with TemporaryDirectory(prefix="mutants-") as home:
        Path(home).chmod(0o755)  # the servers' accounts need to pass through it
        folder = Path(home) / "dlock"
        shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
        yield Sandbox(folder)


def recorded(part: Part) -> list[Test]:
    """Return which test runs which lines of the part; record it again for what has changed."""
    files = _found(part.files + part.users)
    texts = "".join(path.read_text() for path in files)
    folder = RESULTS / "recorded"
    known = {path: folder / f"{_digest(texts + path.read_text())}.jsonl" for path in tests_of(part)}
    if missing := [path for path, record in known.items() if not record.exists()]:
        with sandbox() as place:
            found = place.record(files, missing)
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            recording.write(known[path], [test for test in found if test.file == _name(path)])
    return recording.read(known.values())


def tests_of(part: Part) -> list[Path]:
    named = [ROOT / name for name in " ".join(part.tests).split()]
    return [path for each in named for path in (sorted(each.rglob("test_*.py")) if each.is_dir() else [each])]


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


@dataclass
class Choice:
    """Chooses the tests to try on a mutant, and their order."""

    tests: list[Test]
    killers: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """For each file, the tests that have killed mutants, and how many."""

    sound: dict[str, bool] = field(default_factory=dict)
    """For each test that has failed on a mutant, whether it passes without one."""

    def of(self, mutant: Mutant) -> list[Test]:
        able = self._able(mutant)
        killers, turn = self.killers[mutant.file], Counter[str]()
        able.sort(key=lambda test: (test.needs_server, test.seconds))
        places: dict[str, tuple[int, ...]] = {}
        for at, test in enumerate(able):
            places[test.name] = (-killers[test.name], turn[test.function], at)
            turn[test.function] += 1
        able.sort(key=lambda test: places[test.name])
        spent, chosen = 0.0, list[Test]()
        for test in able:
            if (spent := spent + test.seconds) > BUDGET_S and places[test.name][1]:
                break
            chosen.append(test)
        return chosen

    def _able(self, mutant: Mutant) -> list[Test]:
        first, last = mutant.lines
        exactly = [test for test in self.tests if f"{mutant.file}:{first}" in test.lines]
        if exactly:
            return exactly
        inside = {f"{mutant.file}:{line}" for line in range(first, last + 1)}
        somewhere = [test for test in self.tests if inside & test.lines]
        # Every test that uses the file may notice a mutant that only the import runs, such as a constant.
        return (
            somewhere
            or [test for test in self.tests if any(line.startswith(f"{mutant.file}:") for line in test.lines)]
            or [*self.tests]
        )


def run(part: Part, mutants: Sequence[Mutant], results: Results, jobs: int = 1) -> Iterator[tuple[Mutant, str, str]]:
    """Yield the outcome for each mutant not killed before: "killed", "timeout" or "survived", and by which test."""
    known = results.read()
    todo = [each for each in mutants if known.get(each.key, "survived") == "survived"]
    for each in [each for each in todo if each.name in EXPLAINED]:
        todo.remove(each)
        results.add(each, "explained")
    if not todo:
        return
    choice = Choice(recorded(part))
    free: SimpleQueue[Sandbox] = SimpleQueue()
    with ExitStack() as stack, ThreadPoolExecutor(jobs) as pool:
        for _ in range(jobs):
            place = stack.enter_context(sandbox())
            stack.enter_context(place.alive(_beforehand()))
            free.put(place)

        def try_one(mutant: Mutant) -> tuple[Mutant, str, str]:
            place = free.get()
            try:
                outcome, by = _outcome(place, mutant, choice)
            finally:
                free.put(place)
            results.add(mutant, outcome, by)
            return mutant, outcome, by

        for done in as_completed([pool.submit(try_one, mutant) for mutant in todo]):
            yield done.result()


def _beforehand() -> list[str]:
    """Return the names of the modules that tests import, from a process that has imported them."""
    code = "import tests.preloaded, sys, json, httpx, hypothesis, pytest_django, xdist; print(json.dumps(list(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    names: list[str] = json.loads(answer.stdout)
    return names


def _outcome(place: Sandbox, mutant: Mutant, choice: Choice) -> tuple[str, str]:
    """Try one mutant. A test kills it when it fails twice, the second time alone, and passes without the mutant."""
    failed_once: set[str] = set()
    while True:
        original = (place.folder / mutant.file).read_text()
        place.write(mutant.file, mutant.source)
        outcome, by = _try(place, [test for test in choice.of(mutant) if test.name not in failed_once])
        name = by.partition("\n")[0]
        failed = next((test for test in choice.tests if test.name == name), None)
        fails_again = failed is not None and place.run([_patient(failed)])["status"] != 0
        place.write(mutant.file, original)
        if failed is None:
            return outcome, by
        if not fails_again:
            sys.stdout.write(f"passes at the second try: {name}\n")
            failed_once.add(name)
            continue
        if name not in choice.sound:
            choice.sound[name] = place.run([_patient(failed)])["status"] == 0
        if choice.sound[name]:
            choice.killers[mutant.file][name] += 1
            return outcome, by
        sys.stdout.write(f"fails without a mutant: {name}\n")
        choice.tests = [test for test in choice.tests if test.name != name]


def _try(place: Sandbox, tests: list[Test]) -> tuple[str, str]:
    for some in (tests[:FIRST], tests[FIRST:]):
        if not some:
            continue
        answer = place.run(some)
        if _is_over_time(answer):
            answer = place.run([_patient(test) for test in some])
        if _is_over_time(answer):
            return "timeout", answer["failed"]
        if answer["status"] not in {0, 5}:
            return "killed", answer["failed"] or answer["output"][-200:]
    return "survived", ""


def _patient(test: Test) -> Test:
    """Return the test with more time: a fault that hangs hangs again, while a loaded machine finishes."""
    return replace(test, seconds=4 * test.seconds + 5)


def _is_over_time(answer: dict[str, Any]) -> bool:
    return answer["status"] is None or "Timeout (>" in answer["failed"]
