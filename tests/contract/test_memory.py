"""The memory store keeps the contract."""

import pytest

from dlock_core.testing import MemoryBackend
from dlock_core.testing.contract import *  # noqa: F403


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()
