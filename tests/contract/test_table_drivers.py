"""The lease table works with every driver: one life of a lock each, for threads and for tasks."""

from collections.abc import Iterator
from typing import Any

import pytest

from dlock_core.backend import Released, Renewal, RenewalFailure
from dlock_core.backends.table import backend as module
from dlock_core.backends.table.backend import TableBackend
from dlock_core.backends.table.statements import MYSQL
from dlock_core.testing.contract import harness, name  # noqa: F401 - fixtures
from dlock_core.testing.contract.harness import Harness
from dlock_core.testing.contract.observed import WITHIN
from tests.sqla_dlock.engines import missing_driver
from tests.table_stores import URLS, table

STORES = ("mariadb", *URLS, "the words of MySQL")


@pytest.fixture(params=STORES)
def backend(
    request: pytest.FixtureRequest, django_db_blocker, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TableBackend]:
    store = request.param
    if store == "the words of MySQL":  # there is no MySQL server here
        monkeypatch.setitem(module.DIALECTS, "mariadb", MYSQL)
        store = "mariadb"
    elif missing := missing_driver({"mysqldb": "MySQLdb", "sqlite": "sqlite3"}.get(store, store)):
        pytest.skip(missing)
    backend = table(request, store)
    with django_db_blocker.unblock():
        yield backend
    backend.close()


def test_life_of_a_lock(harness: Harness, name: str) -> None:  # noqa: F811
    first = harness.acquire(name, ttl=60)
    assert harness.try_acquire(name) is None
    (held,) = harness.state(name).holders
    assert (held.holder, held.token) == (first.holder, first.token)
    assert 30 < held.expires_in <= 60

    pending = harness.queue_up(name)
    assert harness.do(first.release) is Released.RELEASED
    second = pending.result(WITHIN)
    assert second.token > first.token
    assert harness.do(first.release) is Released.RELEASED

    harness.do(lambda: second.renew(90))
    assert 60 < harness.state(name).holders[0].expires_in <= 90
    assert [state.name for state in harness.call_store("inspect") if state.name == name] == [name]
    assert not harness.call_store("force_release", name, first.token)
    assert harness.call_store("force_release", name, second.token)
    third = harness.acquire(name)
    assert harness.do(second.release) is Released.STOLEN
    assert harness.do(third.release) is Released.RELEASED
    assert harness.holders(name) == []


def test_renewals_are_answered_one_by_one_and_the_token_can_be_raised(harness: Harness, name: str) -> None:  # noqa: F811
    leases: list[Any] = [harness.acquire(f"{name}:{number}", ttl=60, renew=False) for number in range(3)]
    assert harness.call_store("force_release", leases[1].name, leases[1].token)
    renewals = [renewal(lease) for lease in leases]
    answers = harness.call_store("renew", renewals)
    assert [answer is not RenewalFailure.LOST for answer in answers] == [True, False, True]
    assert harness.call_store("renew", [renewals[1]]) == [RenewalFailure.LOST]
    floor = leases[0].token + 1_000_000_000
    request = renewals[0].request._replace(floor=floor)
    granted = harness.call_store("try_acquire", request)
    assert granted.token > floor
    assert harness.call_store("try_acquire", request).token == granted.token


def renewal(lease: Any) -> Any:
    return Renewal(lease._held.request, lease._held.granted)
