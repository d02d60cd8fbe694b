"""The parts of the etcd backend that need no etcd: HTTP, URLs, spare leases, who holds and who waits."""

import os

import pytest

from dlock_core.backends.etcd import backend, connections
from dlock_core.backends.etcd.connections import HTTPError, Member, Reader, Reply, post
from dlock_core.backends.etcd.keys import Entry, Keys
from dlock_core.backends.etcd.steps import KEPT, Lease, Spares

PLAIN = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\n{"a": 1}'
CHUNKED = b'HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n3\r\n 1}\r\n0\r\n\r\n'
TRAILED = b"HTTP/1.1 200 OK\r\nTrailer: T\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nT: a\r\nU: b\r\n\r\n"
STREAM = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7\r\n{"a":1}\r\n1\r\n\n\r\na\r\n{"a":2}\n{"\r\n6\r\na":3}\n\r\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_replies_come_whole_and_in_order_however_they_are_cut(size: int) -> None:
    reader, found = Reader(), []
    data = PLAIN + CHUNKED + TRAILED + PLAIN
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size])
        while (reply := reader.reply()) is not None:
            found.append(reply)
    assert found == [Reply(200, b'{"a": 1}'), Reply(404, b'{"a": 1}'), Reply(200, b"{}"), Reply(200, b'{"a": 1}')]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_of_a_stream_come_one_by_one_however_they_are_cut(size: int) -> None:
    reader, found = Reader(), []
    for start in range(0, len(STREAM), size):
        reader.feed(STREAM[start : start + size])
        while (line := reader.line()) is not None:
            found.append(line)
    assert found == [{"a": 1}, {"a": 2}, {"a": 3}]
    reader.feed(b"0\r\n\r\n")
    with pytest.raises(HTTPError, match="ended"):
        reader.line()


@pytest.mark.parametrize(
    "data",
    [b"-ERR wrong\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", CHUNKED.replace(b"5\r\n", b"x\r\n")],
)
def test_what_is_not_http_is_an_error(data: bytes) -> None:
    reader = Reader()
    reader.feed(data)
    with pytest.raises(HTTPError):
        reader.reply()


def test_stream_that_is_refused_is_an_error() -> None:
    reader = Reader()
    reader.feed(CHUNKED)
    with pytest.raises(HTTPError, match="404"):
        reader.line()


def test_request_has_its_length_and_the_permit() -> None:
    assert post("a:1", "/v3/x", b"{}", "token").endswith(b"Content-Length: 2\r\n\r\n{}")
    assert b"\r\nAuthorization: token\r\n" in post("a:1", "/v3/x", b"{}", "token")
    assert b"Authorization" not in post("a:1", "/v3/x", b"{}")


def test_url_names_members_and_credentials() -> None:
    found = connections.read("etcd://app:p%40ss%3A@a:1,b,[::1]:3")
    assert found.members == (Member("a", 1), Member("b", 2379), Member("::1", 3))
    assert (found.user, found.password, found.is_encrypted) == ("app", "p@ss:", False)
    assert connections.read("etcds://a/").is_encrypted
    assert str(found.members[2]) == "[::1]:3"


def test_spare_lease_is_used_again_only_while_it_is_nearly_new() -> None:
    spares = Spares()
    spares.give(Lease(1, 8, until=8.0, is_known=True))
    assert spares.take(9, 0.5) is None
    found = spares.take(8, 0.5)
    assert found is not None
    assert spares.take(8, 0.5) is None
    spares.give(found)
    assert spares.take(8, 1.5) is None


def test_lease_that_may_not_exist_or_lasts_long_is_no_spare() -> None:
    spares = Spares()
    spares.give(Lease(1, 8, until=8.0))
    spares.give(Lease(2, 3600, until=3600.0, is_known=True))
    assert spares.take(8, 0.0) is None
    assert spares.take(3600, 0.0) is None
    for number in range(2 * KEPT):
        spares.give(Lease(number, 8, until=8.0, is_known=True))
    assert sum(spares.take(8, 0.0) is not None for _ in range(2 * KEPT)) == KEPT


def test_forked_child_does_not_use_its_parents_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    spares = Spares()
    spares.give(Lease(1, 8, until=8.0, is_known=True))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert spares.take(8, 0.0) is None


@pytest.mark.parametrize(
    ("line", "inside"), [("", 0), ("x", 1), ("xx", 1), ("xs", 1), ("s", 1), ("sss", 3), ("ssxs", 2), ("xsss", 1)]
)
def test_oldest_holds_and_those_that_share_with_it(line: str, inside: int) -> None:
    names = Keys("p/")
    entries = [Entry(f"p/lock/a/{mode}/{number}", "me", number + 1, 7) for number, mode in enumerate(line)]
    lines = backend.by_lock(names, reversed(entries))
    state = backend.state(names, "a", lines.get("a", []), 100, {7: 3.0})
    assert [holder.token for holder in state.holders] == [101 + number for number in range(inside)]
    assert [waiter.holder for waiter in state.waiters] == [str(number) for number in range(inside, len(line))]
    assert all(holder.expires_in == 3.0 for holder in state.holders)
