"""The doctor measures real servers, and says what is unsafe."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db import connections
from rich.cells import cell_len

from django_dlock.inspect import databases
from dlock_core import connect
from dlock_core.backends.memory import MemoryBackend
from dlock_core.cli.listing import Report
from dlock_core.doctor import Finding, examine
from dlock_core.doctor.clocks import Sample, Timing, clock, clock_spread, round_trip, timing
from sqla_dlock.inspect import database as sqla_database
from tests import servers
from tests.cli.running import dlock
from tests.cli.snapshots import drawn
from tests.etcd_servers import cluster
from tests.redlock_nodes import masters, url_of
from tests.servers import Server


def examined(store: str | Any) -> list[Finding]:
    backend = connect(store) if isinstance(store, str) else store
    try:
        found = examine([("store", backend)])
    finally:
        backend.close()
    explained(found)
    return found


def explained(findings: list[Finding]) -> None:
    """Check that every finding that is not ok has a reason and a remedy."""
    for one in findings:
        assert one.level == "ok" or (one.reason and one.remedy), one


def levels(findings: list[Finding]) -> dict[str, str]:
    return {one.check: one.level for one in findings}


def of(findings: list[Finding], check: str, part: str = "") -> Finding:
    (found,) = [one for one in findings if one.check == check and one.part == part]
    return found


@contextmanager
def configured(server: Server, **settings: str) -> Iterator[None]:
    with redis.Redis(port=server.port, decode_responses=True) as client:
        before = {name: client.config_get(name)[name] for name in map(dashed, settings)}
        try:
            for name, value in settings.items():
                client.config_set(dashed(name), value)
            yield
        finally:
            for name, value in before.items():
                client.config_set(name, value)


def dashed(name: str) -> str:
    return name.replace("_", "-")


def test_redis_as_it_should_be_has_nothing_but_ok(any_redis):
    found = examined(any_redis.url)
    assert set(levels(found).values()) == {"ok"}
    assert of(found, "version").measured.startswith(("Redis ", "Valkey "))
    assert {one.source for one in found} == {"store"}
    ran = dlock("doctor", "--store", any_redis.url)
    assert (ran.code, ran.err) == (0, "")
    assert "noeviction" in ran.out


def test_redis_that_may_evict_leases_is_unsafe(redis_server):
    with configured(redis_server, maxmemory="100mb", maxmemory_policy="allkeys-lru"):
        one = of(examined(redis_server.url), "eviction")
        ran = dlock("doctor", "--store", redis_server.url)
    assert (one.level, "allkeys-lru" in one.measured, "noeviction" in one.remedy) == ("unsafe", True, True)
    assert (ran.code, ran.err) == (1, "1 of 8 findings are unsafe")


def test_redis_that_would_evict_if_it_had_a_limit_is_a_warning(redis_server):
    with configured(redis_server, maxmemory_policy="volatile-ttl"):
        assert of(examined(redis_server.url), "eviction").level == "warning"


def test_redis_that_forgets_at_a_restart_is_a_warning(redis_server):
    with configured(redis_server, appendonly="no"):
        assert of(examined(redis_server.url), "persistence").level == "warning"


def test_redis_that_is_nearly_full_is_a_warning(redis_server):
    with configured(redis_server, maxmemory="1mb"):
        assert of(examined(redis_server.url), "memory").level == "warning"


def test_replica_is_unsafe_and_a_primary_that_has_one_is_a_warning(redis_server, tmp_path):
    replica = servers.redis(tmp_path / "replica", "--replicaof", f"127.0.0.1 {redis_server.port}")
    replica.start()
    try:
        assert of(examined(replica.url), "replication").level == "unsafe"
        with redis.Redis(port=redis_server.port) as client:
            while client.info("replication")["connected_slaves"] == 0:
                client.ping()
        assert of(examined(redis_server.url), "replication").level == "warning"
    finally:
        replica.stop()


def test_user_who_may_not_ask_is_told_so(redis_server):
    with redis.Redis(port=redis_server.port) as client:
        client.execute_command("ACL", "SETUSER", "doc", "on", ">pw", "~*", "+time", "+ping")
        try:
            found = examined(f"redis://doc:pw@127.0.0.1:{redis_server.port}")
        finally:
            client.execute_command("ACL", "DELUSER", "doc")
    assert levels(found) == {"info": "warning", "round trip": "ok", "clock": "ok"}


def test_clock_is_compared_in_the_middle_of_the_shortest_round_trip():
    found = timing([Sample(100.0, 101.0, 90.0), Sample(200.0, 200.2, 203.1), Sample(300.0, 300.4, 303.3)])
    assert found == pytest.approx(Timing(0.4, 3.0, 0.1))


@pytest.mark.parametrize(
    ("offset", "precision", "level", "words"),
    [
        (0.2, 0.1, "ok", "200.0 ms ahead of this machine"),
        (-30, 0.1, "warning", "30.0 s behind this machine"),
        (1.5, 2.0, "ok", "ahead"),
    ],
)
def test_clock_counts_only_as_far_as_it_was_measured(offset, precision, level, words):
    one = clock(Timing(0.001, offset, precision), "why")
    assert (one.level, words in one.measured) == (level, True)


def test_clock_of_the_server_is_measured(redis_server, monkeypatch):
    from dlock_core.backends.redis import health

    monkeypatch.setattr(health, "wall", lambda: 60.0 + __import__("time").time())
    one = of(examined(redis_server.url), "clock")
    assert one.level == "warning"
    assert one.measured.startswith("60.0 s behind this machine")


def test_clocks_of_nodes_are_compared_with_each_other():
    near = [Timing(0.001, offset, 0.01) for offset in (500.0, 500.1, 500.2)]
    assert clock_spread(near).level == "ok"
    assert clock_spread([*near, Timing(0.001, 503.0, 0.01)]).level == "warning"


def test_long_round_trip_is_a_warning():
    assert [round_trip(seconds).level for seconds in (0.001, 0.2)] == ["ok", "warning"]


def test_redlock_is_examined_node_by_node(servers_directory):
    with masters(servers_directory / "doctor-redlock", 3) as nodes:
        assert set(levels(examined(url_of(nodes))).values()) == {"ok"}
        nodes[1].stop()
        found = examined(url_of(nodes))
        assert of(found, "majority").level == "warning"
        assert of(found, "reach", f"127.0.0.1:{nodes[1].port}").level == "warning"
        nodes[0].stop()
        assert of(examined(url_of(nodes)), "majority").level == "unsafe"


def test_etcd_is_examined(servers_directory):
    with cluster(servers_directory / "doctor-etcd") as etcd:
        found = examined(etcd.url)
        assert levels(found) == {
            "members": "warning", "round trip": "ok", "clock": "ok", "version": "ok", "leader": "ok", "size": "ok",
        }  # fmt: skip
        etcd.stop()
        assert levels(examined(etcd.url)) == {"reach": "unsafe"}


def test_alarm_of_etcd_is_unsafe():
    from dlock_core.backends.etcd.health import _alarms

    assert levels(_alarms([{"memberID": "1", "alarm": "NOSPACE"}])) == {"alarm": "unsafe"}


@pytest.fixture
def zookeeper_server(servers_directory: Path) -> Iterator[Server]:
    from tests import zookeeper_servers
    from tests.conftest import start

    yield from start(lambda: zookeeper_servers.zookeeper(servers_directory / "doctor-zookeeper"))


def test_zookeeper_is_examined(zookeeper_server):
    found = examined(f"zookeeper://127.0.0.1:{zookeeper_server.port}")
    assert of(found, "majority").level == "warning"
    assert of(found, "version", f"127.0.0.1:{zookeeper_server.port}").measured.startswith("ZooKeeper 3.")
    assert of(found, "role", f"127.0.0.1:{zookeeper_server.port}").measured == "standalone"


def test_store_in_one_process_is_unsafe():
    assert levels(examined("memory://")) == {"scope": "unsafe"}


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cr3t@localhost:1",
        "redlock://:s3cr3t@localhost:1,localhost:2,localhost:3",
        "etcd://u:s3cr3t@localhost:1",
    ],
)
def test_store_that_is_down_is_a_finding_without_its_password(url):
    found = examined(url)
    assert "unsafe" in levels(found).values()
    assert "s3cr3t" not in str(found)


class ThirdParty(MemoryBackend):
    diagnose = None
    del diagnose

    def __getattribute__(self, name: str) -> Any:
        if name == "diagnose":
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_store_that_cannot_be_examined_is_asked_for_a_lock_nobody_has():
    assert levels(examined(ThirdParty())) == {"reach": "ok", "round trip": "ok"}


def test_examination_that_breaks_is_a_warning_and_the_others_go_on():
    class Broken(MemoryBackend):
        async def diagnose(self, runtime: Any) -> list[Finding]:
            raise KeyError("s3cr3t")

    found = examine([("broken", Broken()), ("memory", MemoryBackend())])
    assert [(one.source, one.check, one.level) for one in found] == [
        ("broken", "reach", "warning"), ("memory", "scope", "unsafe"),
    ]  # fmt: skip
    assert "s3cr3t" not in str(found)


@pytest.fixture
def look(database) -> Callable[[], list[Finding]]:
    def run() -> list[Finding]:
        (reader,) = databases([database])
        try:
            found = examine((), [reader])
        finally:
            reader.close()
        explained(found)
        return found

    return run


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_postgresql_is_examined(look):
    found = look()
    assert {check: level for check, level in levels(found).items() if level != "ok"} == {"durability": "unsafe"}
    assert of(found, "durability").measured == "fsync off, synchronous_commit on"  # as the tests run it
    assert of(found, "isolation").measured.startswith("READ COMMITTED")
    assert of(found, "fence").measured == "0 rows in dlock_fence"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_fence_that_may_not_be_read_is_a_warning_and_the_rest_is_judged(look, database):
    with connections[database].cursor() as cursor:
        cursor.execute("CREATE ROLE dlock_onlooker LOGIN")
        try:
            where = f"postgresql+psycopg://dlock_onlooker@127.0.0.1:{settings.POSTGRESQL_PORT}/postgres"
            with closing(sqla_database(where)) as onlooker:
                found = examine((), [onlooker])
        finally:
            cursor.execute("DROP ROLE dlock_onlooker")
    fence = of(found, "fence")
    assert (fence.level, "permission denied" in fence.measured, of(found, "role").level) == ("warning", True, "ok")
    assert of(found, "sight").level == "warning"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_postgresql_at_a_higher_isolation_is_a_warning(look, database):
    with connections[database].cursor() as cursor:
        cursor.execute("ALTER ROLE postgres SET default_transaction_isolation = 'repeatable read'")
        try:
            assert of(look(), "isolation").level == "warning"
        finally:
            cursor.execute("ALTER ROLE postgres RESET default_transaction_isolation")


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_mariadb_is_examined(look, database):
    found = look()
    assert of(found, "isolation").level == "warning"  # REPEATABLE READ is its default
    assert of(found, "durability").level == "warning"
    assert of(found, "engine").level == "ok"
    assert of(found, "floor").level == "warning"  # the tests empty every table
    assert of(found, "clock").level == "ok"
    with connections[database].cursor() as cursor:
        cursor.execute("ALTER TABLE dlock_fence ENGINE = MyISAM")
        try:
            assert of(look(), "engine").level == "unsafe"
        finally:
            cursor.execute("ALTER TABLE dlock_fence ENGINE = InnoDB")


@pytest.mark.parametrize("database", ["default"], indirect=True)
def test_sqlite_is_examined(look):
    assert levels(look()) == {"version": "ok", "journal": "ok", "row locks": "ok", "fence": "ok"}


def test_database_without_a_fence_is_a_warning(tmp_path):
    (tmp_path / "empty.db").touch()
    ran = dlock("doctor", "--database", f"sqlite:///{tmp_path}/empty.db", "--format", "json")
    found = {one["check"]: one for one in json.loads(ran.out)["findings"]}
    assert (ran.code, found["fence"]["level"], found["fence"]["source"]) == (0, "warning", "sqlite")
    assert found["journal"]["level"] == "warning"


def test_remedy_for_a_missing_fence_can_be_typed_as_it_stands(tmp_path):
    (tmp_path / "a").touch()
    fence = of(examine([], [sqla_database(f"sqlite:///{tmp_path}/a")]), "fence")
    assert "sqla_dlock.fencing.metadata.create_all(engine)" in fence.remedy
    (other,) = databases(["other"])
    assert other.fence_remedy == "manage.py migrate django_dlock --database other"


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 ok, 0 warnings, 0 unsafe"), (1, "0 ok, 1 warning, 0 unsafe"), (2, "0 ok, 2 warnings, 0 unsafe")],
)
def test_findings_are_counted_in_english(number, words):
    assert drawn(Report([Finding("reach", "warning", "far", "why", "do")] * number), 80)[-1] == words


def test_database_that_is_down_is_one_unsafe_finding():
    ran = dlock("doctor", "--database", "postgresql+psycopg://localhost:1/db", "--format", "json")
    (one,) = json.loads(ran.out)["findings"]
    assert (ran.code, one["check"], one["level"]) == (1, "reach", "unsafe")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_report_fits_the_terminal(width):
    nasty = "no\x1b[2J answer from " + "x" * 300
    lines = drawn(Report([Finding("reach", "unsafe", nasty, nasty, nasty, nasty, nasty)]), width)
    assert max(map(cell_len, lines)) <= width
    assert all(line.isprintable() for line in lines)


def test_report_on_a_narrow_terminal_keeps_its_margin():
    words = "no answer from anybody " * 4
    _title, first, *others, _numbers = drawn(Report([Finding("reach", "unsafe", words, words, words)]), 40)
    assert first.startswith("  unsafe   reach: no answer")
    assert all(line.startswith(" " * 11) for line in others)


def test_report_to_a_file_has_no_colors():
    ran = dlock("doctor", "--store", "memory://")
    assert ran.out
    assert "\x1b" not in ran.out


def test_sentinels_are_asked_one_by_one(servers_directory):
    from tests.redis_sentinel import group

    with group(servers_directory / "doctor-sentinel") as shop:
        found = examined(shop.url)
        assert of(found, "sentinels").level == "ok"
        assert of(found, "replication").level == "warning"
        shop.sentinels[0].kill()
        found = examined(shop.url)
        assert of(found, "sentinels").measured == "2 of 3 Sentinels answer"
        assert of(found, "sentinels").level == "warning"
        assert of(found, "reach", f"127.0.0.1:{shop.sentinels[0].port}").level == "warning"


def test_cluster_is_examined_node_by_node(servers_directory):
    from tests.redis_cluster import cluster as redis_cluster

    with redis_cluster(servers_directory / "doctor-cluster") as shop:
        found = examined(shop.url)
        assert len([one for one in found if one.check == "eviction"]) > 1
        assert "unsafe" not in levels(found).values()
