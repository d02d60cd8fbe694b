"""Leases, fencing, versions and row locks: the part that knows no framework."""

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
from dlock_core.extras import version
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


def __getattr__(name: str) -> str:
    """Look the version up when it is asked for: that reads files."""
    if name == "__version__":
        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
