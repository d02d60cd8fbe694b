"""The console script `dlock`, which needs the extra `cli` (click and rich)."""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["MISSING", "main"]

MISSING: Final = "the command needs click and rich: pip install 'dlock-orm[cli]'"


def main() -> None:
    """Run `dlock` and exit; without click or rich, exit with 1 and say what to install."""
    try:
        from dlock_core.cli.console import main as run
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("click", "rich"):
            raise
        sys.exit(f"dlock: {MISSING}")
    run()
