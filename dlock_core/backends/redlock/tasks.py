"""Ask several nodes at once from a task: one task more for each node."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dlock_core.backends.redis.wire import exchange, packed
from dlock_core.backends.redlock.node import GRACE
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dlock_core.backends.redlock.node import Node, Question
    from dlock_core.runtime import Runtime

__all__ = ["put"]


async def put(runtime: Runtime, nodes: Sequence[Node], asked: Iterable[int], question: Question) -> list[Any]:
    """Give an answer for each node, None where none came."""
    answers: list[Any] = [None] * len(nodes)
    carriers: list[Any] = [None] * len(nodes)
    data = packed([question.command])
    pending = {asyncio.ensure_future(_ask(runtime, nodes, place, carriers, question, data)): place for place in asked}
    until, decided = runtime.now() + question.limit, False
    try:
        while pending:
            if not decided and question.enough(answers):
                decided, until = True, min(until, runtime.now() + GRACE)
            left = until - runtime.now()
            if left <= 0 or (decided and not any(nodes[place].is_well for place in pending.values())):
                break
            done, _ = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                answers[pending.pop(task)] = task.result()
    finally:
        for task, place in pending.items():
            if not task.done():  # else its connection is somebody else's by now
                nodes[place].fail()
                _leave(task, nodes[place], carriers[place], question)
    return answers


def _leave(task: asyncio.Task[Any], node: Node, carrier: Any, question: Question) -> None:
    """Stop to listen to a node that is too slow."""
    if question.insists:
        node.tasks.leave(task)
        return
    if question.undo is not None and carrier is not None and carrier._writer is not None:
        carrier._writer.write(packed([question.undo]))
    task.cancel()  # its connection is closed: what it carries shall not linger


async def _ask(  # noqa: PLR0917 - a task's arguments
    runtime: Runtime, nodes: Sequence[Node], place: int, carriers: list[Any], question: Question, data: bytes
) -> Any:
    """Ask one node, on a connection that is taken here: a task that is cancelled before it begins has none to lose."""
    node = nodes[place]
    carrier = carriers[place] = node.tasks.checkout()
    try:
        (answer,) = await exchange(node.tasks, runtime, question.name, carrier, data, 1, question.limit)
    except BackendUnavailable as error:
        if not error.broken:
            node.fail()
        return error
    node.is_well = True
    return answer
