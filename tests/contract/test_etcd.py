"""etcd keeps the contract, and no key is left."""

import secrets
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlock_core.backend import Granted, Released
from dlock_core.backends.etcd.backend import EtcdBackend
from dlock_core.leases.acquisition import new_request
from dlock_core.options import LockOptions
from dlock_core.runtime import BLOCKING, run
from dlock_core.testing.contract import *  # noqa: F403
from dlock_core.testing.contract.harness import Harness
from tests.etcd_servers import Cluster, ask, cluster


@pytest.fixture(scope="module")
def etcd(servers_directory: Path) -> Iterator[Cluster]:
    with cluster(servers_directory / "etcd") as etcd:
        yield etcd


@pytest.fixture
def backend(etcd: Cluster) -> Iterator[EtcdBackend]:
    prefix = f"{secrets.token_hex(4)}/"
    backend = EtcdBackend(etcd.url, prefix=prefix, timeout=20.0)
    yield backend
    backend.close()
    assert left_over(etcd, f"{prefix}lock/") == 0


def left_over(etcd: Cluster, prefix: str) -> int:
    """Return the number of keys that are left."""
    start, end = b64encode(prefix.encode()).decode(), b64encode(f"{prefix}~".encode()).decode()
    found = ask(etcd.members[0], "kv/range", {"key": start, "range_end": end, "count_only": True})
    return int(found.get("count", 0))


@pytest.mark.parametrize("floor", [10**15, 10**18, 1 << 61])
def test_raised_token_raises_the_next(backend: EtcdBackend, harness: Harness, name: str, floor: int) -> None:
    raised = new_request(name, LockOptions(10.0, 0.0))._replace(floor=floor)
    granted = run(backend.try_acquire(BLOCKING, raised))
    assert isinstance(granted, Granted)
    assert granted.token > floor
    assert run(backend.release(BLOCKING, raised, granted)) is Released.RELEASED
    later = harness.acquire(name)
    assert later.token > granted.token
    harness.do(later.release)


@pytest.mark.parametrize("spoiled", [b"", b"text", b"-5", b"1e300", b"nan", b"9" * 30, b"\xff\xfe"])
def test_number_on_top_of_revisions_that_was_spoiled_heals(
    etcd: Cluster, backend: EtcdBackend, harness: Harness, name: str, spoiled: bytes
) -> None:
    key = backend._keys.base(name).encode()
    ask(etcd.members[0], "kv/put", {"key": b64encode(key).decode(), "value": b64encode(spoiled).decode()})
    with_floor = new_request(name, LockOptions(10.0, 0.0))._replace(floor=10**15)
    granted = run(backend.try_acquire(BLOCKING, with_floor))
    assert isinstance(granted, Granted)
    assert granted.token > 10**15
    assert [state.name for state in run(backend.inspect(BLOCKING, name))] == [name]
    assert run(backend.release(BLOCKING, with_floor, granted)) is Released.RELEASED
    later = harness.acquire(name)
    assert granted.token < later.token < 2 * 10**15
    harness.do(later.release)
