"""The definition of one mutant: a file, a line, and what replaces it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True)
class Mutant:
    file: str
    """The path from the root of the project."""
    line: int
    number: int
    """Its number among the file's mutants, which distinguishes those of one line, and equal ones of different lines."""
    before: str
    after: str
    source: str
    """The whole text of the file with the fault in it."""
    lines: tuple[int, int] = (0, 0)
    """The first and last line of the statement it is in, whose tests are tried. Zeros if only the import runs it."""

    @property
    def key(self) -> str:
        """Return a key that is equal for the same fault in the same text, and different as soon as the file changes."""
        return sha256(f"{self.file}\0{self.number}\0{self.source}".encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """Return its name in a report, without the line number, which changes soon."""
        return f"{self.file}: {self.before} → {self.after}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} → {self.after}"


Mutate = Callable[[str, str], Sequence[Mutant]]
"""Return every mutant of a file, in the order of its lines, from its path and its text."""
