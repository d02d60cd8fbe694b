"""What the ZooKeeper store decides without a server: its URLs, its paths, and the order of a queue."""

import select
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from dlock_core import connect
from dlock_core.backends.zookeeper.backend import ZooKeeperBackend
from dlock_core.backends.zookeeper.connection import Handler, Stream
from dlock_core.backends.zookeeper.nodes import Queue, component, name_of, parse_queue
from dlock_core.backends.zookeeper.session import read_url
from dlock_core.errors import NotSupported
from dlock_core.names import canonical, join

SECRET = "hunter2"
ALICE, BOB, CAROL = ("a" * 32, "b" * 32, "c" * 32)


@pytest.mark.parametrize(
    ("url", "hosts", "chroot", "credential"),
    [
        ("zookeeper://h1", "h1:2181", (), ""),
        ("zookeeper://h1:1,h2,h3:3/apps/shop", "h1:1,h2:2181,h3:3", ("apps", "shop"), ""),
        ("zookeeper://h1/", "h1:2181", (), ""),
        ("zookeeper://[::1]:2182,127.0.0.1/a", "[::1]:2182,127.0.0.1:2181", ("a",), ""),
        ("zookeeper://app:a%40%3A%2Fb@h1", "h1:2181", (), "app:a@:/b"),
    ],
)
def test_url_names_servers_chroot_and_credential(url: str, hosts: str, chroot: tuple[str, ...], credential: str):
    assert read_url(url) == (hosts, chroot, credential)


@pytest.mark.parametrize(
    "rest",
    ["", "h:port", "h:0", "h:99999", "h1,,h2", "h1, h2", "h//a", "h/../a", "h/.", "h?timeout=1", "h#1", "/a", "u@h"],
)
def test_bad_url_is_refused_and_no_part_of_the_password_is_told(rest: str):
    for url in (f"zookeeper://{rest}", f"zookeeper://u:{SECRET}@{rest}", f"zookeeper://u:{SECRET}/x@{rest}"):
        with pytest.raises(ValueError, match="bad ZooKeeper URL") as caught:
            connect(url)
        assert SECRET not in str(caught.value)
    assert SECRET not in repr(read_url(f"zookeeper://u:{SECRET}@h"))


@pytest.mark.parametrize(
    "options",
    [{"session": float("inf")}, {"session": "9"}, {"prefix": ""}, {"prefix": "a/b"}],
)
def test_bad_option_is_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match=r"session|prefix"):
        connect("zookeeper://h", **options)


def test_platform_without_poll_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(select, "poll")
    with pytest.raises(NotSupported, match=r"needs select\.poll"):
        connect("zookeeper://localhost")


def test_backend_that_was_only_made_has_no_connection_and_no_thread():
    backend = connect("zookeeper://localhost:1")
    assert isinstance(backend, ZooKeeperBackend)
    assert backend._session._kazoo is None
    backend.close()


@pytest.mark.parametrize(
    "name", ["order:42", join("a/b"), join(".."), join("."), "...", join("注文"), canonical("%2E"), "x" * 512]
)
def test_component_of_a_path_is_safe_and_gives_the_name_back(name: str):
    part = component(name)
    assert "/" not in part
    assert part not in {".", ".."}
    assert name_of(part) == name


def node(mode: str, holder: str, order: int) -> str:
    return f"{mode}-{holder}-{order:010d}"


def names(queue: Queue) -> list[str]:
    return [one.name for one in queue.nodes]


def test_queue_is_in_the_order_of_creation_and_ignores_what_is_not_ours():
    late, early = node("x", ALICE, 12), node("s", BOB, 9)
    queue = parse_queue([late, "lock-0000000001", "f-7", early, f"x-{CAROL}-1"])
    assert names(queue) == [early, late]
    assert queue.offset == 7


def test_queue_stays_in_order_when_the_numbers_begin_again():
    """ZooKeeper's sequence numbers are signed and have 32 bits."""
    turn = [node("x", ALICE, 2**31 - 2), node("x", BOB, 2**31 - 1), node("x", CAROL, -(2**31))]
    assert names(parse_queue(turn[::-1])) == turn
    zero = [node("x", ALICE, -2), node("x", BOB, -1), node("x", CAROL, 0)]
    assert names(parse_queue(zero[::-1])) == zero


@pytest.mark.parametrize(
    ("modes", "inside", "watched"),
    [
        ("x", 1, [None]),
        ("xx", 1, [None, 0]),
        ("xxx", 1, [None, 0, 1]),
        ("ss", 2, [None, None]),
        ("ssx", 2, [None, None, 1]),
        ("sxs", 1, [None, 0, 1]),
        ("xss", 1, [None, 0, 0]),
        ("sxsxs", 1, [None, 0, 1, 2, 3]),
    ],
)
def test_everybody_waits_for_the_nearest_one_that_keeps_it_out(modes: str, inside: int, watched: list[int | None]):
    queue = parse_queue([node(mode, f"{number:032x}", number) for number, mode in enumerate(modes)])
    assert len(queue.holders()) == inside
    assert queue.holders() + queue.waiters() == queue.nodes
    ahead = [queue.ahead(one, shared=one.shared) for one in queue.nodes]
    assert ahead == [None if number is None else queue.nodes[number] for number in watched]


def test_newcomer_comes_in_only_where_nobody_keeps_it_out():
    assert parse_queue([]).ahead(None, shared=False) is None
    reading = parse_queue([node("s", ALICE, 1)])
    assert reading.ahead(None, shared=True) is None
    assert reading.ahead(None, shared=False) is not None
    waited_for = parse_queue([node("s", ALICE, 1), node("x", BOB, 2)])
    assert waited_for.ahead(None, shared=True) is not None


@pytest.fixture
def ends() -> Iterator[tuple[Stream, socket.socket]]:
    """Our end of a connection, as kazoo uses it, and the server's."""
    plain, server = socket.socketpair()
    with closing(Stream(plain, 0.01)) as stream, closing(server):
        stream.setblocking(False)
        server.setblocking(False)
        yield stream, server


def test_requests_that_are_queued_together_are_sent_together(ends: tuple[Stream, socket.socket]):
    stream, server = ends
    queue = deque(["create", "list"])
    stream.hold_for(queue)
    assert stream.send(b"create") == 6
    with pytest.raises(BlockingIOError):
        server.recv(64)
    queue.popleft()
    assert stream.send(b"list") == 4
    assert server.recv(64) == b"createlist"


def test_server_that_takes_nothing_is_an_error(ends: tuple[Stream, socket.socket]):
    stream, server = ends
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with pytest.raises(TimeoutError):
        stream.send(bytes(1 << 22))
    assert set(server.recv(1 << 22)) == {0}


def test_answers_that_came_together_are_taken_one_by_one_and_then_the_end_is_seen(ends: tuple[Stream, socket.socket]):
    stream, server = ends
    server.sendall(b"onetwo")
    for part in (b"one", b"two", b""):
        assert Handler(1.0).select([stream], [], [], 1.0)[0] == [stream]
        assert stream.recv(3) == part
        if part == b"two":
            server.close()


def test_silent_server_is_not_waited_for_longer_than_the_limit(ends: tuple[Stream, socket.socket]):
    assert Handler(0.01).select([ends[0]], [], [], 60.0)[0] == []


@pytest.mark.parametrize("spoiled", ["f-", "f-text", "f--5", "f-1e300", "f-nan", "f-" + "9" * 19, "f-٤٢"])
def test_mark_that_is_damaged_counts_for_nothing(spoiled: str) -> None:
    assert parse_queue([spoiled, "f-7"]).offset == 7
    assert parse_queue([spoiled]).offset == 0
