"""A URL or a client leads to a backend, or to an error that says what is wrong and never a password."""

import copy
import pickle
import subprocess
import sys
from datetime import timedelta
from enum import Enum
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.cache
import redis.cluster
import redis.sentinel
from sqlalchemy import create_engine

from dlock_core import Lock, connect
from dlock_core.backends.advisory.labels import checked_prefix
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.backends.redlock.backend import RedlockBackend
from dlock_core.stores import schemes
from dlock_core.testing import MemoryBackend
from sqla_dlock.backends.advisory import from_engine

SECRET = "hunter2"
EVERY_STORE = [
    "redis://h", "redis+sentinel://h/shop", "redis+cluster://h", "redlock://a,b,c", "etcd://h", "zookeeper://h", "database+sqlite:///f",
]  # fmt: skip


def test_each_scheme_gives_its_backend() -> None:
    assert isinstance(connect("memory://"), MemoryBackend)
    for url in ("redis://localhost", "redis://localhost:6379/0", "rediss://localhost/1", "unix:///tmp/r.sock?db=2"):
        assert isinstance(connect(url), RedisBackend)


@pytest.mark.parametrize("url", ["foo://localhost", "localhost:6379", "", "Redis", f"foo://:{SECRET}@h"])
def test_unknown_scheme_names_those_there_are(url: str) -> None:
    with pytest.raises(ValueError, match=r"memory://.*redis://") as caught:
        connect(url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}/x@h:6379/0", f"redis://:{SECRET}#x@h:6379/0", f"redis://u:{SECRET}@h:port/0", f"redis://u:{SECRET}@h:99999/0",
        f"redis://u:{SECRET}@h/first", f"redis://u:{SECRET}@h/0?socket_timeout=soon", f"unix://u:{SECRET}@", f"redis://u:{SECRET}@[::1/0",
        f"redis://u:{SECRET}@h/0?protocol=9",
    ],
)  # fmt: skip
def test_bad_url_is_refused_and_no_part_of_the_password_is_told(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        connect(url)
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__ or SECRET not in str(caught.value.__context__)


@pytest.mark.parametrize("scheme", ["foo", "memory", "redis", "redis+sentinel", "database", f"u:{SECRET}@h?x=redis"])
def test_password_that_python_itself_would_quote_is_not_told(scheme: str) -> None:
    """The error of urlsplit quotes the login of a URL with a character that NFKC turns into "/" or "?"."""
    with pytest.raises(ValueError) as caught:
        connect(f"{scheme}://u:{SECRET}\u2100@h")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", EVERY_STORE)
@pytest.mark.parametrize("timeout", [0, -1, 1e300, float("nan"), float("inf"), True, "2", None, timedelta(1)], ids=repr)
def test_timeout_that_is_no_time_is_refused(url: str, timeout: object) -> None:
    with pytest.raises(ValueError, match="timeout"):
        connect(url, timeout=timeout)


@pytest.mark.parametrize("url", [url for url in EVERY_STORE if not url.startswith("database")])
@pytest.mark.parametrize("prefix", [None, 1, b"shop:", "a\n", "a\0", "\ud800", "x" * 513], ids=ascii)
def test_prefix_that_is_no_text_is_refused(url: str, prefix: object) -> None:
    with pytest.raises(ValueError, match="prefix"):
        connect(url, prefix=prefix)


class Prefix(str, Enum):  # noqa: UP042 - its text in an f-string is "Prefix.SHOP"
    SHOP = "shop"


@pytest.mark.parametrize("url", [url for url in EVERY_STORE if not url.startswith("database")])
def test_prefix_that_is_an_enum_of_texts_is_its_value(url: str) -> None:
    backend: Any = connect(url, prefix=Prefix.SHOP)
    keys = {
        "redlock": lambda: backend._keyspace.lock("a"),
        "etcd": lambda: backend._keys.locks,
        "zookeeper": lambda: f"{backend._prefix}",
    }.get(url.partition(":")[0], lambda: backend.lock_key("a"))
    assert keys().startswith("shop")
    assert f"{checked_prefix(Prefix.SHOP)}" == "shop"  # advisory locks


@pytest.mark.parametrize("url", ["redis://h", "redis+cluster://h"])
@pytest.mark.parametrize("name", ["daily report", "kunde:müller", "%41", "50%", Prefix.SHOP])
def test_key_for_other_programs_is_that_of_the_lock_with_this_name(url: str, name: str) -> None:
    backend: Any = connect(url)
    assert backend.lock_key(name) == backend.lock_key(Lock(backend, name).name)
    with pytest.raises(TypeError, match="text, not int"):
        backend.lock_key(5)


@pytest.mark.parametrize("url", [url for url in EVERY_STORE if url.startswith("red")])
def test_braces_in_a_prefix_of_redis_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="braces"):
        connect(url, prefix="{a}")


@pytest.mark.parametrize(
    ("url", "known"),
    [
        ("memory://", "It has no options"),
        *[(url, "prefix, timeout, replicas") for url in ("redis://h", "redis+sentinel://h/shop", "redis+cluster://h")],
        ("redlock://a,b,c", "tls, prefix, timeout"),
        ("etcd://h", "prefix, timeout, tls"),
        ("zookeeper://h", "prefix, timeout, session"),
        ("database+sqlite:///f", "timeout"),
        ("advisory+postgresql+psycopg://h/d", "prefix, timeout"),
    ],
)
def test_unknown_option_is_refused_by_name(url: str, known: str) -> None:
    with pytest.raises(TypeError, match=f"a store of this kind has no option 'tll'.*{known}$"):
        connect(url, tll=3)
    with pytest.raises(TypeError, match=f"has no option 'ttl'; it is an option of a lock.*{known}$"):
        connect(url, ttl=3)


def test_unknown_option_of_a_client_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"has no option 'ttl'.*prefix, timeout, replicas"):
        connect(redis.Redis(), ttl=3)


def make_store(url: str, prefix: str = "", **more: Any) -> tuple[str, str, dict[str, Any]]:
    """Stand for the factory of another package, which takes any option."""
    return url, prefix, more


def test_options_of_another_package_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{__name__}:make_store"
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [EntryPoint("mine", target, group)])
    assert connect("mine://h", prefix="a", ttl=3) == ("mine://h", "a", {"ttl": 3})


@pytest.mark.parametrize(
    "url", [*EVERY_STORE, "memory://", "advisory+postgresql+psycopg://h/d", "advisory+mysql+pymysql://h/d"]
)
@pytest.mark.parametrize("how", [pickle.dumps, copy.deepcopy])
def test_store_is_not_copied_into_another_process_and_its_password_is_not_pickled(url: str, how: Any) -> None:
    backend = connect(url)
    for each in (backend, Lock(backend, "a")):
        with pytest.raises(TypeError, match="pass its URL, and connect"):
            how(each)
    with pytest.raises(TypeError, match="pass its URL, and connect"):
        how(from_engine(create_engine("postgresql+psycopg://h/d")))


@pytest.mark.parametrize("url", ["redis://h", "redis+sentinel://h/shop", "redis+cluster://h"])
@pytest.mark.parametrize("replicas", [-1, True, "1", None, 1.0], ids=repr)
def test_replicas_that_are_no_number_are_refused(url: str, replicas: object) -> None:
    with pytest.raises(ValueError, match="replicas"):
        connect(url, replicas=replicas)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "redlock", "redis+sentinel"])
def test_unknown_option_of_a_url_is_refused_by_name(scheme: str) -> None:
    """Otherwise a user would believe that `?prefix=` or `?timeout=` had an effect."""
    with pytest.raises(ValueError, match="'prefix'") as caught:
        connect(f"{scheme}://u:{SECRET}@a,b,c/{'shop' * (scheme == 'redis+sentinel')}?socket_timeout=1&prefix=shop")
    assert SECRET not in str(caught.value)


def test_piece_of_a_password_that_looks_like_an_option_is_not_told() -> None:
    with pytest.raises(ValueError) as caught:
        connect(f"redis://u?{SECRET}=x@h/0")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    ["socket_timeout=1&max_connections=5", "client_name=shop&protocol=3", "decode_responses=1&health_check_interval=3"],
)
def test_options_of_redis_py_may_be_in_a_url(options: str) -> None:
    assert isinstance(connect(f"redis://h/0?{options}"), RedisBackend)
    assert isinstance(connect(f"rediss://h/0?{options}&ssl_cert_reqs=none"), RedisBackend)


def test_clients_and_pools_of_redis_py_are_stores() -> None:
    class Ours(redis.Redis):
        """A client class of the application."""

    for client in (
        redis.Redis(),
        Ours(),
        redis.ConnectionPool(),
        redis.BlockingConnectionPool(),
        redis.asyncio.Redis(),
    ):
        assert isinstance(connect(client), RedisBackend)


class Tunnel(redis.Connection):
    """Reaches its server in its own way, as a fake, a tunnel or service discovery does."""


class AsyncTunnel(redis.asyncio.Connection):
    """The same for tasks."""


class TunnelToMaster(redis.sentinel.SentinelManagedConnection):
    """The same behind Sentinels."""


class Elsewhere(redis.ConnectionPool):
    """It decides itself where its connections lead."""

    def get_connection(self, *args: Any, **options: Any) -> Any:
        raise AssertionError


class MakesOther(redis.BlockingConnectionPool):
    def make_connection(self) -> Any:
        raise AssertionError


class AsyncElsewhere(redis.asyncio.ConnectionPool):
    async def get_connection(self, *args: Any, **options: Any) -> Any:
        raise AssertionError


class OwnMaster(redis.sentinel.SentinelConnectionPool):
    def get_master_address(self) -> Any:
        raise AssertionError


class Named(redis.ConnectionPool):
    """It changes nothing about connections."""

    title = "orders"


def cluster_client(**options: Any) -> Any:
    """Return what dlock reads of a RedisCluster client, which cannot be made without a server."""
    nodes = {"h:1": SimpleNamespace(host="h", port=1)}
    manager = SimpleNamespace(connection_kwargs=options, startup_nodes=nodes, address_remap=None)
    client = redis.cluster.RedisCluster.__new__(redis.cluster.RedisCluster)
    client.nodes_manager, client.user_on_connect_func = manager, None
    return client


SENTINEL = redis.Sentinel([("h", 1)])


@pytest.mark.parametrize(
    "client",
    [
        redis.ConnectionPool(connection_class=Tunnel),
        redis.Redis(connection_pool=redis.ConnectionPool(connection_class=Tunnel)),
        redis.asyncio.ConnectionPool(connection_class=AsyncTunnel),
        redis.Redis(redis_connect_func=print),
        redis.asyncio.Redis(redis_connect_func=print),
        SENTINEL.master_for("shop", connection_class=TunnelToMaster),
        SENTINEL.master_for("shop", redis_connect_func=print),
        redis.Sentinel([("h", 1)], sentinel_kwargs={"redis_connect_func": print}).master_for("shop"),
        cluster_client(connection_class=Tunnel),
        Elsewhere(),
        redis.Redis(connection_pool=Elsewhere()),
        redis.Redis(connection_pool=MakesOther()),
        redis.asyncio.Redis(connection_pool=AsyncElsewhere()),
        SENTINEL.master_for("shop", connection_pool_class=OwnMaster),
    ],
)
def test_client_that_connects_in_its_own_way_is_refused(client: Any) -> None:
    with pytest.raises(TypeError, match="pass a URL"):
        connect(client)


def test_redlock_and_cluster_refuse_a_client_that_connects_in_its_own_way() -> None:
    pools = [redis.ConnectionPool(host=host, connection_class=Tunnel) for host in "abc"]
    with pytest.raises(TypeError, match="pass a URL"):
        RedlockBackend(pools)
    client = cluster_client()
    client.user_on_connect_func = print
    with pytest.raises(TypeError, match="pass a URL"):
        connect(client)
    client = cluster_client()
    client.nodes_manager.connection_pool_class = Elsewhere
    with pytest.raises(TypeError, match=r"Elsewhere\.get_connection.*pass a URL"):
        connect(client)


@pytest.mark.parametrize(
    "client",
    [
        redis.Redis(ssl=True),
        redis.asyncio.Redis(ssl=True),
        redis.Redis(unix_socket_path="/r.sock"),
        redis.asyncio.Redis(unix_socket_path="/r.sock"),
        redis.Redis(protocol=3, cache_config=redis.cache.CacheConfig()),
        SENTINEL.master_for("shop"),
        SENTINEL.master_for("shop", ssl=True),
        redis.asyncio.Sentinel([("h", 1)]).master_for("shop"),
        redis.asyncio.Sentinel([("h", 1)]).master_for("shop", ssl=True),
        cluster_client(redis_connect_func=redis.cluster.RedisCluster.on_connect),  # redis-py always sets it
        redis.asyncio.RedisCluster("h", load_balancing_strategy=redis.cluster.LoadBalancingStrategy.ROUND_ROBIN),
        redis.asyncio.RedisCluster("h", ssl=True),
        redis.BlockingConnectionPool(),
        redis.asyncio.BlockingConnectionPool(),
        Named(),
    ],
)
def test_every_kind_of_connection_of_redis_py_itself_is_accepted(client: Any) -> None:
    connect(client)


@pytest.mark.parametrize("thing", [object, None, 6379, b"redis://localhost", redis.Sentinel([])], ids=repr)
def test_what_is_no_store_is_refused(thing: object) -> None:
    with pytest.raises(TypeError, match=type(thing).__name__):
        connect(thing)


def test_missing_client_library_says_which_extra_to_install() -> None:
    code = "import sys; sys.modules['redis'] = None; import dlock_core; dlock_core.connect('redis://localhost')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingLibrary" in done.stderr
    assert "pip install 'dlock-orm[redis]'" in done.stderr


@pytest.mark.parametrize("target", ["no_such_package.store:Store", "json:no_such_store"])
def test_store_of_another_package_that_is_not_there_is_named(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [EntryPoint("file", target, group)])
    with pytest.raises(ImportError, match=target) as caught:
        connect(f"file://u:{SECRET}@h")
    assert "dlock-orm[" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_error_inside_the_package_of_a_store_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "brokenstore.py").write_text("import json; json.no_such_name")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [EntryPoint("file", "brokenstore:Store", group)]
    )
    with pytest.raises(AttributeError, match="no_such_name"):
        connect("file://h")


def test_core_imports_no_client_library() -> None:
    code = "import sys, dlock_core; print([name for name in ('redis', 'django', 'sqlalchemy', 'asgiref') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_schemes_are_listed() -> None:
    assert {"memory", "redis", "rediss", "unix"} <= set(schemes())


DJANGO = (
    "import django; from django.conf import settings; settings.configure(INSTALLED_APPS=['django.contrib.contenttypes', "
    "'django_dlock']); django.setup(); import django_dlock.middleware; from django_dlock import lock, locked"
)


@pytest.mark.parametrize(
    ("imports", "foreign"),
    [
        ("import dlock_core", "dlock_core.leases"),
        ("from dlock_core import Lock, connect; connect('memory://')", "dlock_core.doctor"),
        ("from dlock_core import Lock, connect; connect('memory://')", "dlock_core.backends.redis"),
        ("from dlock_core import Lock, connect; connect('memory://')", "importlib.metadata"),
        ("import django_dlock, dlock_core.stores", "dlock_core.backends"),
        ("import sqlalchemy.orm; from sqla_dlock import lock", "dlock_core.backends"),
        (DJANGO, "django_dlock.checks"),
        ("import sqlalchemy.orm; from sqla_dlock import lock", "sqlalchemy.dialects.mysql"),
    ],
)
def test_import_loads_only_what_is_used(imports: str, foreign: str) -> None:
    code = f"import sys; {imports}; print([name for name in sys.modules if name.startswith({foreign!r})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
