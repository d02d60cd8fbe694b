"""The shop on FastAPI and SQLAlchemy: a small race of real processes on every database, and the pages."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from example_project.race.servers import serving
from example_project.sqla_shop.racing import SqlaShop
from tests import settings
from tests.acceptance.test_race import ANOMALIES, KEYS, STRATEGIES
from tests.mysql_server import DIALECT
from tests.servers import Server
from tests.sqla_dlock.engines import missing_driver
from tests.sqla_dlock.sessions import run_sql

ROOT = Path(__file__).parents[2]
NAMES = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "mariadb": "MariaDB"}
SERVERS = {
    "postgresql": f"postgres://postgres@127.0.0.1:{settings.POSTGRESQL_PORT}/shop",
    "mariadb": f"{DIALECT}://root@127.0.0.1:{settings.MARIADB_PORT}/shop",
}

pytestmark = pytest.mark.timeout(300)


def shop(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in {"DATABASE_URL", "REDIS_URL"}}
    command = [sys.executable, "-m", "example_project.sqla_shop", *arguments]
    return subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True, check=False)


def race(url: str, *strategies: str, orders: int) -> list[dict[str, object]]:
    options = ["--orders", str(orders), "--workers", "2", "--format", "json"]
    done = shop("race", "--strategy", *strategies, *options, DATABASE_URL=url)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_runs_from_any_folder_where_python_finds_it(tmp_path):
    place = tmp_path / "with a blank #"
    place.mkdir()
    options = ["--strategy", "lease", "--orders", "2", "--workers", "2", "--format", "json"]
    done = shop("race", *options, cwd=place, PYTHONPATH=str(ROOT), TMPDIR=str(place))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["orders"] == 2
    assert list(place.iterdir()) == []


@pytest.fixture(scope="module", params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the URL of an empty database; an empty text means a throw-away SQLite file."""
    name = request.param
    if name == "sqlite":
        yield ""
        return
    if missing := missing_driver(name):
        pytest.skip(missing)
    request.getfixturevalue(name)
    run_sql(name, "CREATE DATABASE shop")
    yield SERVERS[name]
    run_sql(name, "DROP DATABASE shop")


@pytest.fixture(scope="module")
def report(url: str) -> dict[str, dict[str, object]]:
    """Return the results of one race under all four strategies, by strategy."""
    return {str(result["strategy"]): result for result in race(url, *STRATEGIES, orders=30)}


def test_without_protection_orders_are_both_shipped_and_refunded(url, report):
    result = report["none"]
    for orders in (60, 120, 240):  # chance decides: one race may go well, but not several in a row
        if all(result[name] for name in ANOMALIES):
            break
        [result] = race(url, "none", orders=orders)
    assert all(result[name] for name in ANOMALIES), f"the race does not show what it is for: {result}"


@pytest.mark.parametrize("strategy", ["row", "version", "lease"])
def test_under_protection_no_order_is_both_shipped_and_refunded_and_no_update_is_lost(report, strategy):
    result = report[strategy]
    assert {name: result[name] for name in ANOMALIES} == dict.fromkeys(ANOMALIES, 0)
    assert (result["orders"], result["conflicts"]) == (30, 30)  # one of each pair succeeded, the other was too late


def test_the_report_has_the_shape_of_djangos(report):
    assert [list(result) for result in report.values()] == [KEYS] * 4


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory, redis_server: Server) -> Iterator[Path]:
    """Create a shop with the twelve orders of `seed`, and name it in the environment."""
    home = tmp_path_factory.mktemp("pages")
    environment = {"DATABASE_URL": f"sqlite:///{home / 'shop.sqlite3'}", "REDIS_URL": redis_server.url}
    assert shop("seed", **environment).returncode == 0
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.chdir(ROOT)
        yield home


@pytest.fixture(scope="module", params=STRATEGIES)
def pages(request: pytest.FixtureRequest, seeded: Path) -> Iterator[httpx.Client]:
    """Yield a browser's view of the shop under each strategy, and two orders for it alone: `pages.orders`."""
    with (
        serving(SqlaShop(), request.param, 1, seeded) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Accept": "text/html"}) as client,
    ):
        client.strategy, place = request.param, STRATEGIES.index(request.param)
        client.orders = [2 * place + 1, 2 * place + 2]
        yield client


def test_a_browser_ships_an_order_and_is_told_that_it_is_too_late_to_cancel(pages):
    order = pages.orders[0]
    listed = pages.get("/")
    assert listed.text.count('href="/orders/') == 12
    assert f"<strong>{pages.strategy}</strong>" in listed.text
    actions = re.findall(r'formaction="([^"]+)"', pages.get(f"/orders/{order}").text)
    assert actions == [f"/orders/{order}/ship", f"/orders/{order}/cancel"]

    shipped = pages.post(f"/orders/{order}/ship")
    assert (shipped.status_code, shipped.headers["Location"]) == (303, f"/orders/{order}")
    late = pages.post(f"/orders/{order}/cancel")
    assert late.status_code == 409
    assert 'role="alert">Not cancelled: already shipped.' in late.text
    assert "formaction" not in late.text
    assert pages.get(f"/orders/{order}").text.count("<li>") == 3  # paid, shipped, not cancelled


def test_other_clients_get_json_and_mistakes_are_told(pages):
    order = pages.orders[1]
    done, late = (pages.post(f"/orders/{order}/{action}", headers={"Accept": "*/*"}) for action in ("cancel", "ship"))
    assert (done.status_code, done.json()["event"]) == (200, "cancelled")
    assert (late.status_code, late.json()["text"]) == (409, "Not shipped: already cancelled")
    assert pages.post("/orders/99/ship").status_code == pages.get("/orders/99").status_code == 404
    assert pages.post(f"/orders/{order}/burn").status_code == 422


@pytest.mark.parametrize(  # the code that both shops share, `race`, is tested further in test_race.py
    ("arguments", "environment", "message"),
    [
        (["--orders", "0"], {}, "--orders: must be a whole number of at least 1"),
        ([], {"DATABASE_URL": "postgres://me:hush@127.0.0.1:1/shop"}, "DATABASE_URL: connection failed"),
        ([], {"DATABASE_URL": "oracle://me:hush@127.0.0.1/shop"}, "DATABASE_URL must begin with one of"),
        ([], {"DATABASE_URL": "hush"}, "DATABASE_URL must begin with one of"),
        ([], {"REDIS_URL": "redis://:hush@127.0.0.1:1/0"}, "REDIS_URL: "),
    ],
)
def test_bad_input_is_told_in_one_line_without_traceback_or_password(arguments, environment, message):
    done = shop("race", *arguments, **environment)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert "hush" not in done.stdout + done.stderr
