"""The public names are a reviewed list: whoever changes it changes this test, and the changelog."""

import dlock_core
import dlock_core.errors
import dlock_core.testing


def test_public_names_of_the_core() -> None:
    assert dlock_core.__all__ == [
        "AcquireTimeout", "AlreadyHeld", "AsyncLease", "AsyncLock", "AsyncMultiLease", "AsyncMultiLock", "BackendUnavailable",
        "DLockError", "Lease", "LeaseLost", "Lock", "MultiLease", "MultiLock", "NotHeld", "NotSupported", "Released", "RowLocked",
        "SnapshotTooOld", "StaleObject", "StaleToken", "connect",
    ]  # fmt: skip
    assert all(hasattr(dlock_core, name) for name in dlock_core.__all__)


def test_public_names_of_the_errors() -> None:
    assert dlock_core.errors.__all__ == [
        "AcquireTimeout", "AlreadyHeld", "BackendUnavailable", "DLockError", "LeaseLost", "NoSuchKey", "NotHeld", "NotSupported",
        "PreconditionFailed", "PreconditionMalformed", "PreconditionRequired", "RowLocked", "SnapshotTooOld", "StaleObject", "StaleToken",
    ]  # fmt: skip
    assert all(
        issubclass(getattr(dlock_core.errors, name), dlock_core.DLockError) for name in dlock_core.errors.__all__
    )


def test_public_names_of_the_test_tools() -> None:
    assert dlock_core.testing.__all__ == ["ManualRuntime", "MemoryBackend"]
