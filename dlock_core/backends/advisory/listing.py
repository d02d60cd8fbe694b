"""Who holds and who awaits PostgreSQL's advisory locks, as its own tables tell it.

A lock whose name nobody tells is not listed: it may be another program's, and is seen when its name is asked for.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from dlock_core.backend import Holder, LockState, Waiter
from dlock_core.backends.advisory import statements
from dlock_core.backends.advisory.keys import key_of
from dlock_core.backends.advisory.labels import Told, comment, in_comment, in_label
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dlock_core.backends.advisory.lines import Seat
    from dlock_core.backends.sql import Pool
    from dlock_core.runtime import Runtime

__all__ = ["Row", "Sessions", "owner_of", "state_of", "states_of"]


class Row(NamedTuple):
    """One session at one lock."""

    key: int
    granted: bool
    shared: bool
    pid: int
    application_name: str
    query: str
    login: str
    database: str
    now: float
    since: float | None

    def told(self, prefix: str) -> Told:
        """Put together what the session tells of this lock."""
        label = in_label(self.application_name, prefix, self.key) or Told()
        comment = in_comment(self.query)
        if comment is None or key_of(comment.name, prefix) != self.key:
            return label
        return comment._replace(token=label.token)


def state_of(name: str, rows: Iterable[Row], prefix: str) -> LockState:
    """Make the state of one lock, of its rows in their order."""
    rows = list(rows)
    holders = tuple(_holder(row, prefix) for row in rows if row.granted)
    return LockState(name, holders, tuple(_waiter(row, prefix) for row in rows if not row.granted))


def states_of(rows: Iterable[Row], prefix: str) -> list[LockState]:
    """Make the states of all locks whose names are told."""
    by_key, names = defaultdict[int, list[Row]](list), dict[int, str]()
    for row in rows:
        by_key[row.key].append(row)
        if name := row.told(prefix).name:
            names[row.key] = name
    return [state_of(name, by_key[key], prefix) for key, name in names.items()]


def owner_of(row: Row, prefix: str) -> str:
    """Tell who it is: what the holder said of itself, or else what the database knows of the session."""
    session = {"app": row.application_name.partition(prefix)[0].strip() or "session", "host": row.login, "pid": row.pid}
    return row.told(prefix).owner or json.dumps({**session, "session": f"pg:{row.pid}/{row.database}"})


def _with(row: Row, ours: Mapping[int, Seat]) -> Row:
    seat = ours.get(row.pid)
    return row if seat is None else row._replace(query=comment(seat.request))


def _holder(row: Row, prefix: str) -> Holder:
    told = row.told(prefix)
    held = max(0.0, row.now - told.token / 1e6) if told.token else None
    return Holder(told.holder or f"{row.pid:08}", told.token, row.shared, owner_of(row, prefix), None, held)


def _waiter(row: Row, prefix: str) -> Waiter:
    waited = None if row.since is None else max(0.0, row.now - row.since)
    return Waiter(row.told(prefix).holder or f"{row.pid:08}", row.shared, owner_of(row, prefix), waited)


class Sessions:
    """What an operator sees of PostgreSQL's advisory locks, and may end, on connections of our own."""

    def __init__(self, pool: Pool, prefix: str) -> None:
        self._pool, self._prefix = pool, prefix

    async def inspect(self, runtime: Runtime, name: str | None, ours: Sequence[Seat] = ()) -> list[LockState]:
        """Show one lock, or all whose names are told; what our own sessions have not told yet is known here."""
        by_number = {seat.line.number: seat for seat in ours}
        statement = statements.LISTED if name is None else statements.LISTED_KEY
        rows = [_with(Row(*row), by_number) for row in await self._ask(runtime, name or "", statement)]
        return states_of(rows, self._prefix) if name is None else [state_of(name, rows, self._prefix)]

    async def force_release(self, runtime: Runtime, name: str, token: int) -> bool:
        """End the session that holds with this token; True when it is gone."""
        return await self._terminate(runtime, name, statements.TERMINATE_LABELLED, label=f" {self._prefix}{token}#")

    async def is_held(self, runtime: Runtime, name: str) -> bool:
        """Tell whether anybody holds a lock."""
        return bool(await self._ask(runtime, name, statements.ANYBODY))

    async def end(self, runtime: Runtime, name: str, pid: int) -> bool:
        """End a session if it is at this lock; True when it is gone."""
        return await self._terminate(runtime, name, statements.TERMINATE, pid=pid)

    def close(self) -> None:
        """Close idle connections."""
        self._pool.close()

    async def _terminate(self, runtime: Runtime, name: str, sql: str, **params: Any) -> bool:
        until, found = runtime.now() + self._pool.timeout, False
        while await self._ask(runtime, name, sql, **params):
            found = True
            if runtime.now() >= until:
                raise BackendUnavailable(name, reason="its holder was told to end, and goes on")
            await runtime.sleep(0.005)
        return found

    async def _ask(self, runtime: Runtime, name: str, sql: str, **params: Any) -> list[tuple[Any, ...]]:
        params["key"] = key_of(name, self._prefix)
        return await self._pool.step(runtime, name, lambda session: session.execute(sql, params))
