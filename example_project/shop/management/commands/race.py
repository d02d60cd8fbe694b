"""Ship and cancel the same orders at the same moment, under each strategy, and count what went wrong."""

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser, DjangoHelpFormatter
from race import RaceFailed
from race.command import HELP, add_options, race

from shop.racing import DjangoShop

OPTIONS = ("strategy", "orders", "workers", "seed", "format")


class HelpFormatter(DjangoHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows our own options first, and the text as it is written."""


class Command(BaseCommand):
    help = HELP.format(server=DjangoShop.server)
    requires_system_checks = []  # errors in the two URLs are reported in one line

    def create_parser(self, prog_name: str, subcommand: str, **options: Any) -> CommandParser:
        options |= {"usage": "%(prog)s [options]", "formatter_class": HelpFormatter}
        return super().create_parser(prog_name, subcommand, **options)

    def add_arguments(self, parser: CommandParser) -> None:
        add_options(DjangoShop(), parser.add_argument)

    def handle(self, **options: Any) -> None:
        try:
            race(DjangoShop(), **{name: options[name] for name in OPTIONS})
        except RaceFailed as error:
            raise CommandError(str(error)) from None
