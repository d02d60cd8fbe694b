"""The checker finds each bug that is put in on purpose, in runs with real workers, servers and faults."""

import os
import subprocess
import sys

import pytest

from tests.conftest import give_up
from tests.random_faults.nursery import ROOT
from tests.random_faults.sabotage import SABOTAGES

FAULTS = {
    "no-fence": ("flush", "late COMMIT", "stop worker"),
    "retried-though-unknown": ("lose COMMIT",),
    "never-left": ("lose reply",),
}
"""Faults that reveal the bug quickly, where stopped workers alone do not."""
STORE = {
    "versions-from-1": "version",
    "newest-version-expected": "version",
    "autocommit-passes-by": "turned",  # has rows on SQLite
    "old-snapshot": "table",  # has rows on MariaDB
}
"""The store to use, where it is not Redis with rows on PostgreSQL."""
LOST = "lost update"
FOUND = {
    "dice-for-tokens": "token does not grow",
    "retried-though-unknown": "done twice",
    "fence-rows-removed": "committed out of token order",
    "never-left": "held on after the storm",
    "committed-though-repeated": "done twice",
    "half-repeated": "done twice",
    "stale-columns-saved": "fence that went back",
    "work-outlives-block": "fence that went back",
}
WRONG_DATA = ("lost update", "order with two ends", "done twice", "committed though refused", "out of token order")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "DLOCK_TEST_SABOTAGE" not in os.environ, reason="23 runs with faults, a quarter of an hour: make sabotage"
    ),
]


def run(sabotage: str) -> list[str]:
    """Return the violations of a run that ends with the first violation of the expected rule."""
    store = STORE.get(sabotage, "redis")
    options = ["--minutes", "8", "--seed", "3", "--stores", store, "--stop-rate", "0.08"]
    options += ["--until-found", FOUND.get(sabotage, LOST)]
    command = [sys.executable, "-m", "tests.random_faults", *options, "--sabotage", sabotage]
    done = subprocess.run(
        [*command, "--faults", *FAULTS.get(sabotage, ("stop worker",))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 2:
        give_up(done.stdout)
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("VIOLATION")]


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_what_is_broken_on_purpose_is_found(sabotage: str) -> None:
    violations = run(sabotage)
    assert any(FOUND.get(sabotage, LOST) in line for line in violations), violations
    if sabotage == "dice-for-tokens":
        assert not [line for line in violations if any(rule in line for rule in WRONG_DATA)], (
            "the fence bears any store"
        )
