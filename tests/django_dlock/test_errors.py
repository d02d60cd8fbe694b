import pickle

import pytest
from django.db import DatabaseError, NotSupportedError, OperationalError, transaction
from django.http import Http404

from django_dlock import errors
from dlock_core import errors as core
from tests.testapp.models import Counter

NAME = "order:42"
MISSING = core.NoSuchKey("testapp.counter", key="x42")
EXAMPLES = [
    core.AcquireTimeout(NAME, waited=2.5, held_by="worker 7", retry_after=3.0),
    core.AlreadyHeld(NAME),
    core.BackendUnavailable(NAME, reason="connection refused"),
    core.LeaseLost(NAME, token=7),
    core.NotHeld(NAME),
    core.NotSupported(f"lock {NAME!r}: no shared locks here", name=NAME),
    core.PreconditionFailed(NAME, header="If-Match", given='"abc"'),
    core.PreconditionMalformed(NAME, header="If-Match", given="abc"),
    core.PreconditionRequired(NAME),
    core.RowLocked(NAME, waited=1.0),
    core.SnapshotTooOld(NAME, isolation="REPEATABLE READ"),
    core.StaleObject(Counter(pk=42, name=NAME), expected=3, found=4),
    core.StaleToken(NAME, token=7, highest=9),
]


def same_data(one: BaseException, other: BaseException) -> bool:
    return (str(one), one.__dict__) == (str(other), other.__dict__)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_twin_is_what_both_the_core_and_django_catch(error: core.DLockError) -> None:
    twin = errors.as_database_error(error)
    assert isinstance(twin, (type(error)))
    assert isinstance(twin, DatabaseError)
    assert type(twin).__name__ == type(error).__name__
    assert type(twin).__doc__ == type(error).__doc__


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_twin_keeps_text_and_data_and_names_the_lock(error: core.DLockError) -> None:
    twin = errors.as_database_error(error)
    assert same_data(twin, error)
    assert "42" in str(twin)
    assert "42" in twin.name


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_twin_survives_pickling(error: core.DLockError) -> None:
    twin = errors.as_database_error(error)
    copy = pickle.loads(pickle.dumps(twin))
    assert type(copy) is type(twin)
    assert same_data(copy, twin)


def test_key_that_no_row_has_is_a_row_that_is_not_found() -> None:
    twin = errors.as_database_error(MISSING)
    assert isinstance(twin, core.NoSuchKey)
    assert isinstance(twin, Http404)
    assert same_data(pickle.loads(pickle.dumps(twin)), MISSING)


def test_twin_keeps_cause_and_traceback() -> None:
    refused = OSError("refused")
    with pytest.raises(core.BackendUnavailable) as caught:
        raise core.BackendUnavailable(NAME, reason="refused") from refused
    twin = errors.as_database_error(caught.value)
    assert twin.__cause__ is refused
    assert twin.__traceback__ is caught.value.__traceback__


def test_every_core_error_has_a_twin() -> None:
    assert {type(error) for error in [*EXAMPLES, MISSING]} | {core.DLockError} == {
        getattr(core, name) for name in core.__all__
    }
    assert set(core.__all__) < set(errors.__all__)


def test_error_that_has_no_twin_or_is_one_stays_itself() -> None:
    twin = errors.RowLocked(NAME)
    plain = core.DLockError("other")
    assert errors.as_database_error(twin) is twin
    assert errors.as_database_error(plain) is plain


def test_missing_capability_is_the_database_s_not_supported_too() -> None:
    assert issubclass(errors.NotSupported, NotSupportedError)
    assert not issubclass(errors.RowLocked, OperationalError)


def test_error_raised_inside_atomic_rolls_back(database: str) -> None:
    with pytest.raises(core.StaleToken), transaction.atomic(using=database):
        Counter.objects.using(database).create(name="half done")
        raise errors.StaleToken(NAME, token=1)
    assert not Counter.objects.using(database).exists()
