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
    connections = {place: nodes[place].tasks.checkout() for place in asked}
    data = packed([question.command])
    pending = {
        asyncio.ensure_future(_ask(runtime, nodes[place], connection, question, data)): place
        for place, connection in connections.items()
    }
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
                _leave(task, nodes[place], connections[place], question)
    return answers


def _leave(task: asyncio.Task[Any], node: Node, connection: Any, question: Question) -> None:
    """Stop to listen to a node that is too slow."""
    if question.insists:
        node.tasks.leave(task)
        return
    if question.undo is not None and connection._writer is not None:
        connection._writer.write(packed([question.undo]))
    task.cancel()  # its connection is closed, also when it had not begun: what it carries shall not linger
    task.add_done_callback(lambda ended: node.tasks.discard(connection) if ended.cancelled() else None)


async def _ask(runtime: Runtime, node: Node, connection: Any, question: Question, data: bytes) -> Any:
    try:
        (answer,) = await exchange(node.tasks, runtime, question.name, connection, data, 1, question.limit)
    except BackendUnavailable as error:
        if not error.broken:
            node.fail()
        return error
    node.is_well = True
    return answer
