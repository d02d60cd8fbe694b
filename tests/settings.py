"""Django settings of the test suite.

The first process to import them picks ports and a directory and leaves them in the environment, so that every process it starts
talks to the same servers and the same SQLite files. Servers are started by fixtures, when a test asks for them.
"""

import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests import servers


def _shared(name: str, make: Callable[[], object]) -> str:
    name += os.environ.get("PYTEST_XDIST_WORKER", "")  # each parallel worker has its own servers
    return os.environ.get(name) or os.environ.setdefault(name, str(make()))


def _new_directory() -> Path:
    """Make a directory that server accounts may enter, and that is removed when this process ends."""
    directory = Path(tempfile.mkdtemp(prefix="dlock-"))
    directory.chmod(0o755)
    servers.when_done(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _use_psycopg2() -> None:
    """Have Django use psycopg2 although psycopg is installed, which Django prefers and other tests need."""
    psycopg = sys.modules.pop("psycopg", None)
    sys.modules["psycopg"] = None  # type: ignore[assignment]  # It cannot be imported now.
    try:
        importlib.import_module("django.db.backends.postgresql.base")
    finally:
        del sys.modules["psycopg"]
    if psycopg is not None:
        sys.modules["psycopg"] = psycopg


def _sqlite(name: str) -> dict[str, object]:
    pragmas = "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF"
    options = {"transaction_mode": "IMMEDIATE", "timeout": 20, "init_command": pragmas}
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(TEST_DIRECTORY / name), "OPTIONS": options}


TEST_DIRECTORY = Path(_shared("DLOCK_TEST_DIRECTORY", _new_directory))
POSTGRESQL_PORT = int(_shared("DLOCK_TEST_POSTGRESQL_PORT", servers.free_port))
MARIADB_PORT = int(_shared("DLOCK_TEST_MARIADB_PORT", servers.free_port))

if os.environ.get("DLOCK_TEST_DJANGO_PSYCOPG2"):
    _use_psycopg2()

DATABASES = {"default": _sqlite("default.sqlite3"), "other": _sqlite("other.sqlite3")}
if importlib.util.find_spec("psycopg"):
    DATABASES["postgresql"] = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": "postgres",
        "HOST": "127.0.0.1",
        "PORT": POSTGRESQL_PORT,
    }
if importlib.util.find_spec("MySQLdb"):
    DATABASES["mariadb"] = {
        "ENGINE": "django.db.backends.mysql",
        "NAME": "dlock",
        "USER": "root",
        "HOST": "127.0.0.1",
        "PORT": MARIADB_PORT,
        "OPTIONS": {"charset": "utf8mb4"},
    }

INSTALLED_APPS = [
    *("django.contrib.contenttypes", "django.contrib.auth", "django.contrib.sessions", "django.contrib.messages"),
    *("django.contrib.admin", "django_dlock", "tests.testapp"),
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
STATIC_URL = "/static/"
SILENCED_SYSTEM_CHECKS = ["admin.E408", "admin.E409", "admin.E410"]  # tests of the admin bring its middleware along
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SECRET_KEY = "only for tests"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "tests.testapp.urls"
USE_TZ = True
