"""The console script `dlock`, which needs the extra `cli` (click and rich)."""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["MISSING", "main"]

MISSING: Final = "the command needs click and rich: pip install 'dlock-orm[cli]'"


def main() -> None:
    """Run `dlock`; without click or rich say what to install, and end with 1."""
    try:
        from dlock_core.cli.console import main as run
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("click", "rich"):
            raise
        sys.exit(f"dlock: {MISSING}")
    run()
