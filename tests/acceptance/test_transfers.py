"""Transfers between two databases, run as a newcomer runs them: under the locks no money is lost or created."""

import json

import pytest

from tests.acceptance.test_race import shop

pytestmark = pytest.mark.timeout(300)


def test_money_is_lost_or_misplaced_without_locks_and_never_with_them():
    for transfers in (100, 200, 400, 800):  # chance decides: one run may go well, but not all four
        done = shop("transfers", "--transfers", str(transfers), "--format", "json")
        assert done.returncode == 0, done.stderr
        unlocked, locked = json.loads(done.stdout)
        assert (locked["transfers"], locked["money lost"], locked["wrong balances"]) == (transfers, 0, 0)
        if unlocked["wrong balances"]:
            return
    pytest.fail(f"the transfers do not show what they are for: {unlocked}")
