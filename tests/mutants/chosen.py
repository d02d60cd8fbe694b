"""A pytest plugin that runs the tests chosen for a mutant, in their order, and reports which one has failed.

The data directory of a database server is copied from one that was initialized before, which is quicker.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests import servers

LEAST_S: Final = 30.0
"""Seconds that a test has, in addition to `PATIENCE` times what it took without a mutant."""
PATIENCE: Final = 5.0
HOME: Final = Path(os.environ["DLOCK_MUTANTS_HOME"])
CHOSEN: Final[dict[str, float]] = json.loads((HOME / "chosen.json").read_text())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(CHOSEN)}
    items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])
    for item in items:
        item.add_marker(pytest.mark.timeout(LEAST_S + PATIENCE * CHOSEN[item.nodeid]), append=False)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        why = str(report.longrepr).strip().splitlines()[-1:] or [""]
        (HOME / "said.txt").write_text(f"{report.nodeid}\n{why[0][:200]}")


def _create(self: servers.Server) -> None:
    filled = HOME.parent / f"filled-{self.directory.name}"
    if self.prepare and filled.exists():
        subprocess.run(["cp", "-a", filled, self.directory], check=True)
        return
    create(self)
    if self.prepare:
        subprocess.run(["cp", "-a", self.directory, f"{filled}-{os.getpid()}"], check=True)
        Path(f"{filled}-{os.getpid()}").rename(filled)


create = servers.Server._create
servers.Server._create = _create  # type: ignore[method-assign]
