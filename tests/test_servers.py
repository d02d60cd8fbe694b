"""The servers behind the other tests keep their own promises."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from django.db import connections

from tests.servers import Server, ServerMissing, find, free_port
from tests.testapp.models import Counter

ROOT = Path(__file__).parents[1]


def ask(server: Server, *commands: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"".join(command + b"\r\n" for command in commands))
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(4096), b""))


def test_rows_are_written_for_real(database):
    Counter.objects.using(database).create(name="a", value=1)
    connections[database].close()
    assert Counter.objects.using(database).get().value == 1


@pytest.mark.parametrize("_again", [1, 2])
def test_each_test_begins_with_empty_tables(database, _again):
    assert not Counter.objects.using(database).exists()
    Counter.objects.using(database).create(name="left behind")


def test_two_databases_at_once(use_database):
    Counter.objects.using(use_database("default")).create(name="here")
    assert not Counter.objects.using(use_database("other")).exists()


@pytest.mark.django_db
def test_the_mark_of_pytest_django_works_on_the_default_database():
    Counter.objects.create(name="a")
    assert Counter.objects.count() == 1


def test_killed_redis_restarts_with_its_data(any_redis):
    ask(any_redis, b"SET kept 1")
    any_redis.restart()
    assert ask(any_redis, b"GET kept") == b"$1\r\n1\r\n"


def test_redis_restarts_without_data_when_told_so(any_redis):
    ask(any_redis, b"SET gone 1")
    any_redis.restart(keep_data=False)
    assert ask(any_redis, b"GET gone") == b"$-1\r\n"


def test_two_versions_of_redis_are_tested(redis_server, redis_62):
    assert b"redis_version:6.2" in ask(redis_62, b"INFO server")
    assert b"redis_version:6.2" not in ask(redis_server, b"INFO server")


def test_port_that_a_process_was_given_is_given_to_no_other_process():
    question = f"from tests.servers import _reserve; print(_reserve({free_port()}))"
    asked = subprocess.run([sys.executable, "-c", question], cwd=ROOT, capture_output=True, text=True, check=True)
    assert asked.stdout == "False\n"


def test_missing_program_says_what_to_install():
    with pytest.raises(ServerMissing, match="apt-get install some-package"):
        find("no-such-program", package="some-package")
