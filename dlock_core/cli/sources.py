"""What a command works with: stores and databases, by URL or by the names that a framework gives them; a terminal."""

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

WIDE: Final = 200
"""Cells of a line that goes into a file or a pipe, unless COLUMNS says otherwise."""


class CommandFailed(click.ClickException):
    """The command could not do what it was asked to, or found what must not be: exit code 1."""

    exit_code = 1


class WrongUrl(click.UsageError):
    """A URL is of no use, in words that are known to tell no password."""


class Sources(Protocol):
    """Stores and databases as one kind of program names them; raises click.UsageError for a wrong name or URL."""

    def opened(self, stores: Sequence[str]) -> AbstractContextManager[list[tuple[str, Backend]]]:
        """Open the stores of these options, or all that are known."""

    def databases(self, given: Sequence[str]) -> list[Database]:
        """Open the databases of these options, or all that are known."""

    def findings(self, databases: Sequence[str]) -> list[Finding]:
        """Give what the framework can tell the doctor of itself."""

    def purge(self, database: str | None, days: int) -> tuple[str, int]:
        """Tidy the fence table of one database; give its alias and the number of rows that went."""


class OpenSources(NamedTuple):
    """Stores by alias, and databases, as long as a command uses them."""

    stores: list[tuple[str, Backend]]
    databases: list[Database]


@dataclass(frozen=True, slots=True)
class CliContext:
    """What click hands to every command."""

    sources: Sources
    console: Console

    @contextmanager
    def opened(self, stores: Sequence[str], databases: Sequence[str] | None) -> Iterator[OpenSources]:
        """Open stores, and databases unless None; raises click.UsageError when there is nothing to look at."""
        with self.sources.opened(stores) as backends:
            found = OpenSources(backends, [] if databases is None else self.sources.databases(databases))
            if not any(found):
                raise click.UsageError("nothing to look at: name a --store or a --database")
            try:
                yield found
            finally:
                for database in found.databases:
                    database.close()

    def show(self, *what: RenderableType) -> None:
        """Print for people."""
        if self.console.is_terminal:
            self.console.print(*what, sep="\n", highlight=False)
            return
        with self.console.capture() as captured:  # a column is padded, which a file or a pipe has no use for
            self.console.print(*what, sep="\n", highlight=False)
        self.console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().removesuffix("\n").split("\n"))

    def line(self, text: str, style: str = "") -> None:
        """Print one line, which a narrow terminal wraps by itself: what it shows in two lines is copied as one."""
        self.console.print(Text(text, style), highlight=False, soft_wrap=True)

    def json(self, data: dict[str, Any], *, indent: int | None = 2) -> None:
        """Print for programs; what is not ASCII is escaped."""
        self.console.file.write(json.dumps(data, indent=indent) + "\n")
        self.console.file.flush()


def console_for(file: IO[str], *, colors: bool | None = None) -> Console:
    """Make a console; `colors` None leaves it to the terminal and NO_COLOR."""
    is_terminal = hasattr(file, "isatty") and file.isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else WIDE
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
    """Tell whether somebody can be asked."""
    return sys.stdin is not None and sys.stdin.isatty()
