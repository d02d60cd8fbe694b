"""Asks PostgreSQL what has become of a COMMIT whose answer is missing."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Final

from sqlalchemy import text
from sqlalchemy.util.concurrency import greenlet_spawn

from dlock_core.tie import Outcome
from sqla_dlock.greenlets import await_

if TYPE_CHECKING:
    from sqlalchemy import Engine

__all__ = ["WITHIN", "outcome_of"]

WITHIN: Final = 5.0
"""Seconds that a failed COMMIT may last longer, because we ask."""
_PAUSE: Final = 0.02

# pg_xact_status: https://www.postgresql.org/docs/current/functions-info.html#FUNCTIONS-PG-SNAPSHOT
_ASK: Final = text("SELECT pg_xact_status(CAST(CAST(:xid AS text) AS xid8))")
_SLEEP: Final = text("SELECT pg_sleep(:pause)")
_OUTCOMES: Final = {"committed": Outcome.COMMITTED, "aborted": Outcome.ROLLED_BACK, None: Outcome.UNKNOWN}


def outcome_of(engine: Engine, xid: str | None) -> Outcome:
    """Say how a transaction has ended, on another connection; UNKNOWN without its number, or in time."""
    if xid is None or engine.dialect.name != "postgresql":
        return Outcome.UNKNOWN
    if engine.dialect.is_async:
        return _await_answer(engine, xid)
    return _answer_of_thread(engine, xid)


def _await_answer(engine: Engine, xid: str) -> Outcome:
    try:
        return await_(asyncio.wait_for(greenlet_spawn(_ask, engine, xid), WITHIN))
    except Exception:  # noqa: BLE001 - no answer is an answer: UNKNOWN
        return Outcome.UNKNOWN


def _answer_of_thread(engine: Engine, xid: str) -> Outcome:
    """Wait for it in a thread: a server that cannot be reached may keep `connect()` for minutes."""
    answers: list[Outcome] = []

    def ask() -> None:
        try:
            answers.append(_ask(engine, xid))
        except Exception:  # noqa: BLE001
            answers.append(Outcome.UNKNOWN)

    thread = threading.Thread(target=ask, name="dlock-commit-status", daemon=True)
    thread.start()
    thread.join(WITHIN)
    return answers[0] if answers else Outcome.UNKNOWN


def _ask(engine: Engine, xid: str) -> Outcome:
    with engine.connect() as connection:
        while (status := connection.scalar(_ASK, {"xid": xid})) == "in progress":
            connection.execute(_SLEEP, {"pause": _PAUSE})  # the server's: one way to wait, with asyncio or without
    return _OUTCOMES[status]
