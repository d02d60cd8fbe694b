"""A connection that a thread opens belongs to its caller, or is closed."""

import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from dlock_core.backends.sql.threads import within
from tests.waiting import WITHIN


class Interrupted(BaseException):
    """What the signal handler raises."""


class FakeConnection:
    """Records that it was closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def interrupting() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("interrupting")
def test_connection_whose_caller_was_interrupted_is_closed() -> None:
    connection, is_interrupted = FakeConnection(), threading.Event()

    def connect() -> Any:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert is_interrupted.wait(WITHIN)
        return connection

    with pytest.raises(Interrupted):
        within(WITHIN, connect)
    is_interrupted.set()
    assert connection.closed.wait(WITHIN)


def test_connection_that_comes_late_is_closed() -> None:
    connection, is_late = FakeConnection(), threading.Event()

    def connect() -> Any:
        assert is_late.wait(WITHIN)
        return connection

    with pytest.raises(TimeoutError, match="no connection within"):
        within(0.01, connect)
    is_late.set()
    assert connection.closed.wait(WITHIN)


def test_error_of_the_connection_reaches_the_caller() -> None:
    def connect() -> Any:
        raise ConnectionRefusedError("nobody there")

    with pytest.raises(ConnectionRefusedError, match="nobody there"):
        within(WITHIN, connect)
