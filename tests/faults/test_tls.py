"""With rediss:// the lease commands are sent over TLS, and an untrusted certificate is refused."""

from __future__ import annotations

import asyncio

import pytest
import trustme

from dlock_core import AsyncLock, BackendUnavailable, Lock, connect
from dlock_core.runtime import ASYNCIO
from tests import servers


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path_factory.mktemp("ca") / "ca.pem")
    return authority


@pytest.fixture(scope="module")
def server(authority, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(directory / "cert.pem")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    port = servers.free_port()
    options = [f"--tls-port={port}", f"--tls-cert-file={directory}/cert.pem", f"--tls-key-file={directory}/key.pem"]
    options += [f"--tls-ca-cert-file={directory}/ca.pem", "--tls-auth-clients=no"]
    server = servers.redis(directory / "redis", *[part for option in options for part in option.split("=", 1)])
    server.url = f"rediss://localhost:{port}?ssl_ca_certs={directory}/ca.pem"
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def tls_url(server):
    return server.url, server.url.partition("?")[0]


def test_lock_is_held_over_tls_by_threads(tls_url):
    backend = connect(tls_url[0])
    with Lock(backend, "order:42") as lease:
        lease.renew()
        assert lease.token > 0


async def test_lock_is_held_over_tls_by_tasks(tls_url):
    async with AsyncLock(connect(tls_url[0]), "order:42") as lease:
        assert not lease.lost


def test_connection_ends_with_its_loop_though_the_server_does_not_say_goodbye(server):
    """An orderly close of a TLS connection waits for the server's close message as long as the loop runs."""
    backend = connect(server.url)

    async def hold_once():
        async with AsyncLock(backend, "order:42"):
            pass
        connection = backend.transport(ASYNCIO).checkout()
        backend.transport(ASYNCIO).checkin(connection)
        server.pause()
        return connection._writer.get_extra_info("socket")

    try:
        assert asyncio.run(hold_once()).fileno() == -1
    finally:
        server.resume()


def test_server_with_a_certificate_that_nobody_trusts_is_unavailable(tls_url):
    with pytest.raises(BackendUnavailable, match="certificate verify failed"):
        Lock(connect(tls_url[1]), "order:42", wait=0).acquire()
