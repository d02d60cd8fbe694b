"""The proxy breaks exactly what it is asked to break. A counter in Redis shows whether a request was executed."""

import socket
from collections.abc import Iterator
from typing import Self

import pytest

from tests.proxy import Proxy
from tests.servers import Server


class Client:
    """One raw connection: each command is sent in one piece, which counts as one request."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.socket.close()

    def send(self, command: str) -> None:
        self.socket.sendall(command.encode() + b"\r\n")

    def ask(self, command: str) -> str:
        self.send(command)
        return self.hear()

    def hear(self) -> str:
        return self.socket.recv(4096).decode().strip()

    def hears_nothing(self) -> bool:
        self.socket.settimeout(0.05)
        try:
            self.socket.recv(1)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(30)
        return False


@pytest.fixture
def proxy(redis_server: Server) -> Iterator[Proxy]:
    with Client(redis_server.port) as direct, Proxy(redis_server.port) as proxy:
        direct.ask("DEL n")
        yield proxy


@pytest.fixture
def direct(redis_server: Server) -> Iterator[Client]:
    with Client(redis_server.port) as client:
        yield client


@pytest.fixture
def client(proxy: Proxy) -> Iterator[Client]:
    with Client(proxy.port) as client:
        yield client


def test_good_network_forwards_and_counts(proxy, client):
    assert [client.ask("INCR n") for _ in range(3)] == [":1", ":2", ":3"]
    assert proxy.requests == 3


def test_last_words_of_the_server_are_delivered(client):
    assert client.ask("QUIT") == "+OK"
    assert client.hear() == ""


def test_dropped_reply_means_executed_and_silent(proxy, client, direct):
    fault = proxy.drop_reply(2)
    assert client.ask("INCR n") == ":1"
    assert not fault.happened
    client.send("INCR n")
    fault.wait()
    assert direct.ask("GET n") == "$1\r\n2"
    assert client.hears_nothing()


def test_after_a_dropped_reply_other_connections_are_fine(proxy, client):
    fault = proxy.drop_reply()
    client.send("INCR n")
    fault.wait()
    with Client(proxy.port) as next_client:
        assert next_client.ask("INCR n") == ":2"


def test_cut_reply_means_executed_and_reset(proxy, client, direct):
    proxy.cut_reply()
    client.send("INCR n")
    with pytest.raises(ConnectionResetError):
        client.hear()
    assert direct.ask("GET n") == "$1\r\n1"


def test_cut_request_means_not_executed_and_reset(proxy, client, direct):
    proxy.cut_request()
    client.send("INCR n")
    with pytest.raises(ConnectionResetError):
        client.hear()
    assert direct.ask("EXISTS n") == ":0"


def test_held_reply_means_executed_and_late(proxy, client, direct):
    fault = proxy.hold_reply()
    client.send("INCR n")
    fault.wait()
    assert direct.ask("GET n") == "$1\r\n1"
    assert client.hears_nothing()
    fault.release()
    assert client.hear() == ":1"


def test_held_request_is_executed_late_even_if_its_client_has_left(proxy, direct):
    fault = proxy.hold_request()
    with Client(proxy.port) as client:
        client.send("LPUSH n x")
        fault.wait()
    assert direct.ask("EXISTS n") == ":0"
    direct.send("BLPOP n 30")
    fault.release()
    assert direct.hear().endswith("x")


def test_fault_hits_only_requests_that_match(proxy, client):
    fault = proxy.cut_reply(2, matching=b"INCR")
    assert client.ask("INCR n") == ":1"
    assert client.ask("PING") == "+PONG"
    client.send("INCR n")
    fault.wait()


def test_deaf_network_answers_nothing_until_it_hears_again(proxy, client):
    assert client.ask("INCR n") == ":1"
    proxy.deaf()
    client.send("INCR n")
    with Client(proxy.port) as newcomer:
        newcomer.send("PING")
        assert newcomer.hears_nothing()
        assert client.hears_nothing()
        proxy.forward()
        assert newcomer.hear() == "+PONG"
        assert client.hear() == ":2"


def test_refused_until_it_forwards_again(proxy, client):
    assert client.ask("PING") == "+PONG"
    proxy.refuse()
    with pytest.raises(ConnectionResetError):
        client.hear()
    with pytest.raises(ConnectionRefusedError):
        Client(proxy.port)
    proxy.forward()
    with Client(proxy.port) as newcomer:
        assert newcomer.ask("PING") == "+PONG"


def test_cut_resets_what_is_connected_and_takes_new_connections(proxy, client):
    assert client.ask("PING") == "+PONG"
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        client.hear()
    with Client(proxy.port) as newcomer:
        assert newcomer.ask("PING") == "+PONG"


def test_fault_that_does_not_happen_is_said_so(proxy):
    fault = proxy.drop_reply()
    with pytest.raises(TimeoutError, match="did not happen"):
        fault.wait(within=0.01)
