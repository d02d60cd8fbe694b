"""The core's errors for Django: each is also a `django.db.DatabaseError`.

On MySQL and SQLite, Django would commit after any other exception that is raised inside COMMIT. NoSuchKey is an Http404
instead: it is raised before any I/O, and a view answers it as it does a row that does not exist.
"""

from __future__ import annotations

from django.db import DatabaseError, NotSupportedError
from django.http import Http404

from dlock_core import errors as core

__all__ = [
    "AcquireTimeout",
    "AlreadyHeld",
    "BackendUnavailable",
    "DLockError",
    "LeaseLost",
    "NoSuchKey",
    "NotHeld",
    "NotSupported",
    "PreconditionFailed",
    "PreconditionMalformed",
    "PreconditionRequired",
    "RowLocked",
    "SnapshotTooOld",
    "StaleObject",
    "StaleToken",
    "as_database_error",
]

DLockError = core.DLockError


class AcquireTimeout(core.AcquireTimeout, DatabaseError):
    __doc__ = core.AcquireTimeout.__doc__


class AlreadyHeld(core.AlreadyHeld, DatabaseError):
    __doc__ = core.AlreadyHeld.__doc__


class LeaseLost(core.LeaseLost, DatabaseError):
    __doc__ = core.LeaseLost.__doc__


class NotHeld(core.NotHeld, DatabaseError):
    __doc__ = core.NotHeld.__doc__


class StaleToken(core.StaleToken, DatabaseError):
    __doc__ = core.StaleToken.__doc__


class StaleObject(core.StaleObject, DatabaseError):
    __doc__ = core.StaleObject.__doc__


class SnapshotTooOld(core.SnapshotTooOld, DatabaseError):
    __doc__ = core.SnapshotTooOld.__doc__


class RowLocked(core.RowLocked, DatabaseError):
    __doc__ = core.RowLocked.__doc__


class BackendUnavailable(core.BackendUnavailable, DatabaseError):
    __doc__ = core.BackendUnavailable.__doc__


class NotSupported(core.NotSupported, NotSupportedError):
    __doc__ = core.NotSupported.__doc__


class NoSuchKey(core.NoSuchKey, Http404):
    __doc__ = core.NoSuchKey.__doc__


class PreconditionFailed(core.PreconditionFailed, DatabaseError):
    __doc__ = core.PreconditionFailed.__doc__


class PreconditionMalformed(core.PreconditionMalformed, DatabaseError):
    __doc__ = core.PreconditionMalformed.__doc__


class PreconditionRequired(core.PreconditionRequired, DatabaseError):
    __doc__ = core.PreconditionRequired.__doc__


_TWINS: dict[type[core.DLockError], type[core.DLockError]] = {
    twin.__bases__[0]: twin
    for twin in (
        AcquireTimeout,
        AlreadyHeld,
        BackendUnavailable,
        LeaseLost,
        NoSuchKey,
        NotHeld,
        NotSupported,
        PreconditionFailed,
        PreconditionMalformed,
        PreconditionRequired,
        RowLocked,
        SnapshotTooOld,
        StaleObject,
        StaleToken,
    )
}


def as_database_error(error: core.DLockError) -> core.DLockError:
    """Return the Django counterpart of a core error, with its text, data, cause and traceback; others unchanged."""
    kind = _TWINS.get(type(error))
    if kind is None:
        return error
    twin = core.rebuild(kind, error.args, error.__dict__).with_traceback(error.__traceback__)
    twin.__cause__, twin.__context__ = error.__cause__, error.__context__
    twin.__suppress_context__ = error.__suppress_context__
    return twin
