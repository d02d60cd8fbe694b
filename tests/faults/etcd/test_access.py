"""etcd is reached with passwords, TLS and URLs; no secret is ever shown."""

import logging
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from dlock_core import AsyncLock, Lock, connect
from dlock_core.backend import Released
from dlock_core.errors import BackendUnavailable
from tests.etcd_servers import Cluster, ask, cluster, make
from tests.faults.looking import is_untouched, waiters
from tests.servers import Server, free_port
from tests.waiting import until

WITHIN = 30.0
SECRET = "s3cr3t/p:ss@w"
QUOTED = "s3cr3t%2Fp%3Ass%40w"


@pytest.fixture(scope="module")
def guarded(servers_directory: Path) -> Iterator[Cluster]:
    """Yield a cluster that requires a login: `app` may use the locks, `guest` may use nothing."""
    with cluster(servers_directory / "etcd-auth") as etcd:
        (member,) = etcd.members
        for path, body in [
            ("user/add", {"name": "root", "password": "root"}),
            ("user/add", {"name": "app", "password": SECRET}),
            ("user/add", {"name": "guest", "password": SECRET}),
            ("role/add", {"name": "root"}),
            ("role/add", {"name": "locks"}),
            ("role/grant", {"name": "locks", "perm": {"permType": "READWRITE", "key": "AA==", "range_end": "AA=="}}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/grant", {"user": "app", "role": "locks"}),
            ("enable", {}),
        ]:
            answer = ask(member, f"auth/{path}", body)
            assert "code" not in answer, (path, answer)
        yield etcd


def at(etcd: Cluster, credentials: str) -> str:
    return etcd.url.replace("etcd://", f"etcd://{credentials}@" if credentials else "etcd://")


def use_all_of(store: Any) -> None:
    """Acquire, renew, wait, hand over and release a lock, then close the store."""
    with Lock(store, "a", ttl=2) as lease:
        lease.renew()
        waiter = threading.Thread(target=lambda: Lock(store, "a", wait=None).acquire().release())
        waiter.start()
        until(lambda: waiters(store, "a"))
    waiter.join(WITHIN)
    assert is_untouched(store, "a")
    store.close()


def test_right_password_is_a_store_like_any_other(guarded: Cluster) -> None:
    use_all_of(connect(at(guarded, f"app:{QUOTED}")))


async def test_task_logs_in_as_well(guarded: Cluster) -> None:
    async with AsyncLock(connect(at(guarded, f"app:{QUOTED}")), "a") as lease:
        assert lease.token > 0


def test_permit_that_was_forgotten_is_asked_for_again_without_notice(guarded: Cluster) -> None:
    store = connect(at(guarded, f"app:{QUOTED}"))
    lease = Lock(store, "a", ttl=60).acquire()
    got: list[Any] = []
    waiter = threading.Thread(target=lambda: got.append(Lock(store, "a", wait=None).acquire()))
    waiter.start()
    until(lambda: waiters(store, "a"))  # type: ignore[arg-type]
    guarded.restart()
    other = Lock(store, "b").try_acquire()
    assert other is not None
    guarded.restart()
    assert [lease.release(), other.release()] == [Released.RELEASED] * 2
    waiter.join(WITHIN)
    assert got[0].release() is Released.RELEASED
    store.close()


@pytest.mark.parametrize("credentials", ["app:wr%2Fng", f"nobody:{QUOTED}", f"guest:{QUOTED}", ""])
def test_refused_credentials_are_told_at_once_and_never_shown(
    guarded: Cluster, caplog: pytest.LogCaptureFixture, credentials: str
) -> None:
    store = connect(at(guarded, credentials))
    with caplog.at_level(logging.DEBUG), pytest.raises(BackendUnavailable, match="refused our credentials") as caught:
        Lock(store, "a", wait=None).acquire()
    assert caught.value.refused
    error: Any = caught.value
    while error is not None:
        assert SECRET not in f"{error!s} {error!r} {vars(error)}"
        assert "wr/ng" not in f"{error!s} {error!r} {vars(error)}"
        error = error.__cause__ or error.__context__
    assert SECRET not in caplog.text
    assert SECRET not in repr(store)
    store.close()


def test_credentials_for_a_store_that_asks_for_none_do_no_harm(one: Cluster, prefix: str) -> None:
    with Lock(connect(at(one, "app:secret"), prefix=prefix), "a") as lease:
        assert lease.token > 0


@pytest.mark.parametrize("wait", [0, 0.2])
def test_store_that_is_not_there_is_unavailable_and_not_taken(wait: float) -> None:
    store = connect(f"etcd://127.0.0.1:{free_port()},127.0.0.1:{free_port()}")
    with pytest.raises(BackendUnavailable, match="lock 'a': ConnectionRefusedError") as caught:
        Lock(store, "a", wait=wait).acquire()
    assert isinstance(caught.value.__cause__, OSError)


def test_server_that_is_not_etcd_is_named_as_such(redis_server: Server) -> None:
    with pytest.raises(BackendUnavailable, match="lock 'a'"):
        Lock(connect(f"etcd://127.0.0.1:{redis_server.port}"), "a", wait=0).acquire()


@pytest.mark.parametrize(
    "url",
    [
        "etcd://", "etcd://:2379", "etcd://a:0", "etcd://a:66000", "etcd://a:b", "etcd://a,,b", "etcd://a,a",
        "etcd://a/path", "etcd://a?x=1", f"etcd://app:{SECRET}@a", f"etcd://app:{QUOTED}@a,a", "etcd://app@a",
    ],
)  # fmt: skip
def test_bad_url_is_refused_and_shows_no_password(url: str) -> None:
    with pytest.raises(ValueError, match="etcd URL") as caught:
        connect(url)
    assert "s3cr3t" not in str(caught.value)
    assert "s3cr3t" not in str(caught.value.__context__ or "")


@pytest.fixture(scope="module")
def encrypted(servers_directory: Path) -> Iterator[tuple[str, ssl.SSLContext]]:
    authority, directory = trustme.CA(), servers_directory / "etcd-tls"
    directory.mkdir()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    files = ["--cert-file", str(directory / "cert.pem"), "--key-file", str(directory / "key.pem")]
    etcd = make(directory, 1, *files)
    (member,) = etcd.members
    member.command = [
        part.replace("http://", "https://") if ":" + str(member.port) in part else part for part in member.command
    ]
    member.ready = "serving client requests"
    member.start()
    yield etcd.url.replace("etcd://127.0.0.1", "etcds://localhost"), context
    member.stop()


def test_lock_is_held_over_tls_by_threads(encrypted: tuple[str, ssl.SSLContext]) -> None:
    url, trust = encrypted
    use_all_of(connect(url, tls=trust))


async def test_lock_is_held_over_tls_by_tasks(encrypted: tuple[str, ssl.SSLContext]) -> None:
    async with AsyncLock(connect(encrypted[0], tls=encrypted[1]), "a") as lease:
        assert not lease.lost


def test_server_with_a_certificate_that_nobody_trusts_is_unavailable(encrypted: tuple[str, ssl.SSLContext]) -> None:
    with pytest.raises(BackendUnavailable, match="certificate verify failed"):
        Lock(connect(encrypted[0]), "a", wait=0).acquire()
