"""The mutants of a Lua script: each changes one word, number or command of one line."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from tests.mutants.mutant import Mutant

FAULTS: Final = (
    (re.compile(r"=="), "~="),
    (re.compile(r"~="), "=="),
    (re.compile(r"<="), "<"),
    (re.compile(r">="), ">"),
    (re.compile(r"<(?!=)"), "<="),
    (re.compile(r"(?<!-)>(?!=)"), ">="),
    (re.compile(r"\band\b"), "or"),
    (re.compile(r"\bor\b"), "and"),
    (re.compile(r"\bnot "), ""),
    (re.compile(r"\btrue\b"), "false"),
    (re.compile(r"\bfalse\b"), "true"),
    (re.compile(r" \+ "), " - "),
    (re.compile(r" - "), " + "),
    (re.compile(r" \* "), " / "),
)
NUMBER: Final = re.compile(r"(?<![\w.\[])\d+(?!\w|\.\d|\])")
COMMAND: Final = re.compile(r"^(\s*)(redis\.call\(.*\)|[a-z_]+\(.*\)|[A-Za-z_.\[\]]+ = .*)$")
"""A line that is one command, which is removed. Declarations of locals stay: the script needs them to compile."""
CONDITION: Final = re.compile(r"\bif (.+) then\b")
STRING: Final = re.compile(r"'[^']*'|\"[^\"]*\"")
OPENS: Final = re.compile(r"(\bthen|\belse|\bdo|\bfunction\b[^)]*\))\s*(--.*)?$")
"""A line that opens a block: a statement may be inserted after it."""
COMMENT: Final = re.compile(r"--.*$")


def mutants(path: str, text: str) -> list[Mutant]:
    lines = text.splitlines(keepends=True)
    found: list[Mutant] = []
    for at, line in enumerate(lines):
        for changed in _of_line(line.rstrip("\n")):
            source = "".join([*lines[:at], f"{changed}\n", *lines[at + 1 :]])
            after = changed.strip() or "(nothing)"
            found.append(Mutant(path, at + 1, len(found), line.strip(), after, source, (block(lines, at), at + 1)))
    return found


def block(lines: Sequence[str], at: int) -> int:
    """Return the number of the line that opens the block around this line; 0 if it is in none."""
    depth = _depth(lines[at])
    return next(
        (line + 1 for line in range(at - 1, -1, -1) if OPENS.search(lines[line]) and _depth(lines[line]) < depth), 0
    )


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _of_line(line: str) -> Iterator[str]:
    # Blanks replace comments and strings, so that columns in the rest stay the same.
    code = STRING.sub(lambda found: "'" + " " * (len(found[0]) - 2) + "'", line)
    code = COMMENT.sub(lambda found: " " * len(found[0]), code).rstrip()
    for pattern, instead in FAULTS:
        for found in pattern.finditer(code):
            yield line[: found.start()] + instead + line[found.end() :]
    for found in NUMBER.finditer(code):
        yield f"{line[: found.start()]}{int(found[0]) + 1}{line[found.end() :]}"
    if condition := CONDITION.search(code):
        begin, end = condition.span(1)
        yield f"{line[:begin]}not ({line[begin:end]}){line[end:]}"
    if command := COMMAND.match(code):
        yield command[1]
