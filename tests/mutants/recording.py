"""Records once for each part which tests run which lines, so that a mutant meets only the tests that can notice it.

The part's files are rewritten with a note before each statement. Whether a test runs the statement, or a thread or task
that it has started, it is recorded for the test that runs at that time. A Lua script writes notes to the server's log.
"""

import ast
import builtins
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.mutants import lua

NOTES: Final = "__dlock_lines__"
FOLDER: Final = "DLOCK_MUTANTS_RECORD"
SERVER: Final = re.compile(r"redis|postgresql|psycopg|asyncpg|mariadb|mysql|asyncmy")
DATABASE: Final = re.compile(r"postgresql|mariadb|mysql|psycopg|asyncpg|pymysql|asyncmy")
LOGGED: Final = re.compile(r"runs (\S+\.lua:\d+)")
SETUP_S: Final = 0.3
"""The most that a test is charged for its fixtures: the first test that needs a server starts it for all."""


def noting(path: str, text: str) -> str:
    """Return the file's text with the notes in it."""
    return _python(path, text) if path.endswith(".py") else _lua(path, text)


def _python(path: str, text: str) -> str:
    tree = ast.parse(text)
    for node in list(ast.walk(tree)):
        for name in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, name, None), list):
                first = 1 if isinstance(node, ast.Module) or ast.get_docstring(_documented(node), clean=False) else 0
                for at in range(len(body) - 1, -1 + (first if name == "body" else 0), -1):
                    if not _is_future(body[at]):
                        body.insert(at, _note(f"{path}:{body[at].lineno}"))
    start = next((at for at, each in enumerate(tree.body) if not _is_future(each) and not _is_text(each)), 0)
    # A process that a test starts has no recorder.
    tree.body.insert(start, ast.parse(f"{NOTES} = getattr(__import__('builtins'), '{NOTES}', id)").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def _documented(node: ast.AST) -> Any:
    return (
        node
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        else ast.Module([], [])
    )


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _note(what: str) -> ast.stmt:
    return ast.parse(f"{NOTES}({what!r})").body[0]


def _lua(path: str, text: str) -> str:
    def note(line: int) -> str:
        return f"redis.log(redis.LOG_WARNING, 'runs {path}:{line}')\n"

    lines = text.splitlines(keepends=True)
    noted = [line + note(at) if lua.OPENS.search(line) else line for at, line in enumerate(lines, 1)]
    return note(0) + "".join(noted)


@dataclass
class Test:
    name: str
    seconds: float
    lines: set[str] = field(default_factory=set)

    @property
    def function(self) -> str:
        """Return which promise it tests, on which database."""
        name, _, parameters = self.name.partition("[")
        return f"{name}{DATABASE.findall(parameters)}"

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def needs_server(self) -> bool:
        return bool(SERVER.search(self.name))


def read(files: Iterable[Path]) -> list[Test]:
    told = [json.loads(line) for file in sorted(files) for line in file.read_text().splitlines()]
    return [Test(name, seconds, set(lines)) for name, seconds, lines in told]


def write(file: Path, tests: Iterable[Test]) -> None:
    """Add tests to a file."""
    with file.open("a") as open_file:
        for test in tests:
            open_file.write(json.dumps([test.name, round(test.seconds, 3), sorted(test.lines)]) + "\n")


RUN: Final[set[str]] = set()
"""The lines that have been run since the test began."""
if FOLDER in os.environ:
    setattr(builtins, NOTES, RUN.add)  # before the part's files are imported, which Django may do long before any test


class Recorder:
    """A pytest plugin."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.passed = True
        self._read_to: dict[Path, int] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._logged()
        RUN.clear()
        self.seconds, self.passed = 0.0, True
        yield
        lines = RUN | self._logged()
        if self.passed and lines:
            write(Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl", [Test(item.nodeid, self.seconds, lines)])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration if report.when == "call" else min(report.duration, SETUP_S)
        self.passed = self.passed and report.passed

    def _logged(self) -> set[str]:
        """Return what scripts have noted since the last call."""
        found: set[str] = set()
        for path in Path(
            os.environ.get("DLOCK_TEST_DIRECTORY" + os.environ.get("PYTEST_XDIST_WORKER", ""), "/none")
        ).glob("**/*.log"):
            begin = self._read_to.get(path, 0)
            if path.stat().st_size < begin:
                begin = 0
            with path.open(errors="replace") as file:
                file.seek(begin)
                found |= set(LOGGED.findall(file.read()))
                self._read_to[path] = file.tell()
        return found


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder())
