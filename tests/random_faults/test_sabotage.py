"""The checker finds what was broken on purpose in a run with real workers, servers and faults."""

import os
import subprocess
import sys

import pytest

from tests.conftest import give_up
from tests.random_faults.nursery import ROOT
from tests.random_faults.sabotage import SABOTAGES

FAULTS = {
    "no-fence": ("flush", "late COMMIT", "stop worker"),
    "early-release": ("stop worker",),
    "grants-twice": ("stop worker",),
    "dice-for-tokens": ("stop worker",),
    "retried-though-unknown": ("lose COMMIT",),
    "no-mark": ("stop worker",),
    "versions-from-1": ("stop worker",),
    "newest-version-expected": ("stop worker",),
    "fence-rows-removed": ("stop worker",),
}
"""Faults under which each shows soon."""
BY_VERSION = ("versions-from-1", "newest-version-expected")
FOUND = {
    "dice-for-tokens": "token does not grow",
    "retried-though-unknown": "done twice",
    "fence-rows-removed": "committed out of token order",
}
WRONG_DATA = ("lost update", "order with two ends", "done twice", "committed though refused", "out of token order")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "DLOCK_TEST_SABOTAGE" not in os.environ, reason="nine runs with faults, ten minutes: make sabotage"
    ),
]


def run(sabotage: str) -> list[str]:
    """The violations of the first storms of a run, until one is found."""
    store = "version" if sabotage in BY_VERSION else "redis"
    options = ["--minutes", "4", "--seed", "3", "--stores", store, "--until-found", "--stop-rate", "0.08"]
    command = [sys.executable, "-m", "tests.random_faults", *options, "--sabotage", sabotage]
    done = subprocess.run(
        [*command, "--faults", *FAULTS[sabotage]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode == 2:
        give_up(done.stdout)
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("VIOLATION")]


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_what_is_broken_on_purpose_is_found(sabotage: str) -> None:
    violations = run(sabotage)
    wanted = FOUND.get(sabotage, "lost update")
    assert any(wanted in line for line in violations), violations
    if sabotage == "dice-for-tokens":
        assert not [line for line in violations if any(rule in line for rule in WRONG_DATA)], (
            "the fence bears any store"
        )
