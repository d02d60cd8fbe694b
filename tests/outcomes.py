"""What comes of the steps of holders that work in threads of their own: the Adders of Django and of SQLAlchemy."""

from concurrent.futures import Future
from typing import Any, Final

import pytest

WITHIN: Final = 60.0


def outcome(future: Future[Any]) -> Any:
    """What a step gave, or its error."""
    error = future.exception(WITHIN)
    return future.result() if error is None else error


def give_up_waiting(late: Any, form: str, row_locked: type[Exception]) -> None:
    """Have a holder come to the fence whose wait is over before it is free: as it is taken, or as its transaction begins."""
    if form == "lease":
        with pytest.raises(row_locked):
            late.take()
    else:
        late.take()
        assert isinstance(outcome(late.start()), row_locked)
        late.rollback()
