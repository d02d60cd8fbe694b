"""The `with` blocks of locks: which lease belongs to a block that ends, in whatever thread or task that is."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dlock_core.errors import DLockError
from dlock_core.leases.callers import is_acquired_here
from dlock_core.runtime import ASYNCIO, BLOCKING, run

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from types import FrameType

    from dlock_core.runtime import Runtime

__all__ = ["AsyncBlockExit", "BlockExit", "Blocks"]

logger = logging.getLogger("dlock")

T = TypeVar("T")

_PASS_ON: Final = {
    "__enter__", "__exit__", "__aenter__", "__aexit__", "enter_context", "enter_async_context",
    "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>",
}  # fmt: skip
"""Functions between a `with` statement and the lock: of a subclass, of another context manager, of an ExitStack."""
_CONTEXTLIB: Final = vars(contextlib)
_HERE: Final = globals()
_CAN_MOVE: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
"""Only a generator can begin a block in one thread or task and end it in another."""
_NO_BLOCK: Final = (
    "this lock object is in no block that could end: end `with lock:` once, and what `lock.acquire()` returned by "
    "`lease.release()`"
)


class _Block:
    """A `with` block that has begun: the caller, the frame of the generator that it is in, if any, and its lease."""

    __slots__ = ("caller", "frame", "lease")

    def __init__(self, caller: Hashable, frame: FrameType | None, lease: Any) -> None:
        self.caller, self.frame, self.lease = caller, frame, lease


class Blocks:
    """The leases of the `with` blocks that each thread or task is in, so that all of them can share one lock object.

    A block may end in another thread or task than the one it began in if it is in a generator, such as a fixture or a
    dependency of FastAPI. The frame of the generator tells which lease it is. If the two ends of a block are called by
    other means, its lease is sought among those whose thread or task has ended. If there is more than one candidate,
    none is released: releasing the lease of a live holder would let in a second one.
    """

    __slots__ = ("_begun", "_unmatched")

    def __init__(self) -> None:
        self._begun: dict[int, _Block] = {}
        """The blocks that have begun and not ended, by the id of their lease, oldest first.

        Any thread may end any block, so every change is one operation on this dict, which no thread can interrupt."""
        self._unmatched: list[None] = []
        """An entry for each block that has ended while it was unknown which lease was its."""

    def __len__(self) -> int:
        return len(self._begun)

    def entering(self, caller: Hashable) -> Callable[[T], T]:
        """Return the function that records the lease of the block that begins, when `__enter__` has got it."""
        return partial(self.enter, caller, frame=_generator_of_block())

    def enter(self, caller: Hashable, lease: T, frame: FrameType | None = None) -> T:
        """Record the lease of a block that begins; `frame`: that of the generator which it is in."""
        self._begun[id(lease)] = _Block(caller, frame, lease)
        return lease

    def innermost(self, caller: Hashable, frame: FrameType | None = None) -> Any:
        """Return the lease of a block that ends, which stays here until `forget`; None if it cannot be determined."""
        blocks = [*self._begun.values()]
        if len(blocks) == 1 and blocks[0].caller is caller:  # The usual case, at little cost.
            return blocks[0].lease
        own = [block for block in blocks if block.caller is caller]
        same = [block for block in (own if frame is None else blocks) if block.frame is frame]
        if same:
            return same[-1].lease if frame is not None else _newest(same)
        if own and len(own) == len(blocks):  # No other thread or task is in a block.
            return _newest(own)
        return self._of_another_caller(blocks)

    def forget(self, lease: object) -> None:
        """Remove the lease of a block that is over, if it is here."""
        self._begun.pop(id(lease), None)
        if self._unmatched:
            left = [*self._begun.values()]
            if (ends := len(self._unmatched)) >= len(left):  # All these blocks have ended, though others may begin now.
                for block in left:  # A lease without other references is no longer renewed.
                    self._begun.pop(id(block.lease), None)
                del self._unmatched[:ends]

    def _of_another_caller(self, blocks: list[_Block]) -> Any:
        # A generator may go on in another thread than the one that has ended.
        ended = [block for block in blocks if block.frame is None and _has_ended(block.caller)]
        if len(blocks) == len(self._unmatched) + 1:  # As many blocks have ended as have begun.
            return blocks[-1].lease
        if len(ended) == 1:
            return ended[0].lease
        if len(self._unmatched) < len(blocks):
            self._unmatched.append(None)
        logger.warning(
            "dlock: a block ended in another thread or task than the one it began in, and it is unknown which of %d "
            "leases belongs to it: its lease is held until all blocks of this lock object have ended. Create a lock "
            "for each such block",
            len(blocks),
        )
        return None


def _newest(blocks: list[_Block]) -> Any:
    """Return the lease of a caller's newest block; greenlets of one thread are told apart by their contexts."""
    if len(blocks) > 1:
        for block in reversed(blocks):
            first = block.lease[0] if isinstance(block.lease, tuple) else block.lease
            if is_acquired_here(first._held):
                return block.lease
    return blocks[-1].lease


def _generator_of_block() -> FrameType | None:
    """Return the frame of the generator whose `with` statement has called `__enter__` or `__exit__`, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code, module = frame.f_code, frame.f_globals
        if code.co_name not in _PASS_ON and module is not _CONTEXTLIB and module is not _HERE:
            return frame if code.co_flags & _CAN_MOVE else None
        frame = frame.f_back
    return None


def _has_ended(caller: object) -> bool:
    """Return whether a thread or task has ended, so that it can no longer be in a block."""
    if isinstance(caller, threading.Thread):
        # A signal handler that raises in `is_alive` marks a living thread as ended (CPython before 3.13).
        return not caller.is_alive() and caller not in threading.enumerate()
    return isinstance(caller, asyncio.Future) and caller.done()


class BlockExit:
    """The end of a lock's `with` block, which releases the lease even if an interrupt arrives at any step of it."""

    _blocks: Blocks

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        ending: list[Any] = []
        try:
            run(
                end_block(
                    BLOCKING, self._blocks, threading.current_thread(), error, ending, frame=_generator_of_block()
                )
            )
        except DLockError:
            raise
        except BaseException:  # A signal handler has raised, at any step; every step can be repeated.
            run(
                end_block(
                    BLOCKING, self._blocks, threading.current_thread(), error, ending, frame=_generator_of_block()
                )
            )
            raise


class AsyncBlockExit:
    """Ends the `async with` block of a lock, or of several; see `BlockExit`."""

    _blocks: Blocks

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        ending: list[Any] = []
        try:
            await end_block(ASYNCIO, self._blocks, asyncio.current_task(), error, ending, frame=_generator_of_block())
        except DLockError:
            raise
        except BaseException:  # See `BlockExit`.
            await end_block(ASYNCIO, self._blocks, asyncio.current_task(), error, ending, frame=_generator_of_block())
            raise


async def end_block(
    runtime: Runtime,
    blocks: Blocks,
    caller: object,
    error: BaseException | None,
    ending: list[Any],
    *,
    frame: FrameType | None,
) -> None:
    """Release the lease of a `with` block, and check that it was held to the end of the block.

    The list `ending` records which lease that is. A caller that was interrupted in this function calls it again with
    the same list, so that the second call ends this block and not the one around it. Raises RuntimeError if no thread
    or task is in a block.
    """
    if not ending:
        if not blocks:  # `from error`: not from the first call, if this is the second.
            raise RuntimeError(_NO_BLOCK) from error
        ending += [blocks.innermost(caller, frame)]
    if (lease := ending[0]) is None:
        return
    try:
        await lease._leave_block(runtime, error)
    finally:
        blocks.forget(lease)
