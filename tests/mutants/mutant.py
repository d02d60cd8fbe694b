"""What one mutant is: a file, a line, and what stands there instead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True)
class Mutant:
    file: str
    """The path from the root of the project."""
    line: int
    number: int
    """Which of the file's mutants it is: mutants of one line, and equal ones of different lines, are told apart by it."""
    before: str
    after: str
    source: str
    """The whole text of the file with the fault in it."""
    lines: tuple[int, int] = (0, 0)
    """The first and the last line of the statement it is in: the tests that run it are those to try. Zeros where the import runs it."""

    @property
    def key(self) -> str:
        """The same for the same fault in the same text, and another one as soon as the file changes."""
        return sha256(f"{self.file}\0{self.number}\0{self.source}".encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """How a report names it, but without the line's number, which changes soon."""
        return f"{self.file}: {self.before} → {self.after}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} → {self.after}"


Mutate = Callable[[str, str], Sequence[Mutant]]
"""Return every mutant of a file, in the order of its lines, from its path and its text."""
