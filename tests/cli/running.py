"""Tests run the commands in this process, or as the console script in its own process."""

import io
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import click

from dlock_core.cli.app import app
from dlock_core.cli.console import UrlSources
from dlock_core.cli.sources import CliContext, console_for

SCRIPT = [sys.executable, "-c", "from dlock_core.cli import main; main()"]


@dataclass
class Ran:
    code: int
    out: str
    err: str


def dlock(*args: str, sources: Any = None) -> Ran:
    """Run the command in this process; COLUMNS is 80 unless the test sets it."""
    out, code, err = io.StringIO(), 0, ""
    os.environ.setdefault("COLUMNS", "80")
    given = CliContext(sources or UrlSources(), console_for(out))
    try:
        app.main(list(args), "dlock", standalone_mode=False, obj=given)
    except click.ClickException as error:
        code, err = error.exit_code, error.format_message()
    except click.Abort:
        code, err = 1, "aborted"
    return Ran(code, out.getvalue(), err)


def script(*args: str, **environment: str) -> Ran:
    """Run the console script, without a terminal."""
    done = subprocess.run(
        [*SCRIPT, *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**clean(), **environment},
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def clean() -> dict[str, str]:
    """Return an environment that names no store, database or terminal."""
    hidden = {"DLOCK_URL", "DLOCK_DATABASE_URL", "COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM"}
    return {name: value for name, value in os.environ.items() if name not in hidden}
