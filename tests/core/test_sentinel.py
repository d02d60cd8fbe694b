"""A redis+sentinel:// URL or a client of redis.sentinel names a master that moves, or is refused before anything is sent."""

from typing import Any

import pytest
import redis
import redis.asyncio.sentinel
import redis.sentinel

from dlock_core import connect
from dlock_core.backends.redis import sentinel
from dlock_core.backends.redis.backend import RedisBackend
from dlock_core.backends.redlock.backend import RedlockBackend

SECRET = "hunter2"
SENTINELS = [("a", 1), ("b", 2)]


def given(pool: Any) -> dict[str, Any]:
    return dict(pool.connection_kwargs)


def test_url_names_sentinels_service_database_and_credentials_of_both() -> None:
    url = f"redis+sentinel://shop:{SECRET}@a,b:7000,[::1]:7001/my%20shop/3?sentinel_username=s&sentinel_password=t"
    service = sentinel.service_from_url(url)
    assert service.name == "my shop"
    assert [(given(pool)["host"], given(pool)["port"]) for pool in service.sentinels] == [
        ("a", 26379),
        ("b", 7000),
        ("::1", 7001),
    ]
    assert {(given(pool)["username"], given(pool)["password"]) for pool in service.sentinels} == {("s", "t")}
    master = given(service.master)
    assert (master["username"], master["password"], master["db"]) == ("shop", SECRET, 3)
    assert isinstance(connect(url), RedisBackend)


def test_password_of_the_servers_is_not_told_to_the_sentinels() -> None:
    service = sentinel.service_from_url(f"redis+sentinel://:{SECRET}@a/shop")
    assert SECRET not in str([given(pool) for pool in service.sentinels])


def test_tls_is_for_servers_and_sentinels_alike() -> None:
    service = sentinel.service_from_url("rediss+sentinel://a,b/shop?ssl_ca_certs=/ca.pem")
    for pool in (*service.sentinels, service.master):
        assert pool.connection_class is redis.SSLConnection
        assert given(pool)["ssl_ca_certs"] == "/ca.pem"


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://", "redis+sentinel://a", "redis+sentinel://a/", "redis+sentinel://a,,b/shop", "redis+sentinel:///shop",
        "redis+sentinel://a:port/shop", "redis+sentinel://a:0/shop", "redis+sentinel://a:65536/shop", f"redis+sentinel://u:{SECRET}@a/shop/first",
        f"redis+sentinel://:{SECRET}/x@a/shop", f"redis+sentinel://:{SECRET}#x@a/shop", f"redis+sentinel://:{SECRET}@a/shop/0/1",
        f"redis+sentinel://:{SECRET}@a,:{SECRET}@b/shop", f"redis+sentinel://u:{SECRET}@a/shop?protocol=9",
        f"redis+sentinel://u:{SECRET}@a/shop?socket_timeout=soon", f"redis+sentinel://u:{SECRET}@[::1/shop",
    ],
)  # fmt: skip
def test_bad_url_is_refused_and_no_part_of_the_password_is_told(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        connect(url)
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__ or SECRET not in str(caught.value.__context__)


@pytest.mark.parametrize("replicas", [-1, 1.0, True, "1", None])
def test_bad_number_of_replicas_is_refused(replicas: Any) -> None:
    with pytest.raises(ValueError, match="replicas"):
        connect("redis+sentinel://a/shop", replicas=replicas)


@pytest.mark.parametrize("kind", [redis.sentinel.Sentinel, redis.asyncio.sentinel.Sentinel])
def test_client_of_a_master_is_a_store_and_one_of_replicas_is_not(kind: Any) -> None:
    sentinels = kind(SENTINELS, sentinel_kwargs={"password": SECRET})
    assert isinstance(connect(sentinels.master_for("shop")), RedisBackend)
    with pytest.raises(ValueError, match="replicas are never used"):
        connect(sentinels.slave_for("shop"))


def test_client_without_sentinels_is_refused() -> None:
    with pytest.raises(ValueError, match="'shop' has no Sentinels"):
        connect(redis.sentinel.Sentinel([]).master_for("shop"))


def test_address_that_a_client_forces_on_its_master_is_ours_too() -> None:
    sentinels = redis.sentinel.Sentinel(SENTINELS, force_master_ip="10.1.2.3")
    service = sentinel._service_of_client(sentinels.master_for("shop"))
    assert service is not None
    assert service.address == "10.1.2.3"


def test_redlock_refuses_masters_that_move() -> None:
    master = redis.sentinel.Sentinel(SENTINELS).master_for("shop")
    with pytest.raises(TypeError, match="no fixed address"):
        RedlockBackend([redis.Redis("a"), redis.Redis("b"), master])
