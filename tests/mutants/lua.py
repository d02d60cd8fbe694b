"""The mutants of a Lua script: one word, number or command of one line is changed."""

import re
from collections.abc import Iterator
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
"""A line that is one command: it is taken out. A local that is declared there is needed to compile."""
CONDITION: Final = re.compile(r"\bif (.+) then\b")
STRING: Final = re.compile(r"'[^']*'|\"[^\"]*\"")
COMMENT: Final = re.compile(r"--.*$")


def mutants(path: str, text: str) -> list[Mutant]:
    lines = text.splitlines(keepends=True)
    found: list[Mutant] = []
    for at, line in enumerate(lines):
        for changed in _of_line(line.rstrip("\n")):
            source = "".join([*lines[:at], f"{changed}\n", *lines[at + 1 :]])
            found.append(Mutant(path, at + 1, len(found), line.strip(), changed.strip() or "(nothing)", source))
    return found


def _of_line(line: str) -> Iterator[str]:
    # Comments and texts keep their places, so that what is found in the rest is at the same place in the line.
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
