"""Leases, fencing, versions and row locks: the part that knows no framework."""

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
from dlock_core.holding import AsyncLease, Lease
from dlock_core.lease import Released
from dlock_core.lock import AsyncLock, Lock
from dlock_core.many import AsyncMultiLease, AsyncMultiLock, MultiLease, MultiLock
from dlock_core.registry import connect

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
