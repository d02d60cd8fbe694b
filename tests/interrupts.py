"""Raises at each executed line in turn, as a signal handler might, and shows what that leaves behind.

A `with` is excluded: its line is traced once more before the block is left, where a trace function may raise and
CPython never runs a signal handler.
"""

import gc
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple, Self
from weakref import ref

from dlock_core.leases.lease import LeaseRecord, LeaseState
from dlock_core.observability import hooks

OURS = ("/dlock_core/", "/django_dlock/", "/sqla_dlock/")
TELLS_OTHERS = ("emit", "__del__", "note_collected", "is_over", "abandon")
"""Where an exception cannot surface: in hooks, whose errors are logged, and in finalizers."""


class SoftLimit(Exception):
    """What a signal handler raises, such as Celery's at a task's time limit."""


@dataclass(frozen=True)
class Line:
    """The place of an interrupt."""

    file: str
    number: int
    function: str


class Place(NamedTuple):
    """A line, and the line that its function was called from."""

    code: CodeType
    line: int
    caller: CodeType | None
    called_at: int

    @classmethod
    def of(cls, frame: FrameType) -> Self:
        caller = frame.f_back
        return cls(frame.f_code, frame.f_lineno, caller and caller.f_code, caller.f_lineno if caller else 0)


class Tracer:
    """Notes the places that are executed in some files, or raises before one of them, the first time."""

    def __init__(self, files: Sequence[str], at: Place | None = None, error: type[BaseException] = SoftLimit) -> None:
        self._files, self._at, self._error = tuple(files), at, error
        self._known: dict[CodeType, bool] = {}
        self._withs: dict[tuple[CodeType, int], bool] = {}
        self.places: dict[Place, None] = {}
        """In the order in which they were first executed."""
        self.hit: Line | None = None
        self._traces = self._note_lines if at is None else self._seek
        """Python 3.11 may call a trace function that it has freed, which ends the process: this keeps it."""

    def __enter__(self) -> Self:
        sys.settrace(self._traces)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _note_lines(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        is_ours = self._known.get(code)
        if is_ours is None:
            is_ours = any(part in code.co_filename for part in self._files) and "/tests/" not in code.co_filename
            self._known[code] = is_ours
        return self._note if is_ours else None

    def _note(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not self._is_with(frame):
            self.places.setdefault(Place.of(frame))
        return self._note

    def _seek(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace the lines of one function only: those of all took as long as the work itself."""
        at = self._at
        assert at is not None
        is_there = frame.f_code is at.code and Place.of(frame)[2:] == at[2:]
        return self._raise if is_there else None

    def _raise(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and Place.of(frame) == self._at and self.hit is None:
            self.hit = Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
            raise self._error
        return self._raise

    def _is_with(self, frame: FrameType) -> bool:
        place = (frame.f_code, frame.f_lineno)
        if (found := self._withs.get(place)) is None:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
            found = self._withs[place] = line.startswith(("with ", "async with "))
        return found


@contextmanager
def grants() -> Iterator[list[ref[LeaseRecord]]]:
    """Yield weak references to the leases that are granted meanwhile."""
    found: list[ref[LeaseRecord]] = []

    def hear(event: hooks.Event) -> None:
        if event.kind == "acquired" and isinstance(event.lease, LeaseRecord):
            found.append(ref(event.lease))

    hooks.subscribe(hear)
    try:
        yield found
    finally:
        hooks.unsubscribe(hear)


def renewed(granted: Sequence[ref[LeaseRecord]]) -> list[LeaseRecord]:
    """Return those that are renewed for as long as this process lives."""
    if any(_is_renewed(each()) for each in granted):
        gc.collect()  # a lease that only a cycle keeps alive does not count
    return [held for each in granted if _is_renewed(held := each()) and held is not None]


def _is_renewed(held: LeaseRecord | None) -> bool:
    return held is not None and held.state is LeaseState.HELD


def each_line(
    work: Callable[[], object], files: Sequence[str], error: type[BaseException] = SoftLimit
) -> Iterator[tuple[Line, list[ref[LeaseRecord]], bool]]:
    """Do the work again and again, interrupted at each line in turn, once for each place that calls its function.

    Yields the line, the grants and whether the interrupt surfaced, before anything is cleaned up.
    """
    with Tracer(files) as counting:
        work()
    for at in counting.places:
        surfaced = False
        with grants() as granted:
            tracer = Tracer(files, at, error)
            try:
                with tracer:
                    work()
            except Exception as found:  # may be a library's error, because its state is broken
                surfaced = any(isinstance(each, error) for each in _chain(found))
            except error:
                surfaced = True
        if tracer.hit is not None:  # else this run was shorter than the first
            yield tracer.hit, granted, surfaced


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__context__
