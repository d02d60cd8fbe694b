"""Stores and databases by URL: they have aliases, wrong ones are explained, and no password appears anywhere."""

import pytest

from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.cli.console import UrlSources
from tests.cli.running import dlock

SECRET = "s3cr3t%2Fxyzzy"
PIECES = ("s3cr3t", "xyzzy")


def aliases(*urls: str) -> list[str]:
    with UrlSources().opened(urls) as stores:
        return [alias for alias, _ in stores]


def test_store_is_called_by_its_alias_or_else_by_its_scheme():
    assert aliases("memory://", "shop=memory://", "memory://") == ["memory", "shop", "memory2"]


def test_environment_names_the_store_where_the_command_does_not(monkeypatch):
    monkeypatch.setenv("DLOCK_URL", "redis://localhost:1")
    assert aliases() == ["redis"]
    assert aliases("memory://") == ["memory"]


def test_stores_are_closed_in_the_end(monkeypatch):
    closed = []
    monkeypatch.setattr(RedisBackend, "close", lambda self: closed.append(self))  # noqa: PLW0108 - a method
    with UrlSources().opened(["redis://localhost:1"]) as ((_, store),):
        assert closed == []
    assert closed == [store]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "nothing to look at"),
        (("--store", "localhost:6379"), "expected a URL such as redis://"),
        (("--store", "a=memory://", "--store", "a=memory://"), "alias 'a' is given twice"),
        (("--store", "mongodb://h"), "no lock store for the URL scheme 'mongodb'"),
        (("--database", "mongodb://h"), "no database for the URL scheme 'mongodb'"),
        (("--database", "postgres://postgres@h/db"), "scheme 'postgres': mariadb://, mysql://, postgresql://"),
        (("--database", "postgresql+nothing://h/db"), "nothing"),
        (("--format", "xml"), "'xml' is not one of"),
    ],
)
def test_wrong_option_is_a_usage_error_that_says_what_would_be_right(options, says):
    ran = dlock("list", *options)
    assert ran.code == 2
    assert says in ran.err


@pytest.mark.parametrize("verb", [("list",), ("show", "order"), ("release", "order", "--no-input"), ("doctor",)])
@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@localhost:1/0",
        f"redis://user:{SECRET}@localhost:port/0",
        "redis://user:s3cr3t/xyzzy@localhost:1",
        f"redlock://user:{SECRET}@localhost:1,localhost:2,localhost:3",
        f"etcd://user:{SECRET}@localhost:1",
        f"etcd://user:{SECRET}@localhost:1?what",
        f"nosuch://user:{SECRET}@localhost",
        f"redis:user:{SECRET}@localhost",
    ],
)
def test_password_of_a_store_appears_nowhere(verb, url, capsys, caplog):
    ran = dlock(*verb, "--store", url)
    assert ran.code in (1, 2)
    told = ran.out + ran.err + caplog.text + "".join(capsys.readouterr())
    assert not [piece for piece in PIECES if piece in told], told


@pytest.mark.parametrize("verb", [("list",), ("doctor",), ("purge",)])
@pytest.mark.parametrize(
    "url",
    [
        f"postgresql+psycopg://user:{SECRET}@localhost:1/db",
        f"mysql+pymysql://user:{SECRET}@localhost:1/db",
        f"postgresql+nosuch://user:{SECRET}@localhost:1/db",
        f"nosuch://user:{SECRET}@localhost:1/db",
    ],
)
def test_password_of_a_database_appears_nowhere(verb, url, capsys, caplog):
    ran = dlock(*verb, "--database", url)
    assert ran.code in (1, 2)
    told = ran.out + ran.err + caplog.text + "".join(capsys.readouterr())
    assert not [piece for piece in PIECES if piece in told], told


@pytest.mark.parametrize(
    "url", [f"redis://user:{SECRET}@localhost", "redis://:s3cr3t/xyzzy@h", f"h://?password={SECRET}"]
)
@pytest.mark.parametrize(
    "words",
    [("list",), (), ("show",), ("release", "--no-input"), ("list", "--format"), ("release", "order", "--token")],
)
def test_password_of_a_url_that_stands_where_none_belongs_is_not_quoted(words, url, monkeypatch):
    monkeypatch.setenv("DLOCK_URL", "memory://")
    ran = dlock(*words, url)
    assert ran.code in (1, 2)
    assert not [piece for piece in PIECES if piece in ran.out + ran.err], ran.err


@pytest.mark.parametrize("address", ["localhost:port/0", "localhost/nine"])
def test_wrong_url_is_answered_with_the_whole_form_of_a_right_one(address):
    ran = dlock("list", "--store", f"redis://{address}")
    assert ran.code == 2
    assert "expected redis://[user:password@]host:port/db or unix:///path" in ran.err


def test_third_party_store_that_tells_its_password_is_not_quoted(monkeypatch):
    def careless(url, **options):
        raise OSError(f"cannot reach {url}")

    monkeypatch.setattr("dlock_core.stores.connect", careless)
    ran = dlock("list", "--store", f"redis://:{SECRET}@localhost")
    assert (ran.code, ran.err) == (2, "--store: the URL cannot be used (OSError)")


def test_wrong_password_is_one_line(redis_server, monkeypatch):
    import redis

    with redis.Redis(port=redis_server.port) as client:
        client.config_set("requirepass", "right")
        try:
            ran = dlock("list", "--store", f"redis://:{SECRET}@127.0.0.1:{redis_server.port}")
        finally:
            with redis.Redis(port=redis_server.port, password="right") as again:
                again.config_set("requirepass", "")
    assert ran.code == 1
    assert [line for line in ran.out.splitlines() if "refused our credentials" in line]
    assert not [piece for piece in PIECES if piece in ran.out + ran.err]


def test_environment_names_the_database_where_the_command_does_not(monkeypatch, tmp_path):
    (tmp_path / "shop.db").touch()
    monkeypatch.setenv("DLOCK_DATABASE_URL", f"sqlite:///{tmp_path}/shop.db")
    assert "SQLite" in dlock("doctor").out
    assert "SQLite" not in dlock("doctor", "--database", "shop=postgresql+psycopg://localhost:1/db").out
