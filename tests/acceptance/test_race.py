"""A small race in the shop, run as a newcomer runs it: only without protection are orders both shipped and refunded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOP = Path(__file__).parents[2] / "example_project"
ANOMALIES = ("both_shipped_and_cancelled", "refunds_of_shipped", "lost_updates")
STRATEGIES = ["none", "row", "version", "lease"]
KEYS = ["strategy", "orders", *ANOMALIES, "conflicts", "retries", "p50_ms", "p99_ms", "throughput"]

pytestmark = pytest.mark.timeout(300)


def shop(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in {"DATABASE_URL", "REDIS_URL"}}
    command = [sys.executable, "manage.py", *arguments]
    variables = clean | {"PYTHONPATH": str(SHOP.parent), "DJANGO_SETTINGS_MODULE": "shopsite.settings"} | environment
    return subprocess.run(command, cwd=SHOP, env=variables, capture_output=True, text=True, check=False)


def race(*strategies: str, orders: int) -> list[dict[str, object]]:
    done = shop("race", "--strategy", *strategies, "--orders", str(orders), "--workers", "2", "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, object]]:
    """Return the results of one race under all four strategies, by strategy."""
    return {str(result["strategy"]): result for result in race(*STRATEGIES, orders=30)}


def test_without_protection_orders_are_both_shipped_and_refunded(report):
    result = report["none"]
    for orders in (60, 120, 240):  # chance decides: one race may go well, but not several in a row
        if all(result[name] for name in ANOMALIES):
            break
        [result] = race("none", orders=orders)
    assert all(result[name] for name in ANOMALIES), f"the race does not show what it is for: {result}"


@pytest.mark.parametrize("strategy", ["row", "version", "lease"])
def test_under_protection_no_order_is_both_shipped_and_refunded_and_no_update_is_lost(report, strategy):
    result = report[strategy]
    assert {name: result[name] for name in ANOMALIES} == dict.fromkeys(ANOMALIES, 0)
    assert (result["orders"], result["conflicts"]) == (30, 30)  # one of each pair succeeded, the other was too late


def test_it_runs_from_any_folder_and_with_any_folder_for_temporary_files(tmp_path):
    place = tmp_path / "with a blank # and a hash"
    temporary = place / ("long" * 40)
    temporary.mkdir(parents=True)
    hidden = {"DATABASE_URL", "REDIS_URL", "PYTHONPATH", "DJANGO_SETTINGS_MODULE"}
    clean = {name: value for name, value in os.environ.items() if name not in hidden} | {"TMPDIR": str(temporary)}
    arguments = ["race", "--strategy", "lease", "--orders", "2", "--workers", "2", "--format", "json"]
    command = [sys.executable, os.path.relpath(SHOP / "manage.py", place), *arguments]
    done = subprocess.run(command, cwd=place, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [result] = json.loads(done.stdout)
    assert result["orders"] == 2
    assert list(place.rglob("*")) == [temporary]


def test_the_report_in_json_has_exactly_the_promised_keys(report):
    assert [list(result) for result in report.values()] == [KEYS] * 4


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--workers", "0"], {}, "--workers: must be a whole number of at least 1"),
        (["--strategy", "luck"], {}, "invalid choice: 'luck'"),
        ([], {"DATABASE_URL": "postgres://me:hush@127.0.0.1:1/shop"}, "DATABASE_URL: connection failed"),
        ([], {"DATABASE_URL": "oracle://me:hush@127.0.0.1/shop"}, "DATABASE_URL must begin with one of"),
        ([], {"REDIS_URL": "redis://:hu/sh@127.0.0.1:1/0"}, "REDIS_URL: "),
    ],
)
def test_bad_input_is_told_in_one_line_without_traceback_or_password(arguments, environment, message):
    done = shop("race", *arguments, **environment)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert "hush" not in done.stdout + done.stderr
