"""What a command works with: stores and databases, named by URLs or by a framework's settings, and a console."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import click
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from rich.console import RenderableType

    from dlock_core.backend import Backend
    from dlock_core.doctor import Finding
    from dlock_core.sql.database import Database

__all__ = ["CliContext", "CommandFailed", "OpenSources", "Sources", "WrongUrl", "console_for", "is_interactive"]

PIPE_WIDTH: Final = 200
"""Cells of a line written to a file or a pipe, unless COLUMNS says otherwise."""


class CommandFailed(click.ClickException):
    """The command was refused, did not find its object, or found something unsafe: exit code 1."""

    exit_code = 1


class WrongUrl(click.UsageError):
    """A URL cannot be used; the message is known to contain no password."""


class Sources(Protocol):
    """Stores and databases in one way of naming them; its methods raise click.UsageError for a wrong name or URL."""

    def opened(self, stores: Sequence[str]) -> AbstractContextManager[list[tuple[str, Backend]]]:
        """Open the stores with these names for a block, or all that are known."""

    def databases(self, databases: Sequence[str]) -> list[Database]:
        """Open the databases with these names, or all that are known."""

    def findings(self, databases: Sequence[str]) -> list[Finding]:
        """Return what the doctor finds in the framework's settings."""

    def purge(self, database: str | None, days: int) -> tuple[str, int]:
        """Purge the fence table of one database; return its alias and the number of removed rows."""


class OpenSources(NamedTuple):
    """The stores, with their aliases, and the databases that a command has open."""

    stores: list[tuple[str, Backend]]
    databases: list[Database]


@dataclass(frozen=True, slots=True)
class CliContext:
    """The object that click passes to every command: where to read from, and where to print."""

    sources: Sources
    console: Console

    @contextmanager
    def opened(self, stores: Sequence[str], databases: Sequence[str] | None) -> Iterator[OpenSources]:
        """Open stores and, unless None, databases for a block; raises click.UsageError if there are none of either."""
        with self.sources.opened(stores) as backends:
            found = OpenSources(backends, [] if databases is None else self.sources.databases(databases))
            if not any(found):
                raise click.UsageError("nothing to look at: pass --store or --database, or set DLOCK_URL")
            try:
                yield found
            finally:
                for database in found.databases:
                    database.close()

    def print(self, *what: RenderableType) -> None:
        """Print for people; without the padding of columns if the output is a file or a pipe."""
        if self.console.is_terminal:
            self.console.print(*what, sep="\n", highlight=False)
            return
        with self.console.capture() as captured:
            self.console.print(*what, sep="\n", highlight=False)
        self.console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().removesuffix("\n").split("\n"))

    def print_line(self, text: str, style: str = "") -> None:
        """Print one line, which a narrow terminal wraps itself, so that it is still copied as one line."""
        self.console.print(Text(text, style), highlight=False, soft_wrap=True)

    def print_json(self, data: dict[str, Any], *, indent: int | None = 2) -> None:
        """Print for programs, as ASCII."""
        self.console.file.write(json.dumps(data, indent=indent) + "\n")
        self.console.file.flush()


def console_for(file: IO[str], *, colors: bool | None = None) -> Console:
    """Return a console that writes to a file; `colors` None leaves the choice to the terminal and NO_COLOR."""
    is_terminal = hasattr(file, "isatty") and file.isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(
        file=file,
        width=width,
        force_terminal=colors or None,
        color_system=None if colors is False else "auto",
        highlight=False,
        emoji=False,
        markup=False,
    )


def is_interactive() -> bool:
    """Return whether standard input is a terminal, so that the operator can be asked."""
    return sys.stdin is not None and sys.stdin.isatty()
