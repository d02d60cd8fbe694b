"""`dlock`, the commands for stores and databases by URL."""

from __future__ import annotations

import io
import sys

from dlock_core.cli.app import app
from dlock_core.cli.sources import Given, console_for
from dlock_core.cli.urls import Urls

__all__ = ["main"]


def main() -> None:
    """Run it with the arguments of this process; ends the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    app.main(prog_name="dlock", obj=Given(Urls(), console_for(sys.stdout)))
