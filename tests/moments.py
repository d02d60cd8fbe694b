"""Raises at each moment in turn at which CPython may run a signal handler; there are few of them.

CPython runs signal handlers when a function begins and after each call of a function in C. A profile function is called
at exactly these moments, and what it raises propagates like what a signal handler raises. So every moment is tried, one
by one.
"""

import logging
import sys
from types import FrameType, TracebackType
from typing import Final, Self

from _pytest import unraisableexception

UNGUARDED: Final = frozenset({"__exit__", "__aexit__", "release"})
"""Functions whose first bytecode nothing guards: no code of ours runs before it."""
FOR_EVER: Final = 2000
"""No operation has this many moments."""
RESUME_AFTER_YIELD: Final = 1
"""The least argument of a RESUME that continues inside a function; after an `await` it checks for no signals."""
RESUME_LOCATION: Final = 3
"""The bits of the argument that say this."""

BREAKABLE: Final = frozenset({logging.__file__, unraisableexception.__file__})
"""`logging`, which an exception leaves locked, and pytest's report of an exception in a finalizer, which would fail."""


class Interrupted(BaseException):
    """What a signal handler raises."""


class Interrupt:
    """Raises at the given moment of our code in this thread, and, with `again`, once more that many moments later."""

    def __init__(self, moment: int, again: int = 0) -> None:
        self.left, self.where, self.again = moment, "", again

    def __enter__(self) -> Self:
        sys.setprofile(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        sys.setprofile(None)
        return isinstance(error, Interrupted)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in {"call", "c_return"} or (event == "call" and goes_on(frame)) or not is_ours(frame):
            return
        self.left -= 1
        if self.left == 0 or (self.again and self.left == -self.again):
            self.where = frame.f_code.co_name if event == "call" and "dlock_core" in frame.f_code.co_filename else "-"
            raise Interrupted


def goes_on(frame: FrameType) -> bool:
    """Return whether a coroutine or generator does not begin, but continues after an `await` or `yield`."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti + 1] & RESUME_LOCATION > RESUME_AFTER_YIELD


def is_ours(frame: FrameType | None) -> bool:
    """Return whether our code is running, directly or through others; not in what an exception would break for ever."""
    while frame is not None:
        if frame.f_code.co_filename in BREAKABLE:
            return False
        if "dlock_core" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
