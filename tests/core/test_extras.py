"""A missing library is an error that names the extra; each library is blocked in its own process."""

import subprocess
import sys
from pathlib import Path

import pytest

import django_dlock
import dlock_core
import sqla_dlock

ROOT = Path(__file__).parents[2]
BLOCK = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {libraries!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
SETTINGS = "import django; from django.conf import settings; settings.configure(); django.setup(); "
COMMAND = (
    "from django.conf import settings; settings.configure(INSTALLED_APPS=['django_dlock']); "
    "from django.core.management import execute_from_command_line as run; "
)


def without(libraries: str, code: str) -> subprocess.CompletedProcess[str]:
    whole = BLOCK.format(libraries=libraries.split()) + code
    return subprocess.run([sys.executable, "-c", whole], check=False, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("library", "code", "extra"),
    [
        ("prometheus_client", "from dlock_core.observability import metrics; metrics.install()", "prometheus"),
        ("opentelemetry", "from dlock_core.observability import tracing; tracing.install()", "opentelemetry"),
        ("rest_framework", f"{SETTINGS}import django_dlock.rest", "rest"),
        ("django asgiref", "from django_dlock import lock", "django"),
        ("sqlalchemy", "from sqla_dlock import lock", "sqlalchemy"),
        ("sqlalchemy", "from sqla_dlock import VersionedMixin", "sqlalchemy"),
        ("redis", "import dlock_core; dlock_core.connect('redis://localhost')", "redis"),
        ("redis", "import dlock_core; dlock_core.connect('redlock://a,b,c')", "redis"),
        ("h11", "import dlock_core; dlock_core.connect('etcd://localhost')", "etcd"),
        ("kazoo", "import dlock_core; dlock_core.connect('zookeeper://localhost')", "zookeeper"),
        ("kazoo", "import dlock_core.backends.zookeeper", "zookeeper"),
        ("sqlalchemy", "import dlock_core; dlock_core.connect('database+sqlite:///a')", "sqlalchemy"),
        ("click", "from dlock_core.cli import main; main()", "cli"),
        ("rich", f"{COMMAND}run(['manage.py', 'help', 'dlock'])", "cli"),
        ("rich", f"{COMMAND}run(['manage.py', 'dlock', '--help'])", "cli"),
        ("rich", f"{COMMAND}run(['manage.py', 'dlock', 'list'])", "cli"),
    ],
)
def test_missing_library_is_an_error_that_names_the_extra(library: str, code: str, extra: str) -> None:
    done = without(library, code)
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    assert f"pip install 'dlock-orm[{extra}]'" in last


@pytest.mark.parametrize(
    ("library", "url", "package"),
    [
        ("psycopg", "database+postgresql+psycopg://user@host/shop", "psycopg[binary]"),
        ("MySQLdb", "advisory+mysql+mysqldb://user@host/shop", "mysqlclient"),
        ("asyncpg", "database+postgresql+asyncpg://user@host/shop", "asyncpg"),
    ],
)
def test_missing_driver_of_a_store_is_an_error_that_names_its_package(library: str, url: str, package: str) -> None:
    done = without(library, f"import dlock_core; dlock_core.connect({url!r})")
    assert f"needs the package {library!r}: pip install '{package}'" in done.stderr


def test_help_of_the_command_without_its_libraries_is_no_traceback() -> None:
    done = without("click rich", f"{COMMAND}run(['manage.py', 'help', 'dlock'])")
    assert "Traceback" not in done.stderr


def test_each_package_tells_its_version() -> None:
    (line,) = (part for part in (ROOT / "pyproject.toml").read_text().splitlines() if part.startswith("version = "))
    for package in (dlock_core, django_dlock, sqla_dlock):
        assert f'version = "{package.__version__}"' == line


EVERY_MODULE = """
import importlib, pkgutil, dlock_core
for module in pkgutil.walk_packages(dlock_core.__path__, "dlock_core.", onerror=print):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print(module.name, error.name)
"""


def test_only_the_module_of_a_driver_needs_the_driver() -> None:
    drivers = "psycopg psycopg2 MySQLdb pymysql asyncpg aiomysql asyncmy aiosqlite"
    done = without(drivers, EVERY_MODULE)
    assert done.stdout.splitlines() == ["dlock_core.backends.advisory.libpq psycopg"]
    assert done.returncode == 0, done.stderr
