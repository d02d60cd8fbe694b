"""For the tests of applications and of backends: a store in memory, a clock turned by hand, the contract suite."""

from dlock_core.backends.memory import MemoryBackend
from dlock_core.testing.runtime import ManualRuntime

__all__ = ["ManualRuntime", "MemoryBackend"]
