"""The tables of the installed apps: made once per database, emptied after each test.

They are made in a process of their own. The first test that asks for a database may have patched Django before it asked: a fixture
that has MariaDB pass for MySQL once gave every later test of that run MySQL's columns.
"""

import os
import subprocess
import sys
from pathlib import Path

import django
from django.apps import apps
from django.core.management import call_command
from django.db import connections, transaction


def create(alias: str) -> None:
    """Make the tables in another process, which no test has patched; raises with its output when it fails."""
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    command = [sys.executable, "-m", __name__, alias]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"no tables in {alias}: {done.stdout}{done.stderr}")


def empty(alias: str) -> None:
    """Delete every row; far faster than `flush`, which truncates every table even when it is empty."""
    connection = connections[alias]
    with connection.constraint_checks_disabled(), transaction.atomic(using=alias):
        for model in apps.get_models(include_auto_created=True):
            if model._meta.can_migrate(connection):
                model._base_manager.using(alias).all()._raw_delete(alias)
    connection.close()


if __name__ == "__main__":
    django.setup()
    call_command("migrate", database=sys.argv[1], run_syncdb=True, interactive=False, verbosity=0, skip_checks=True)
    empty(sys.argv[1])
