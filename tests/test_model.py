"""The fence's model, docs/model/fence.pml: every interleaving of its sections, with a lock service that excludes nobody."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import give_up

MODEL: Final = Path(__file__).parent.parent / "docs" / "model" / "fence.pml"
MEMORY_MB: Final = 2000
DEPTH: Final = 100_000

SERIAL: Final = [
    "XT=2 XL=1",
    "XT=2 ST=1",
    "XL=2 ST=1",
    "XT=1 SL=2",
    "XL=1 SL=2",
    "XT=1 XL=1 ST=2",
    "XT=1 XL=1 ST=1 SL=1",
]
"""Every pair of sections, and as many at once as a search can finish. Fewer of the same are searched with them, because a process may
stand still before its first step."""
VIOLATED: Final = [
    "XT=1 ST=1 WITHOUT_MARK",
    "XL=1 ST=1 WITHOUT_MARK",
    "XT=1 ST=2 WITHOUT_SAME",
    "XL=1 ST=2 WITHOUT_SAME",
    "XT=1 SL=1 WITHOUT_S_TOKEN",
    "XL=1 SL=1 WITHOUT_S_TOKEN",
    "XL=1 ST=1 WITHOUT_S_TOKEN",
    "XL=2 WITHOUT_HOLDER",
    "XL=2 WITHOUT_ROW_LOCK",
    "XL=2 WITHOUT_RAISE",
]


def search(directory: Path, options: str) -> str:
    """Search every state of the model with these options, and give the report of the search."""
    for tool, package in (("spin", "spin"), ("cc", "gcc")):
        if shutil.which(tool) is None:
            give_up(f"{tool} is missing: apt-get install {package}")
    (directory / MODEL.name).write_text(MODEL.read_text())
    defines = [f"-D{option}" if "=" in option else f"-D{option}=1" for option in options.split()]
    for command in (
        ["spin", *defines, "-a", MODEL.name],
        ["cc", "-O0", "-w", "-DSAFETY", f"-DMEMLIM={MEMORY_MB}", "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=directory, check=True, capture_output=True)
    found = subprocess.run(["./pan", f"-m{DEPTH}"], cwd=directory, check=True, capture_output=True, text=True).stdout
    assert "max search depth too small" not in found
    assert "Search not completed" not in found or "errors: 0" not in found
    return found


@pytest.mark.parametrize("sections", SERIAL)
def test_sections_are_serial_whatever_the_lock_service_does(tmp_path, sections):
    assert "errors: 0" in search(tmp_path, sections)


@pytest.mark.parametrize("sections", VIOLATED)
def test_each_rule_is_needed(tmp_path, sections):
    assert "assertion violated" in search(tmp_path, sections)


@pytest.mark.parametrize("sections", ["ST=2", "XT=1 ST=2", "XL=1 ST=2"])
def test_shared_sections_are_inside_together(tmp_path, sections):
    assert "assertion violated (shares<2)" in search(tmp_path, f"{sections} TOGETHER")
