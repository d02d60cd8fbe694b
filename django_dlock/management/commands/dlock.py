"""`manage.py dlock`: the commands of `dlock_core.cli`, for the stores of DLOCK and the databases of DATABASES."""

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
    help = "Show who holds and who waits for locks, end a lease, look after the stores."
    requires_system_checks = ()  # whatever else is wrong with the project, locks can be looked at

    @property
    def stealth_options(self) -> tuple[str, ...]:  # type: ignore[override]
        """The options of all verbs, as `call_command("dlock", "list", format="json")` takes them."""
        return tuple(_verbs().option_names())

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, add_help=False, allow_abbrev=False, **kwargs)
        parser.__class__ = _Parser  # Django makes it itself
        return parser

    def handle(self, *args: Any, rest: list[str], **options: Any) -> None:
        """Do what the verb says; raises CommandError with the exit code 1 or 2."""
        colors = False if options["no_color"] else True if options["force_color"] else None
        self.stdout.ending = ""
        _verbs().run(rest, options, self.stdout, colors=colors)


class _Parser(CommandParser):
    """Takes Django's own options from anywhere in the line, and leaves all others to the verb, as they stand."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Namespace:  # type: ignore[override]
        found: Namespace
        found, found.rest = self.parse_known_args(args, namespace)
        return found

    def format_help(self) -> str:
        try:
            text: str = _verbs().help_text(self.prog)
        except CommandError as error:  # `manage.py help dlock` prints it where nobody catches one
            return f"{error}\n"
        return text


def _verbs() -> Any:
    try:
        return import_module("django_dlock.cli")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("click", "rich"):
            raise
        raise CommandError(MISSING) from None
