"""`manage.py dlock`: the commands of `dlock_core.cli` on the stores of DLOCK and the databases of DATABASES."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from dlock_core.cli import MISSING

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

__all__ = ["Command"]


class Command(BaseCommand):
    """The management command; it imports click only when it runs, because the extra may be missing."""

    help = "Show the holders and waiters of locks, release a lease, and check stores and databases."
    requires_system_checks = ()  # Locks must be visible whatever else is wrong with the project.

    @property
    def stealth_options(self) -> tuple[str, ...]:  # type: ignore[override]
        """The options of all commands, which `call_command("dlock", "list", format="json")` may pass."""
        return tuple(_cli().option_names())

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, add_help=False, allow_abbrev=False, **kwargs)
        parser.__class__ = _Parser  # Django creates the parser, and offers no choice of its class.
        return parser

    def handle(self, *args: Any, arguments: list[str], **options: Any) -> None:
        """Run the command; raises CommandError with the exit code 1 or 2."""
        colors = False if options["no_color"] else True if options["force_color"] else None
        self.stdout.ending = ""
        _cli().run(arguments, options, self.stdout, colors=colors)


class _Parser(CommandParser):
    """A parser that takes Django's own options from anywhere in the line, and leaves all others to the command."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Namespace:  # type: ignore[override]
        found: Namespace
        found, found.arguments = self.parse_known_args(args, namespace)
        return found

    def format_help(self) -> str:
        try:
            text: str = _cli().help_text(self.prog)
        except CommandError as error:  # `manage.py help dlock` prints the help where no CommandError is caught.
            return f"{error}\n"
        return text


def _cli() -> Any:
    try:
        return import_module("django_dlock.cli")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("click", "rich"):
            raise
        raise CommandError(MISSING) from None
