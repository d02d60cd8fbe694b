"""The shop keeps its promises under a small load while Redis dies and comes back; the checker finds violations."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.customers import Answer
from benchmarks.promises import Fault, of_answers, of_data

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(300)


@dataclass
class Tally:
    changed: int
    both_shipped_and_cancelled: int = 0
    refunds_of_shipped: int = 0
    lost_updates: int = 0


FAULT = Fault(begin=10.0, healing=20.0, end=20.0, wait=3.0, is_dead=True)
GOOD = [
    Answer("order", 302, 5.0, 5.1),
    Answer("order", 503, 11.0, 14.1),
    Answer("page", 200, 12.0, 12.1),
    Answer("order", 409, 20.4, 20.5),
    Answer("order", 302, 20.5, 20.6),
]


def test_a_run_as_promised_has_no_violation():
    assert list(of_answers(GOOD, FAULT)) == []
    assert list(of_data(Tally(changed=2), GOOD)) == []


@pytest.mark.parametrize(
    "broken",
    [
        Answer("order", 500, 5.0, 5.1),
        Answer("order", 503, 5.0, 5.1),
        Answer("order", 0, 12.0, 12.1),
        Answer("order", 302, 12.0, 12.1),
        Answer("order", 503, 11.0, 18.1),
        Answer("page", 503, 12.0, 12.1),
        Answer("page", 200, 12.0, 15.1),
        Answer("order", 503, 22.5, 25.6),
    ],
    ids=lambda answer: f"{answer.kind}, {answer.status} after {answer.seconds:.1f} s",
)
def test_an_answer_that_is_not_as_promised_is_found(broken):
    assert list(of_answers([*GOOD, broken], FAULT))


def test_it_is_found_when_no_order_is_served_soon_after_the_fault():
    assert list(of_answers(GOOD[:-1], FAULT))


@pytest.mark.parametrize(
    "tally",
    [
        Tally(1),
        Tally(4),
        Tally(2, both_shipped_and_cancelled=1),
        Tally(2, refunds_of_shipped=1),
        Tally(2, lost_updates=1),
    ],
)
def test_a_database_that_disagrees_is_found(tally):
    assert list(of_data(tally, GOOD))


@pytest.mark.usefixtures("redis_server", "postgresql")  # skipped where they are not installed
def test_the_shop_keeps_its_promises_while_redis_is_killed_and_comes_back_empty():
    command = ["-m", "benchmarks.load", "--ladder=0", "--wait=1", "--slack=5", "--only=data lost"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
