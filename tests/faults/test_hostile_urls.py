"""No error and no log shows the secret in a URL, whatever is wrong with the rest of it."""

import itertools
import traceback
from collections.abc import Iterator

import pytest

from dlock_core import Lock, connect
from dlock_core.backend import Backend
from dlock_core.cli.console import STORE, _made
from dlock_core.cli.sources import WrongUrl

SECRET = "s3cr3t"
SCHEMES = [
    "redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster", "redlock",
    "zookeeper", "etcd", "etcds", "database+postgresql+psycopg", "advisory+postgresql+psycopg", "nosuch", "",
]  # fmt: skip
BEGINNINGS = ["://", ":", ":/", "//"]
LOGINS = ["", f"u:{SECRET}@", f":{SECRET}@", f"u:{SECRET}/x@", f"u:{SECRET}?x@", f"u:{SECRET}#x@", f"u:{SECRET}@x@",
          f"u:x,{SECRET}@", f"u:x%2F{SECRET}@", f"{SECRET}@"]  # fmt: skip
PLACES = ["127.0.0.1:1", "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", "127.0.0.1:port", "[::1:1", "", "/tmp/no.sock"]
PATHS = ["", "/0", "/service/0", "/a/b"]
KEYS = ["password", "sentinel_password", "pass", "passwd", "ssl_password", "sslpassword", "secret", "token", "auth"]
QUICK = ("redis", "unix", "redlock", "etcd")
"""Stores that fail at once if no server is running; the errors of their use are checked, too."""
STEP = 43
"""One in this many of some 35,000 URLs is tested; with 1 the test takes minutes."""
SEPARATORS = ["?", "&", ";", "#", "/", "?x=1&", ","]


def urls() -> Iterator[str]:
    for scheme, beginning, login, place, path in itertools.product(SCHEMES, BEGINNINGS, LOGINS, PLACES, PATHS):
        if login:
            yield f"{scheme}{beginning}{login}{place}{path}"
    for scheme, place, path, separator, key in itertools.product(SCHEMES, PLACES, PATHS, SEPARATORS, KEYS):
        yield f"{scheme}://{place}{path}{separator}{key}={SECRET}"


def told(url: str) -> str:
    """Return all that a process reports about a URL: errors with their causes, of the command line and of the store."""
    try:
        backend = connect(url)
    except Exception as error:
        return "".join(traceback.format_exception(error, limit=0)) + on_the_command_line(url)
    try:
        return repr(backend) + (used(backend) if url.startswith(QUICK) else "")
    finally:
        backend.close()


def on_the_command_line(url: str) -> str:
    try:
        _made(connect, url, STORE)
    except WrongUrl as error:
        return error.format_message()
    return ""


def used(backend: Backend) -> str:
    try:
        Lock(backend, "order:42", wait=0).acquire()
    except Exception as error:
        return "".join(traceback.format_exception(error, limit=0))
    raise AssertionError("there is no such store")


def test_no_url_shows_a_secret_whatever_is_wrong_with_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    every = list(urls())[::STEP]
    leaks = [url for url in every if SECRET in told(url)]
    assert not leaks, f"{len(leaks)} of {len(every)}: {leaks[:20]}"
    assert SECRET not in caplog.text


@pytest.mark.parametrize("store", ["database", "advisory"])
@pytest.mark.parametrize("rest", ["h/db&password=", "h&password=", "h/db;sslpassword="])
def test_option_in_the_place_of_a_database_is_refused(store: str, rest: str) -> None:
    with pytest.raises(ValueError, match="SQLAlchemy cannot use") as refused:
        connect(f"{store}+postgresql+psycopg://{rest}{SECRET}")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("url", ["zookeeper://h:1/shop&password=", "zookeeper://h&password=", "etcd://h:1;token="])
def test_option_in_the_place_of_a_host_or_a_path_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="bad ") as refused:
        connect(f"{url}{SECRET}")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("host", ["a..b", ".a", "a..", "x" * 64, f"a.{'x' * 64}.example", "\u00e4" * 64])
@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme not in {"unix", "nosuch", ""}])
def test_host_that_no_name_server_can_know_is_refused_before_it_is_looked_up(scheme: str, host: str) -> None:
    """Python would raise a UnicodeError from deep inside a connect."""
    rest = {"redlock": ",h:2,h:3", "redis+sentinel": "/service", "rediss+sentinel": "/service"}.get(scheme, "")
    with pytest.raises(ValueError, match=r"bad |is not a valid host name") as refused:
        connect(f"{scheme}://u:{SECRET}@{host}:1{rest}")
    assert not isinstance(refused.value, UnicodeError)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("place", ["localhost", "a.b.", "x" * 63, "[::1]", "127.0.0.1", "\u00e4.example", "a_b"])
def test_host_that_may_be_known_is_accepted(place: str) -> None:
    for scheme in ("redis", "redis+cluster", "zookeeper", "etcd", "database+postgresql+psycopg"):
        connect(f"{scheme}://{place}:1").close()
