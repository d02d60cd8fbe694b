"""Django uses psycopg2 where psycopg is not installed. Here both are, so this test needs its own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).parent


@pytest.mark.usefixtures("postgresql")
def test_transactions_are_followed_on_psycopg2_as_on_psycopg() -> None:
    pytest.importorskip("psycopg2")
    ours = ("DLOCK_TEST_", "PYTEST_")  # With these it would use our servers, or report to our session.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    files = sorted(DIRECTORY.glob("test_transactions*.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "postgresql", *files],
        env=environment | {"DLOCK_TEST_DJANGO_PSYCOPG2": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout
