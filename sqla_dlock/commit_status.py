"""The outcome of a COMMIT without a reply: a query to PostgreSQL, by the transaction's number."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from sqlalchemy import text
from sqlalchemy.util.concurrency import greenlet_spawn

from dlock_core.backends.sql import Handover
from dlock_core.runtime import start_thread
from dlock_core.transactions.tie import Outcome
from sqla_dlock.greenlets import await_

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine

__all__ = ["outcome_of"]

MAX_STATUS_WAIT_S: Final = 5.0
"""Seconds by which the query for the outcome may delay a failed COMMIT."""
_STATUS_POLL_INTERVAL_S: Final = 0.02

# pg_xact_status: https://www.postgresql.org/docs/current/functions-info.html#FUNCTIONS-PG-SNAPSHOT
_STATUS_OF: Final = text("SELECT pg_xact_status(CAST(CAST(:xid AS text) AS xid8))")
_SLEEP: Final = text("SELECT pg_sleep(:pause)")
_OUTCOMES: Final = {"committed": Outcome.COMMITTED, "aborted": Outcome.ROLLED_BACK, None: Outcome.UNKNOWN}


def outcome_of(engine: Engine, xid: str | None) -> Outcome:
    """Query the outcome of a transaction on another connection; UNKNOWN without its number, or a timely answer."""
    if xid is None or engine.dialect.name != "postgresql":
        return Outcome.UNKNOWN
    query = _await if engine.dialect.is_async else _ask_in_thread
    try:
        return query(partial(_ask_status, engine, xid))
    except Exception:  # noqa: BLE001 - no answer is an answer: UNKNOWN
        return Outcome.UNKNOWN


def _await(ask: Callable[[], Outcome]) -> Outcome:
    return await_(asyncio.wait_for(greenlet_spawn(ask), MAX_STATUS_WAIT_S))


def _ask_in_thread(ask: Callable[[], Outcome]) -> Outcome:
    """Query in a thread: with an unreachable server, `connect()` may block for minutes."""
    query = Handover(ask)
    start_thread(threading.Thread(target=query.perform, name="dlock-commit-status", daemon=True))
    if not query.wait(MAX_STATUS_WAIT_S):
        raise TimeoutError
    return query.outcome()


def _ask_status(engine: Engine, xid: str) -> Outcome:
    with engine.connect() as connection:
        while (status := connection.scalar(_STATUS_OF, {"xid": xid})) == "in progress":
            # The server's sleep is one way to wait, with asyncio or without.
            connection.execute(_SLEEP, {"pause": _STATUS_POLL_INTERVAL_S})
    return _OUTCOMES[status]
