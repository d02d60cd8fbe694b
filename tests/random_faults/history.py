"""The records of the processes: each writes one line per event, at once, with the time of a clock that all share.

CLOCK_BOOTTIME is the same for all processes of a machine and also runs while one is stopped, so the order is exact.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Recorder:
    """Appends to the history of one process, which may be killed at any moment."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.is_writing = False
        """While this is true, no signal handler may raise: the line would be lost."""

    def write(self, event: str, section: str = "", **values: Any) -> None:
        self.is_writing = True
        try:
            line = {"at": now(), "event": event, "section": section, "pid": os.getpid(), **values}
            os.write(self._file, (json.dumps(line, default=str) + "\n").encode())
        finally:
            self.is_writing = False


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a history."""

    at: float
    event: str
    section: str
    pid: int
    values: dict[str, Any]


class History:
    """The lines of all processes so far; `more()` reads the new ones."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read_until: dict[Path, int] = {}
        self.records: list[Record] = []

    def more(self) -> list[Record]:
        """Return the lines that were added since the last call."""
        added = [record for path in sorted(self._directory.glob("*.history")) for record in self._more_of(path)]
        self.records += added
        return added

    def _more_of(self, path: Path) -> Iterator[Record]:
        with path.open("rb") as file:
            file.seek(self._read_until.get(path, 0))
            text = file.read()
        whole, _, _ = text.rpartition(b"\n")
        self._read_until[path] = self._read_until.get(path, 0) + (len(whole) + 1 if whole else 0)
        for line in whole.splitlines():
            values = json.loads(line)
            head = (values.pop(name) for name in ("at", "event", "section", "pid"))
            yield Record(*head, values)
