"""The contract suite: what each store must do. A test module of the package that has the store imports it.

    from dlock_core.testing.contract import *

    @pytest.fixture
    def backend():
        return MyBackend(...)

Each test runs twice, with threads and with tasks. The suite needs pytest and a store in which it may take locks whose
names begin with "contract". Tests of what a store does not support are skipped. The words of the tests are explained
in `dlock_core.testing.contract.harness`.
"""

# ruff: noqa: E402, F403 - the parts are imported after the rewriting of their assertions is set up
import secrets
from collections.abc import Iterator

import pytest

from dlock_core.backend import Backend
from dlock_core.testing.contract.harness import Harness, Tasks, Threads

_PARTS = ("exclusion", "waiting", "ending", "renewing", "sharing", "several", "operating", "refusing")

pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from dlock_core.testing.contract.ending import *
from dlock_core.testing.contract.exclusion import *
from dlock_core.testing.contract.operating import *
from dlock_core.testing.contract.refusing import *
from dlock_core.testing.contract.renewing import *
from dlock_core.testing.contract.several import *
from dlock_core.testing.contract.sharing import *
from dlock_core.testing.contract.waiting import *

__all__ = ["harness", "name", "shared_harness", *(key for key in globals() if key.startswith("test_"))]  # noqa: PLE0604


@pytest.fixture(params=[Threads, Tasks], ids=["threads", "tasks"])
def harness(request: pytest.FixtureRequest, backend: Backend) -> Iterator[Harness]:
    """Yield a harness for the store under test: one with threads, then one with tasks."""
    harness: Harness = request.param(backend)
    yield harness
    harness.close()


@pytest.fixture
def shared_harness(harness: Harness) -> Harness:
    """Return the harness, or skip the test where the store has no shared locks."""
    if not harness.store.capabilities.shared:
        pytest.skip("this store has no shared locks")
    return harness


@pytest.fixture
def name() -> str:
    """Return a lock name that no other test uses."""
    return f"contract:{secrets.token_hex(4)}"
