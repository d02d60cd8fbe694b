"""The memory store keeps the contract."""

from __future__ import annotations

import pytest

from dlock_core.testing import MemoryBackend
from dlock_core.testing.contract import *  # noqa: F403


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()
