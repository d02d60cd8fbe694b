"""Many questions put to their slots, those of a node in one write; nodes that are well are asked first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from redis.exceptions import AskError, NoScriptError, RedisError, TryAgainError

from dlock_core.backends.redis.wire import answered, converse, unavailable
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlock_core.backends.redis.cluster.node import Node
    from dlock_core.backends.redis.cluster.routes import Routes
    from dlock_core.backends.redis.cluster.slot import Slot
    from dlock_core.backends.redis.scripts import Script
    from dlock_core.backends.redis.wire import Command
    from dlock_core.runtime import Runtime

__all__ = ["Question", "put"]


class Question(NamedTuple):
    """A command that does no harm when it is asked twice; if it runs a script by its digest, also the script."""

    slot: Slot
    command: Command
    script: Script | None = None


async def put(routes: Routes, runtime: Runtime, name: str, questions: Sequence[Question], limit: float) -> list[Any]:
    """Give an answer for each, in order: BackendUnavailable where there is none. Raises it when nobody has the map."""
    answers: list[Any] = [None] * len(questions)
    for node, places in (await _by_node(routes, runtime, name, questions, limit)).items():
        try:
            told = await node.converse(runtime, name, [questions[place].command for place in places], limit)
        except BackendUnavailable as error:
            routes.doubt()
            told = [error] * len(places)
        for place, answer in zip(places, told, strict=True):
            answers[place] = answer
    return [
        await _proper(runtime, name, question, answer, limit)
        for question, answer in zip(questions, answers, strict=True)
    ]


async def _by_node(
    routes: Routes, runtime: Runtime, name: str, questions: Sequence[Question], limit: float
) -> dict[Node, list[int]]:
    until = runtime.now() + limit
    found: dict[Node, list[int]] = {}
    for place, question in enumerate(questions):
        try:
            node = await routes.owner(runtime, question.slot.number, until)
        except RedisError as error:
            raise unavailable(name, error, reused=False) from error
        found.setdefault(node, []).append(place)
    return dict(sorted(found.items(), key=lambda item: item[0].failed_at))


async def _proper(runtime: Runtime, name: str, question: Question, answer: Any, limit: float) -> Any:
    """Follow a refusal of one, alone; it also learns its script."""
    try:
        if isinstance(answer, AskError | TryAgainError | NoScriptError):
            command = question.command
            if question.script is not None:
                command = ("EVAL", question.script.text, *command[2:])
            (answer,) = await converse(question.slot, runtime, name, [command], limit)
        return answered(name, answer)
    except BackendUnavailable as error:
        return error
