"""The parts of the etcd backend that need no etcd: URLs, spare leases, who holds and who waits."""

import os

import pytest

from dlock_core.backends.etcd import backend
from dlock_core.backends.etcd.connections import read_url
from dlock_core.backends.etcd.keys import Keys, StoredKey
from dlock_core.backends.etcd.steps import MAX_SPARES_PER_TTL, ServerLease, Spares
from dlock_core.backends.etcd.transport import Member


def test_url_names_members_and_credentials() -> None:
    found = read_url("etcd://app:p%40ss%3A@a:1,b,[::1]:3")
    assert found.members == (Member("a", 1), Member("b", 2379), Member("::1", 3))
    assert (found.user, found.password, found.is_encrypted) == ("app", "p@ss:", False)
    assert read_url("etcds://a/").is_encrypted
    assert str(found.members[2]) == "[::1]:3"


def test_spare_lease_is_used_again_only_while_it_is_nearly_new() -> None:
    spares = Spares()
    spares.give(ServerLease(1, 8, until=8.0, is_known=True))
    assert spares.take(9, 0.5) is None
    found = spares.take(8, 0.5)
    assert found is not None
    assert spares.take(8, 0.5) is None
    spares.give(found)
    assert spares.take(8, 1.5) is None


def test_lease_that_may_not_exist_or_lasts_long_is_no_spare() -> None:
    spares = Spares()
    spares.give(ServerLease(1, 8, until=8.0))
    spares.give(ServerLease(2, 3600, until=3600.0, is_known=True))
    assert spares.take(8, 0.0) is None
    assert spares.take(3600, 0.0) is None
    for number in range(2 * MAX_SPARES_PER_TTL):
        spares.give(ServerLease(number, 8, until=8.0, is_known=True))
    assert sum(spares.take(8, 0.0) is not None for _ in range(2 * MAX_SPARES_PER_TTL)) == MAX_SPARES_PER_TTL


def test_forked_child_does_not_use_its_parents_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    spares = Spares()
    spares.give(ServerLease(1, 8, until=8.0, is_known=True))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert spares.take(8, 0.0) is None


@pytest.mark.parametrize(
    ("line", "inside"), [("", 0), ("x", 1), ("xx", 1), ("xs", 1), ("s", 1), ("sss", 3), ("ssxs", 2), ("xsss", 1)]
)
def test_oldest_holds_and_those_that_share_with_it(line: str, inside: int) -> None:
    names = Keys("p/")
    entries = [StoredKey(f"p/lock/a/{mode}/{number}", "me", number + 1, 7) for number, mode in enumerate(line)]
    queues = backend.by_lock(names, reversed(entries))
    state = backend.state(names, "a", queues.get("a", []), 100, {7: 3.0})
    assert [holder.token for holder in state.holders] == [101 + number for number in range(inside)]
    assert [waiter.holder for waiter in state.waiters] == [str(number) for number in range(inside, len(line))]
    assert all(holder.expires_in == 3.0 for holder in state.holders)
