"""Tools for the tests of applications and stores: a store in memory, a clock that a test advances, the contract suite."""

from dlock_core.backends.memory import MemoryBackend
from dlock_core.testing.runtime import ManualRuntime

__all__ = ["ManualRuntime", "MemoryBackend"]
