"""A redlock:// URL names nodes that can decide by majority, or is refused before any I/O, without its password."""

from typing import Any

import pytest
import redis
import redis.asyncio

from dlock_core import Lock, connect
from dlock_core.backends.redlock.backend import RedlockBackend
from dlock_core.errors import NotSupported

SECRET = "hunter2"


def titles(backend: Any) -> list[str]:
    return [node.title for node in backend._nodes.all]


def kwargs(backend: Any) -> list[dict[str, Any]]:
    return [node.threads._connect.keywords for node in backend._nodes.all]


def test_nodes_of_a_url_share_credentials_and_database() -> None:
    backend = connect(f"redlock://shop:{SECRET}@a,b:7000,[::1]:6380/3?client_name=shop")
    assert isinstance(backend, RedlockBackend)
    assert titles(backend) == ["a:6379", "b:7000", "::1:6380"]
    assert {(given["username"], given["password"], given["db"]) for given in kwargs(backend)} == {("shop", SECRET, 3)}


def test_tls_is_an_option() -> None:
    backend = connect("redlock://a,b,c?ssl_ca_certs=/ca.pem", tls=True)
    assert all(given["ssl_ca_certs"] == "/ca.pem" for given in kwargs(backend))
    assert all(node.threads._connect.func is redis.SSLConnection for node in backend._nodes.all)


def test_clients_of_redis_py_are_nodes() -> None:
    clients = (redis.Redis("a"), redis.asyncio.Redis(host="b"), redis.ConnectionPool(host="c", port=7))
    assert titles(RedlockBackend(clients)) == ["a:6379", "b:6379", "c:7"]


@pytest.mark.parametrize("number", [1, 2, 4, 6])
def test_nodes_that_cannot_decide_better_than_fewer_are_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"odd number of nodes, at least 3, not {number}"):
        connect("redlock://" + ",".join(f"h{place}" for place in range(number)))


@pytest.mark.parametrize("url", ["redlock://a,b,a", "redlock://a,b,a:6379", "redlock://a,b,A", "redlock://a,a"])
def test_node_that_is_named_twice_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="a:6379 is named twice"):
        connect(url)


def test_one_server_is_no_two_nodes_although_its_databases_are_two() -> None:
    with pytest.raises(ValueError, match="named twice"):
        RedlockBackend([redis.Redis("a", db=0), redis.Redis("a", db=1), redis.Redis("b")])


@pytest.mark.parametrize(
    "url",
    [
        "redlock://", "redlock://a,,c", "redlock://a,b,c:port", "redlock://a,b,c:0", "redlock://a,b,c:65536", f"redlock://:{SECRET}/x@a,b,c",
        f"redlock://:{SECRET}#x@a,b,c", f"redlock://u:{SECRET}@a,u:{SECRET}@b,c", f"redlock://u:{SECRET}@a,b,c/first",
        f"redlock://u:{SECRET}@a,b,c?protocol=9", f"redlock://u:{SECRET},x@a,b,c", f"redlock://u:{SECRET}@a,b,c?socket_timeout=soon",
    ],
)  # fmt: skip
def test_bad_url_is_refused_and_no_part_of_the_password_is_told(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        connect(url)
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__ or SECRET not in str(caught.value.__context__)


def test_shared_locks_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(NotSupported, match="shared"):
        Lock(connect("redlock://a,b,c"), "x", shared=True)
