"""The public names are a reviewed list: a change to it changes this test, and the changelog."""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

import dlock_core
import dlock_core.errors
import dlock_core.testing

ROOT: Final = Path(__file__).parents[2]

TWICE_WITH_REASON: Final = {
    "django_dlock.Lease": "the model of a table; the handle is what lock() gives",
    "django_dlock.Lock": "the model by which the admin site lists locks; the other is what lock() gives",
}


def test_public_names_of_the_core() -> None:
    assert dlock_core.__all__ == [
        "AcquireTimeout", "AlreadyHeld", "AsyncLease", "AsyncLock", "AsyncMultiLease", "AsyncMultiLock", "BackendUnavailable",
        "DLockError", "Lease", "LeaseLost", "Lock", "MultiLease", "MultiLock", "NotHeld", "NotSupported", "Released", "RowLocked",
        "SnapshotTooOld", "StaleObject", "StaleToken", "connect",
    ]  # fmt: skip
    assert all(hasattr(dlock_core, name) for name in dlock_core.__all__)


def test_modules_of_the_core_are_its_attributes_whatever_was_imported_before() -> None:
    program = (
        "import dlock_core; dlock_core.errors.StaleToken, dlock_core.backend.Released, dlock_core.testing; "
        "print('Lock' in dir(dlock_core), 'stores' in dir(dlock_core))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("True True", "")


def test_public_names_of_the_errors() -> None:
    assert dlock_core.errors.__all__ == [
        "AcquireTimeout", "AlreadyHeld", "BackendUnavailable", "DLockError", "LeaseLost", "NoSuchKey", "NotHeld", "NotSupported",
        "PreconditionFailed", "PreconditionMalformed", "PreconditionRequired", "RowLocked", "SnapshotTooOld", "StaleObject", "StaleToken",
    ]  # fmt: skip
    assert all(
        issubclass(getattr(dlock_core.errors, name), dlock_core.DLockError) for name in dlock_core.errors.__all__
    )


def test_public_names_of_the_test_tools() -> None:
    assert dlock_core.testing.__all__ == ["ManualRuntime", "MemoryBackend"]


def _classes(package: str) -> dict[str, set[str]]:
    """Return the modules that define each public class of a package, without nested classes."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(path for path in (ROOT / package).rglob("*.py") if path.parent.name != "migrations"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("package", ["dlock_core", "django_dlock", "sqla_dlock"])
def test_no_public_class_name_is_defined_twice_in_a_package(package: str) -> None:
    twice = {f"{package}.{name}": sorted(paths) for name, paths in _classes(package).items() if len(paths) > 1}
    allowed = {name for name in TWICE_WITH_REASON if name.startswith(package)}
    assert twice.keys() == allowed, twice
