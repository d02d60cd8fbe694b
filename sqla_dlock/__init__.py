"""Locks for SQLAlchemy: leases held until COMMIT, fencing, version columns, row locks; sync and async."""

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
from sqla_dlock.fencing import FencedMixin
from sqla_dlock.locks import alock, lock
from sqla_dlock.stores import configure

__all__ = [
    "AcquireTimeout",
    "AlreadyHeld",
    "BackendUnavailable",
    "DLockError",
    "FencedMixin",
    "LeaseLost",
    "NotHeld",
    "NotSupported",
    "RowLocked",
    "SnapshotTooOld",
    "StaleObject",
    "StaleToken",
    "alock",
    "configure",
    "lock",
]
