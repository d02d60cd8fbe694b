"""Outcomes of the steps of holders in their own threads: the Adders of Django and of SQLAlchemy."""

from concurrent.futures import Future
from typing import Any, Final

import pytest

WITHIN: Final = 60.0


def outcome(future: Future[Any]) -> Any:
    """Return the result of a step, or its error."""
    error = future.exception(WITHIN)
    return future.result() if error is None else error


def give_up_waiting(late: Any, form: str, row_locked: type[Exception]) -> None:
    """Let a holder's wait for the fence time out: as it acquires the lock, or as its transaction begins."""
    if form == "lease":
        with pytest.raises(row_locked):
            late.take()
    else:
        late.take()
        assert isinstance(outcome(late.start()), row_locked)
        late.rollback()
