"""A process that has imported what tests need, except the project itself, and is forked for every run of tests.

It reads one order per line from its standard input, and answers each with one line. A new interpreter that imports
Django and SQLAlchemy would take longer than the tests of most mutants.
"""

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

OUR_OWN: Final = ("dlock_core", "django_dlock", "sqla_dlock", "tests", "example_project")
NOT_BEFOREHAND: Final = (
    "django.contrib",
    "rest_framework",
    "grpc",
    "gevent",
    "eventlet",
    "antigravity",
    "this",
    "__main__",
    *OUR_OWN,
)


def main() -> None:
    for name in json.loads(sys.stdin.readline()):
        if not name.startswith(NOT_BEFOREHAND):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


def answer(order: dict[str, Any]) -> dict[str, Any]:
    """Run pytest in a child process; `status` is None if it took too long."""
    home = Path(order["home"])
    home.mkdir(mode=0o755)
    (home / "chosen.json").write_text(json.dumps(order["chosen"]))
    child = os.fork()
    if child == 0:
        _run(home, order["arguments"])
    watch = os.pidfd_open(child)
    ended, _, _ = select.select([watch], [], [], order["within"])
    os.close(watch)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    said = home / "said.txt"
    output = (home / "output.txt").read_text(errors="replace")[-3000:] if (home / "output.txt").exists() else ""
    report = {
        "status": os.waitstatus_to_exitcode(status) if ended else None,
        "failed": said.read_text() if said.exists() else "",
        "output": output,
    }
    shutil.rmtree(home, ignore_errors=True)
    return report


def _run(home: Path, arguments: Sequence[str]) -> None:
    os.setsid()
    os.environ["TMPDIR"] = str(home)
    os.environ["DLOCK_MUTANTS_HOME"] = str(home)
    with (home / "output.txt").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    status = 70
    try:
        import pytest

        status = int(pytest.main(list(arguments)))
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
