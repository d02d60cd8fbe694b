"""A deadlock across a lease and a row lock is found and described, though neither store nor database sees it alone."""

from collections.abc import Callable

import pytest

from dlock_core.inspect import Snapshot
from tests.inspect.parties import lease_then_row, row_then_lease
from tests.processes import worker
from tests.testapp.models import Stock

CASES = [
    ("django", "postgresql", "postgresql"),
    ("django", "mariadb", "mariadb"),
    ("sqlalchemy", "postgresql", "postgresql"),
    ("sqlalchemy", "mariadb", "mariadb"),
    ("asyncio", "postgresql", "asyncpg"),
]


@pytest.mark.parametrize(
    ("world", "database", "driver"), CASES, indirect=["database"], ids=[f"{a}-{c}" for a, _, c in CASES]
)
def test_deadlock_across_a_lease_and_a_row_is_named(
    world: str, database: str, driver: str, store_url: str, look: Callable[..., Snapshot]
) -> None:
    Stock.objects.using(database).create(pk=7)
    with (
        worker(lease_then_row, world, driver, store_url) as shipping,
        worker(row_then_lease, world, driver, store_url) as counting,
    ):
        for one in (shipping, counting):
            assert one.hear() == "holds"
        for one in (shipping, counting):
            one.say("go on")
        found = look(lambda snapshot: snapshot.cycles or shipping.pipe.poll() or counting.pipe.poll())
        if not found.cycles:
            (shipping if shipping.pipe.poll() else counting).result()
        assert look(lambda snapshot: snapshot.cycles, "order:1").cycles, "also when only this lock is asked for"
    (cycle,) = found.cycles
    first, second = sorted(cycle.steps(), key=lambda step: "/orders/1/ship" not in step)
    row = next(entry.name for entry in found.entries if entry.kind == "row" and entry.role == "waiter")
    assert row.endswith("testapp_stock 7")
    assert first.startswith("POST /orders/1/ship (shop@")
    assert first.endswith(f"holds lease order:1 and waits for row {row}")
    assert second.startswith("POST /stock/7 (nightly@")
    assert second.endswith(f"holds row {row} and waits for lease order:1")
