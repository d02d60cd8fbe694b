"""Search the models in docs/model: every interleaving of a few processes, with all rules and with each one removed."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import give_up

MODELS: Final = Path(__file__).parent.parent / "docs" / "model"
MEMORY_MB: Final = 2000
DEPTH: Final = 100_000

HOLDS: Final = [
    "fence XT=2 XL=1",
    "fence XT=2 ST=1",
    "fence XL=2 ST=1",
    "fence XT=1 SL=2",
    "fence XL=1 SL=2",
    "fence XT=1 XL=1 ST=2",
    "fence XT=1 XL=1 ST=1 SL=1",
    "row XT=2 XL=1",
    "row XT=1 XL=2",
    "row XL=2 DELETES",
    "lease CALLERS=2 SILENCES=3",
    "lease CALLERS=2 SILENCES=2 DEATHS=1",
    "lease CALLERS=2 SILENCES=2 RENEWED=3",
    "lease CALLERS=2 SILENCES=2 SHARED",
    "lease CALLERS=2 SILENCES=2 FORGETS",
    "lease CALLERS=3 SILENCES=1",
    "lease CALLERS=3 DEATHS=1",
    "lease CALLERS=3 SHARED",
    "listener",
]
"""Models and their options, each as large as a search can finish. Of the fence, every pair of sections; smaller runs
are searched with them, because a process may stop before its first step."""
VIOLATED: Final = [
    "fence XT=1 ST=1 WITHOUT_MARK",
    "fence XL=1 ST=1 WITHOUT_MARK",
    "fence XT=1 ST=2 WITHOUT_SAME",
    "fence XL=1 ST=2 WITHOUT_SAME",
    "fence XT=1 SL=1 WITHOUT_S_TOKEN",
    "fence XL=1 SL=1 WITHOUT_S_TOKEN",
    "fence XL=1 ST=1 WITHOUT_S_TOKEN",
    "fence XL=2 WITHOUT_HOLDER",
    "fence XL=2 WITHOUT_ROW_LOCK",
    "fence XL=2 WITHOUT_RAISE",
    "row XT=2 WITHOUT_FIRST_TOKEN",
    "row XT=1 XL=1 WITHOUT_FIRST_TOKEN",
    "row XL=2 WITHOUT_LOOK_AGAIN",
    "row XL=2 WITHOUT_BOTH",
    "row XL=2 DELETES WITHOUT_ROW_ALONE",
    "lease SILENCES=1 WITHOUT_SAME_HOLDER",
    "lease SILENCES=1 WITHOUT_FRESH_HOLDER",
    "lease WITHOUT_QUEUE",
    "lease CALLERS=3 WITHOUT_POSITION",
    "lease WITHOUT_LOOK_AGAIN",
    "lease WITHOUT_HAND_OVER",
    "lease WITHOUT_CLAIM_TIME",
    "lease WITHOUT_CLAIM_HOLDER",
    "lease WITHOUT_RELEASE_HOLDER",
    "lease WITHOUT_ABANDON",
    "lease SILENCES=1 WITHOUT_NEVER_AGAIN",
    "lease SILENCES=1 RENEWED=3 WITHOUT_NEVER_SHORTEN",
    "lease WITHOUT_BEFORE_SENT",
    "lease WITHOUT_RELEASING",
    "lease WITHOUT_COUNTER",
    "lease FORGETS WITHOUT_SERVER_TIME",
    "listener WITHOUT_ASKS",
    "listener WITHOUT_FOUND",
    "listener WITHOUT_UNCLAIMED",
    "listener WITHOUT_NOTICES",
]


OPTIMIZED: Final = ("cc", "-O1")
"""For searches that take longer than a compiler."""
AT_ONCE: Final = ("tcc",) if shutil.which("tcc") else ("cc", "-O0")
"""For the others: tcc compiles in a twentieth of the time of cc."""


def search(directory: Path, run: str, compiler: Sequence[str] = AT_ONCE) -> str:
    """Search every state of a model with these options, and return the report of the search."""
    for tool, package in (("spin", "spin"), (compiler[0], "gcc")):
        if shutil.which(tool) is None:
            give_up(f"{tool} is missing: apt-get install {package}")
    model, *options = run.split()
    (directory / "model.pml").write_text((MODELS / f"{model}.pml").read_text())
    defines = [f"-D{option}" if "=" in option else f"-D{option}=1" for option in options]
    for command in (
        ["spin", *defines, "-a", "model.pml"],
        [*compiler, "-w", "-DSAFETY", "-DNOFAIR", f"-DMEMLIM={MEMORY_MB}", "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=directory, check=True, capture_output=True)
    found = subprocess.run(["./pan", f"-m{DEPTH}"], cwd=directory, check=True, capture_output=True, text=True).stdout
    assert "max search depth too small" not in found
    assert "Search not completed" not in found or "errors: 0" not in found
    return found


@pytest.mark.timeout(600)  # The longest of these searches takes two minutes on a slow machine under load.
@pytest.mark.parametrize("run", HOLDS)
def test_what_is_promised_holds_however_the_processes_interleave(tmp_path, run):
    assert "errors: 0" in search(tmp_path, run, OPTIMIZED)


@pytest.mark.parametrize("run", VIOLATED)
def test_each_rule_is_needed(tmp_path, run):
    assert "assertion violated" in search(tmp_path, run)


@pytest.mark.parametrize("run", ["fence ST=2", "fence XT=1 ST=2", "fence XL=1 ST=2", "lease SHARED"])
def test_shared_holders_are_inside_together(tmp_path, run):
    assert "assertion violated" in search(tmp_path, f"{run} TOGETHER")
