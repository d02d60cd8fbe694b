"""The parts of Redis Cluster that need no server: its URL, the spread of names over slots, the map of slots."""

import secrets
from collections import Counter
from typing import Any

import pytest
import redis
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from dlock_core import connect
from dlock_core.backend import Busy, Granted
from dlock_core.backends.redis import addresses
from dlock_core.backends.redis.cluster import SHARD_COUNT, ClusterBackend
from dlock_core.backends.redis.cluster_routing import (
    SLOTS,
    ClusterCommand,
    ClusterNode,
    SlotMap,
    SlotTransport,
    pipeline,
    slot_of,
)
from dlock_core.errors import BackendUnavailable
from dlock_core.leases.acquisition import new_request
from dlock_core.options import LockOptions
from dlock_core.runtime import BLOCKING, run
from tests import servers

SECRET = "hunter2"


@pytest.fixture
def backend() -> ClusterBackend:
    return ClusterBackend.from_url("redis+cluster://localhost")


@pytest.fixture
def slots() -> SlotMap:
    return SlotMap(addresses.seeds_from_url("redis+cluster://first:1,second:2"), 0.1)


def learn(slots: SlotMap, *ranges: list[Any]) -> None:
    slots._update(ranges, slots._node(("first", 1)))


def owner(slots: SlotMap, slot: int) -> str:
    slots._is_outdated = False
    return run(slots.master_of(BLOCKING, slot, 0)).title


def test_slot_of_a_tag_is_that_of_the_cluster() -> None:
    for tag in ("123456789", "", "00000000", "ü", secrets.token_hex(8)):
        assert slot_of(tag) == key_slot(tag.encode())


def test_every_key_of_a_name_has_the_slot_of_its_part(backend: ClusterBackend) -> None:
    for name in ("a", "order:42", "a%7Bb%7D", "x" * 512):
        shard = backend.shard(name)
        keys = (*shard.keyspace.of(name), f"{shard.lock_key(name)}:q", f"{shard.lock_key(name)}:wake:{'f' * 32}")
        assert {key_slot(key.encode()) for key in keys} == {shard.slot.number}
        assert backend.lock_key(name) == keys[0]
        assert shard.keyspace.names_of([keys[0].encode()]) == [name]


def test_slots_of_the_parts_are_spread_evenly(backend: ClusterBackend) -> None:
    slots = [shard.slot.number for shard in backend._shards]
    assert len(set(slots)) == SHARD_COUNT == 256
    for nodes in (2, 4, 8, 16, 32, 64):
        assert set(Counter(slot * nodes // SLOTS for slot in slots).values()) == {SHARD_COUNT // nodes}


def test_names_are_spread_evenly_over_the_parts(backend: ClusterBackend) -> None:
    found = Counter(backend.lock_key(f"order:{number}").partition("}")[0] for number in range(100_000))
    assert len(found) == SHARD_COUNT
    assert max(found.values()) < 2 * min(found.values())


@pytest.mark.parametrize(
    "url", ["redis+cluster://a", "redis+cluster://a:1,b:2,[::1]:3/", "rediss+cluster://u:p@a,b?ssl_cert_reqs=none"]
)
def test_url_gives_a_store(url: str) -> None:
    assert isinstance(connect(url, timeout=1.0, prefix="p:"), ClusterBackend)


def test_url_is_read_with_all_that_it_says() -> None:
    seeds = addresses.seeds_from_url("rediss+cluster://shop:s3c%2Fret@a,b:2,[::1]:3/?ssl_ca_certs=/ca.pem")
    assert seeds.addresses == [("a", 6379), ("b", 2), ("::1", 3)]
    given = seeds.pool(("c", 4)).connection_kwargs
    assert (given["host"], given["port"], given["username"], given["password"]) == ("c", 4, "shop", "s3c/ret")
    assert (seeds.kind, given["ssl_ca_certs"]) == (redis.SSLConnection, "/ca.pem")


@pytest.mark.parametrize(
    "url",
    [
        "redis+cluster://", f"redis+cluster://:{SECRET}@", f"redis+cluster://:{SECRET}@a,,b", f"redis+cluster://:{SECRET}@a:b",
        f"redis+cluster://:{SECRET}@a:99999", f"redis+cluster://:{SECRET}@a/1", f"redis+cluster://:{SECRET}/x@a",
        f"redis+cluster://:{SECRET},@a", f"redis+cluster://:{SECRET}@a?socket_timeout=soon", f"redis+cluster://:{SECRET}@a?protocol=9",
    ],
)  # fmt: skip
def test_bad_url_is_refused_and_no_part_of_the_password_is_told(url: str) -> None:
    with pytest.raises(ValueError, match=r"Redis") as caught:
        connect(url)
    assert SECRET not in f"{caught.value}{caught.value.__context__ if not caught.value.__suppress_context__ else ''}"


def test_what_is_no_cluster_client_is_refused() -> None:
    with pytest.raises(TypeError, match="Redis"):
        ClusterBackend(redis.Redis())


def test_map_says_who_has_a_slot(slots: SlotMap) -> None:
    learn(slots, [0, 9, ["a", 1, b"id"], ["b", 2, b"id"]], [10, SLOTS - 1, [b"c", 3, b"id", []]])
    assert [owner(slots, slot) for slot in (0, 9, 10, SLOTS - 1)] == ["a:1", "a:1", "c:3", "c:3"]
    assert [node.title for node in slots.masters()] == ["a:1", "c:3"]


@pytest.mark.parametrize("host", [None, "", b""])
def test_node_without_an_address_is_where_it_was_told_of(slots: SlotMap, host: Any) -> None:
    learn(slots, [0, SLOTS - 1, [host, 7, b"id"]])
    assert owner(slots, 5) == "first:7"
    assert slots.record_move(5, MovedError("5 :8"), slots._node(("a", 1))).title == "a:8"


def test_correction_counts_at_once_and_for_its_slot_alone(slots: SlotMap) -> None:
    learn(slots, [0, SLOTS - 1, ["a", 1, b"id"]])
    told = slots._node(("a", 1))
    assert slots.node_at(AskError("5 b:2"), told).title == "b:2"
    assert owner(slots, 5) == "a:1"
    slots.record_move(5, MovedError("5 b:2"), told)
    assert [owner(slots, slot) for slot in (4, 5, 6)] == ["a:1", "b:2", "a:1"]


def test_nodes_that_left_are_forgotten_and_the_first_ones_are_not(slots: SlotMap) -> None:
    learn(slots, [0, SLOTS - 1, ["a", 1, b"id"], ["b", 2, b"id"]])
    learn(slots, [0, SLOTS - 1, ["c", 3, b"id"]])
    assert {node.title for node in slots._candidates()} == {"first:1", "second:2", "c:3"}


def test_node_that_failed_is_asked_last(slots: SlotMap) -> None:
    learn(slots, [0, SLOTS - 1, ["a", 1, b"id"], ["b", 2, b"id"]])
    failed = slots._node(("a", 1))
    failed.failed_at = 1.0
    assert slots._candidates()[-1] is failed


def test_nodes_that_are_silent_share_the_time_of_one_request(slots: SlotMap, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(slots, [0, 8000, *[[f"a{number}", 1, b"id"] for number in range(6)]])
    runtime = Turned()

    async def send_commands(node: ClusterNode, runtime: Turned, name: str, commands: Any, limit: float) -> list[Any]:
        runtime.time += limit
        raise BackendUnavailable("", reason=f"{node.title}: silent")

    monkeypatch.setattr(ClusterNode, "send_commands", send_commands)
    with pytest.raises(RedisError, match="first:1: silent"):
        run(slots.master_of(runtime, 9000, runtime.time + 0.1))  # type: ignore[arg-type]
    assert runtime.time <= 1000.11


def test_node_that_failed_is_asked_after_the_others_and_holds_up_none_of_them(
    backend: ClusterBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request to all shards keeps the answers of the other nodes, and marks the map as outdated."""
    slots, asked = backend._slots, list[str]()
    first = backend._shards[0].slot.number
    learn(slots, [0, SLOTS - 1, ["well", 2, b"id"]], [first, first, ["ill", 1, b"id"]])
    slots._is_outdated, slots._node(("ill", 1)).failed_at = False, 1.0

    async def send_commands(node: ClusterNode, runtime: Any, name: str, commands: Any, limit: float) -> list[Any]:
        asked.append(node.title)
        if node.title == "ill:1":
            raise BackendUnavailable("", reason="ill")
        return [7] * len(commands)

    monkeypatch.setattr(ClusterNode, "send_commands", send_commands)
    questions = [ClusterCommand(shard.slot, ("ZCARD", shard.keyspace.held_locks)) for shard in backend._shards]
    answers = run(pipeline(slots, BLOCKING, "", questions, 1.0))
    assert asked == ["well:2", "ill:1"]
    assert [answer == 7 for answer in answers] == [shard.slot.number != first for shard in backend._shards]
    assert slots._is_outdated


class Turned:
    """A clock that is advanced by hand."""

    time = 1000.0

    def now(self) -> float:
        return self.time


def test_address_that_is_reached_elsewhere_is_replaced() -> None:
    seeds = addresses.seeds_from_url("redis+cluster://first:1")._replace(remap=lambda where: ("near", where[1] + 1))
    slots = SlotMap(seeds, 0.1)
    learn(slots, [0, SLOTS - 1, ["a", 1, b"id"]])
    assert owner(slots, 5) == "near:2"
    assert [node.title for node in slots._candidates()][-1] in {"first:1", "near:2"}


def scripted(backend: ClusterBackend, *answers: Any) -> list[bool]:
    """Script the answers of the nodes; the list that it returns tells which requests were sent with ASKING."""
    asked: list[bool] = []
    told = iter(answers)

    async def send(
        runtime: Any, node: Any, data: Any, replies: int, until: float, nudge_after: float, *, asking: bool
    ) -> list[Any]:
        asked.append(asking)
        return [answer] if not isinstance(answer := next(told), list) else answer

    learn(backend._slots, [0, SLOTS - 1, ["a", 1, b"id"]])
    backend._slots._is_outdated = False
    backend.shard("a").slot._send = send  # type: ignore[method-assign]
    return asked


REQUEST = new_request("a", LockOptions(30.0, 0.0))


def test_slot_that_moves_is_asked_for_until_it_has_arrived(backend: ClusterBackend) -> None:
    asked = scripted(
        backend, AskError("5 b:2"), TryAgainError("not yet"), TryAgainError("not yet"), MovedError("5 b:2"), 17
    )
    assert run(backend.try_acquire(BLOCKING, REQUEST)) == Granted(17, 30.0)
    assert asked == [False, True, False, False, False]
    assert owner(backend._slots, backend.shard("a").slot.number) == "b:2"


def test_slot_that_does_not_arrive_is_unavailable(backend: ClusterBackend) -> None:
    asked = scripted(backend, *[TryAgainError("not yet")] * 1000)
    with pytest.raises(BackendUnavailable, match="not yet") as caught:
        run(backend.try_acquire(BLOCKING, REQUEST))
    assert not caught.value.refused
    assert len(asked) > 3


def test_nodes_that_point_at_each_other_are_given_up_in_time() -> None:
    backend = ClusterBackend.from_url("redis+cluster://localhost", timeout=0.1)
    scripted(backend, *[MovedError("5 b:2"), MovedError("5 a:1")] * 1000)
    slot = backend.shard("a").slot
    send = slot._send

    async def in_time(
        runtime: Any, node: Any, data: Any, replies: int, until: float, nudge_after: float, *, asking: bool
    ) -> list[Any]:
        if runtime.now() >= until:
            return await SlotTransport._send(slot, runtime, node, data, replies, until, nudge_after, asking=asking)
        return await send(runtime, node, data, replies, until, nudge_after, asking=asking)

    slot._send = in_time  # type: ignore[method-assign]
    with pytest.raises(BackendUnavailable, match="is moving, and no node"):
        run(backend.try_acquire(BLOCKING, REQUEST))


@pytest.mark.parametrize("woken", [
    ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed"),
    MovedError("5 b:2"), AskError("5 b:2"), ClusterDownError("The cluster is down"),
])  # fmt: skip
def test_waiter_whose_slot_leaves_asks_again_at_once(backend: ClusterBackend, woken: Exception) -> None:
    scripted(backend, [woken, MovedError("5 b:2")])
    assert run(backend.wait(BLOCKING, REQUEST, Busy(1.0, "", "ticket"), 1.0)) is None


@pytest.mark.parametrize(
    "woken", [NoPermissionError("no BLPOP for you"), ResponseError("OOM"), BusyLoadingError("loading")]
)
def test_waiter_who_cannot_sleep_at_all_is_told(backend: ClusterBackend, woken: Exception) -> None:
    scripted(backend, [woken, 17])
    with pytest.raises(BackendUnavailable):
        run(backend.wait(BLOCKING, REQUEST, Busy(1.0, "", "ticket"), 1.0))


def test_node_that_is_gone_may_be_one_of_an_old_map(backend: ClusterBackend) -> None:
    """It is worth asking again at once, because the map is read first."""
    port = servers.free_port()
    learn(backend._slots, [0, SLOTS - 1, ["127.0.0.1", port, b"id"]])
    backend._slots._is_outdated = False
    with pytest.raises(BackendUnavailable, match=f"127.0.0.1:{port}: ") as caught:
        run(backend.try_acquire(BLOCKING, REQUEST))
    assert caught.value.broken
    assert backend._slots._is_outdated


def test_slot_that_nobody_serves_is_unavailable(backend: ClusterBackend) -> None:
    """A cluster may be configured to go on with some of its slots unserved."""
    learn(backend._slots, [0, 0, ["a", 1, b"id"]])
    backend._slots._read = _nothing  # type: ignore[method-assign, assignment]
    with pytest.raises(BackendUnavailable, match="no node of the cluster serves slot"):
        run(backend.inspect(BLOCKING, "a"))


async def _nothing(runtime: Any, until: float) -> None:
    """Read the map and learn nothing new."""
