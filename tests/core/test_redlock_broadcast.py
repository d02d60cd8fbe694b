"""Connections that threads share never block, and a dead one is dropped before it is used."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from dlock_core.backends.redis.transport import pack_commands
from dlock_core.backends.redlock import broadcast
from dlock_core.backends.redlock.broadcast import INCOMPLETE, NodeConnections, idle_connections


class Peer:
    """A node, with its end of our connection."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair()
        self.connection = redis.Connection()
        self.connection._sock, self.connection.dlock_reader = ours, None
        self.connection._parser.on_connect(self.connection)
        self.dropped: list[Any] = []
        self.threads = SimpleNamespace(discard=self.discard)

    def discard(self, connection: Any) -> None:
        self.dropped.append(connection)
        connection.disconnect()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    peers = [Peer() for _ in range(3)]
    yield peers
    for peer in peers:
        peer.socket.close()
        peer.connection.disconnect()


def joined(peers: list[Peer], connections: NodeConnections) -> NodeConnections:
    for index, peer in enumerate(peers):
        connections.add(index, peer.connection)
    return connections


@pytest.fixture
def connections(peers: list[Peer]) -> NodeConnections:
    return joined(peers, NodeConnections(peers))  # type: ignore[arg-type]


def test_reply_is_given_when_all_of_it_is_here_and_nobody_waits_for_the_rest(
    peers: list[Peer], connections: NodeConnections
) -> None:
    connections.send(1, pack_commands([("PING",)]))
    assert peers[1].socket.recv(100) == pack_commands([("PING",)])
    assert connections.read(1) is INCOMPLETE
    peers[1].socket.sendall(b"$4\r\nPO")
    assert connections.read(1) is INCOMPLETE
    peers[1].socket.sendall(b"NG\r\n")
    assert connections.read(1) == b"PONG"


def test_node_that_hung_up_is_an_error_and_no_reply(peers: list[Peer], connections: NodeConnections) -> None:
    peers[0].socket.close()
    with pytest.raises(redis.ConnectionError):
        connections.read(0)


def test_what_was_closed_or_spoke_unasked_while_idle_is_dropped_and_the_others_are_kept(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "TRUSTED_IDLE_S", 0.0)
    pool = idle_connections()
    connections = joined(peers, NodeConnections(peers))
    pool.put(connections)
    peers[0].socket.close()
    peers[2].socket.sendall(b"+late\r\n")
    assert pool.take() is connections
    assert [connections.has(index) for index in range(3)] == [False, True, False]
    assert [len(peer.dropped) for peer in peers] == [1, 0, 1]


def test_closing_drops_every_connection(peers: list[Peer]) -> None:
    pool = idle_connections()
    pool.put(joined(peers, NodeConnections(peers)))
    pool.clear()
    assert [peer.dropped for peer in peers] == [[peer.connection] for peer in peers]
