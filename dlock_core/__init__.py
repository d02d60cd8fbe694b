"""Leases, fencing, versions and row locks: the part that is independent of frameworks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dlock_core.extras import version

if TYPE_CHECKING:
    from dlock_core.backend import Released
    from dlock_core.errors import (
        AcquireTimeout,
        AlreadyHeld,
        BackendUnavailable,
        DLockError,
        LeaseLost,
        NotHeld,
        NotSupported,
        RowLocked,
        SnapshotTooOld,
        StaleObject,
        StaleToken,
    )
    from dlock_core.leases.handles import AsyncLease, Lease
    from dlock_core.leases.lock import AsyncLock, Lock
    from dlock_core.leases.multilock import AsyncMultiLease, AsyncMultiLock, MultiLease, MultiLock
    from dlock_core.stores import connect

__all__ = [
    "AcquireTimeout",
    "AlreadyHeld",
    "AsyncLease",
    "AsyncLock",
    "AsyncMultiLease",
    "AsyncMultiLock",
    "BackendUnavailable",
    "DLockError",
    "Lease",
    "LeaseLost",
    "Lock",
    "MultiLease",
    "MultiLock",
    "NotHeld",
    "NotSupported",
    "Released",
    "RowLocked",
    "SnapshotTooOld",
    "StaleObject",
    "StaleToken",
    "connect",
]

_HOMES: Final = {
    "AsyncLease": "leases.handles",
    "AsyncLock": "leases.lock",
    "AsyncMultiLease": "leases.multilock",
    "AsyncMultiLock": "leases.multilock",
    "Lease": "leases.handles",
    "Lock": "leases.lock",
    "MultiLease": "leases.multilock",
    "MultiLock": "leases.multilock",
    "Released": "backend",
    "connect": "stores",
}

_MODULES: Final = frozenset({"backend", "errors", "names", "owner", "runtime", "stores", "testing"})
"""Also attributes of the package: `import dlock_core; dlock_core.errors` must not depend on earlier imports."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: a process that only saves versions needs no lock code."""
    if name == "__version__":
        return version()
    if name not in __all__ and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
