"""The tables of the installed apps: made once per database, emptied after each test.

They are made in a separate process. The first test that requests a database may already have patched Django: a fixture
that makes MariaDB pass for MySQL once gave every later test of that run MySQL's columns.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import django
from django.apps import apps
from django.core.management import call_command
from django.db import InterfaceError, OperationalError, connections

from tests.servers import when_done


def create(alias: str) -> None:
    """Make the tables in another process, which no test has patched; raise an error with its output if it fails."""
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    command = [sys.executable, "-m", __name__, alias]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"no tables in {alias}: {done.stdout}{done.stderr}")
    _emptiers[alias] = Emptier(alias)
    when_done(_emptiers[alias].close)


class Emptier:
    """Deletes every row of one database, on its own connection, which stays open.

    It is made with the tables, because a test may later let the alias stand for another database. One statement asks
    which tables have rows: a new connection for each test, whose server process has empty caches, and a DELETE for each
    table took as long as most tests.
    """

    def __init__(self, alias: str) -> None:
        self._connection = connections.create_connection(alias)
        self._connection.inc_thread_sharing()  # the first test that asks for the database may ask in a thread
        quote = self._connection.ops.quote_name
        models = apps.get_models(include_auto_created=True)
        self._tables = sorted({quote(each._meta.db_table) for each in models if each._meta.can_migrate(alias)})
        looks = [f"EXISTS (SELECT 1 FROM {table})" for table in self._tables]
        self._question = f"SELECT {', '.join(looks)}"

    def empty(self) -> None:
        try:
            self._empty()
        except (InterfaceError, OperationalError):  # the server has been restarted since, or this session was killed
            self.close()
            self._empty()

    def close(self) -> None:
        self._connection.close()

    def _empty(self) -> None:
        connection = self._connection
        with connection.cursor() as cursor:
            cursor.execute(self._question)
            filled = [table for table, has_rows in zip(self._tables, cursor.fetchone(), strict=True) if has_rows]
            cursor.execute("SELECT 1")  # a server shows the last statement of each session, and a test looks there
        if not filled:
            return
        with connection.constraint_checks_disabled(), connection.cursor() as cursor:
            connection.set_autocommit(False)
            for table in filled:
                cursor.execute(f"DELETE FROM {table}")
            connection.commit()
            connection.set_autocommit(True)


_emptiers: Final[dict[str, Emptier]] = {}


def empty(alias: str) -> None:
    """Delete every row of a database."""
    _emptiers[alias].empty()


if __name__ == "__main__":
    django.setup()
    call_command("migrate", database=sys.argv[1], run_syncdb=True, interactive=False, verbosity=0, skip_checks=True)
    Emptier(sys.argv[1]).empty()
