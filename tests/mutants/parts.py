"""The files and the tests of each part, and the mutants that no test can notice."""

from dataclasses import dataclass
from typing import Final

LUA: Final = "dlock_core/backends/redis/lua"


@dataclass(frozen=True)
class Part:
    files: tuple[str, ...]
    """Patterns, from the root of the project."""
    tests: tuple[str, ...]
    """Arguments of pytest."""
    users: tuple[str, ...] = ()
    """Patterns of files that use a part that runs at import only: a test that runs a line there uses the part."""


PARTS: Final = {
    "release": Part((f"{LUA}/release.lua",), ("tests/contract/test_redis_scripts.py tests/contract/test_redis.py",)),
    "lua": Part(
        (f"{LUA}/*.lua",),
        (
            "tests/contract/test_redis_scripts.py tests/contract/test_redis.py tests/contract/test_redis_clients.py",
            "tests/contract/test_redlock_scripts.py tests/contract/test_cluster_scripts.py tests/core/test_many.py",
            "tests/inspect tests/faults/test_deaths.py tests/faults/test_crowd.py tests/faults/test_foreign.py",
        ),
    ),
    "leases": Part(
        (
            "dlock_core/leases/acquisition.py",
            "dlock_core/leases/callers.py",
            "dlock_core/leases/engine.py",
            "dlock_core/leases/lease.py",
            "dlock_core/leases/late_releases.py",
            "dlock_core/leases/watchdog.py",
        ),
        (
            "tests/core/test_callers.py tests/core/test_engine.py tests/core/test_lease.py tests/core/test_lock.py",
            "tests/core/test_watchdog.py",
            "tests/core/test_many.py tests/core/test_interrupted.py tests/core/test_stateful.py tests/core/test_hooks.py",
            "tests/core/test_late_releases.py",
            "tests/core/test_observability.py tests/core/test_in_a_loop.py tests/core/test_scheduler.py",
            "tests/contract/test_memory.py tests/django_dlock/test_locks.py tests/sqla_dlock/test_locks.py",
            "tests/sqla_dlock/test_advisory.py",
        ),
    ),
    "tie": Part(
        (
            "dlock_core/transactions/tie.py",
            "dlock_core/transactions/tied_lease.py",
            "dlock_core/transactions/transaction_lock.py",
            "dlock_core/transactions/multilock.py",
            "django_dlock/thread_calls.py",
            "django_dlock/ownership.py",
            "django_dlock/calls.py",
            "django_dlock/tie.py",
            "django_dlock/acquire.py",
            "django_dlock/transactions.py",
            "django_dlock/connections.py",
            "django_dlock/atomic_blocks.py",
            "django_dlock/implicit_commits.py",
            "django_dlock/tracker.py",
            "sqla_dlock/tie.py",
            "sqla_dlock/transactions.py",
            "sqla_dlock/begun.py",
            "sqla_dlock/connections.py",
            "sqla_dlock/first_statement.py",
            "sqla_dlock/root_transaction.py",
            "sqla_dlock/commit_status.py",
        ),
        (
            "tests/scenarios/test_tie.py tests/scenarios/test_fence_of_leases.py",
            "tests/django_dlock/test_locks.py tests/django_dlock/test_transactions.py",
            "tests/django_dlock/test_transactions_lost.py tests/django_dlock/test_transactions_in_testcases.py",
            "tests/django_dlock/test_transactions_statements.py tests/django_dlock/test_displaced.py",
            "tests/django_dlock/test_blocks_elsewhere.py tests/django_dlock/test_async.py",
            "tests/django_dlock/test_ownership.py tests/django_dlock/test_ownership_at_random.py tests/django_dlock/test_flows.py",
            "tests/django_dlock/test_ownership_in_calls.py tests/django_dlock/test_ownership_in_calls_at_random.py",
            "tests/django_dlock/test_together.py tests/django_dlock/test_advisory.py",
            "tests/django_dlock/test_own_statements.py",
            "tests/sqla_dlock/test_locks.py tests/sqla_dlock/test_locks_async.py tests/sqla_dlock/test_transactions.py",
            "tests/sqla_dlock/test_transactions_async.py tests/sqla_dlock/test_transactions_lost.py",
            "tests/sqla_dlock/test_transactions_statements.py tests/sqla_dlock/test_blocks_elsewhere.py",
            "tests/django_dlock/test_without_autocommit.py tests/sqla_dlock/test_implicit_commits.py",
            "tests/sqla_dlock/test_together.py tests/sqla_dlock/test_advisory.py",
            "tests/sqla_dlock/test_snapshots.py tests/django_dlock/test_fencing.py tests/sqla_dlock/test_fencing.py",
            "tests/django_dlock/test_retry.py tests/sqla_dlock/test_retry.py tests/inspect/test_marks.py",
        ),
    ),
    "fencing": Part(
        ("dlock_core/transactions/fencing.py", "dlock_core/transactions/fence_sql.py", "sqla_dlock/fence_columns.py"),
        (
            "tests/core/test_row_fence.py tests/scenarios/test_fence_in_transaction.py tests/scenarios/test_fence_of_leases.py",
            "tests/django_dlock/test_fencing.py tests/django_dlock/test_fence_functions.py tests/django_dlock/test_command.py",
            "tests/sqla_dlock/test_fencing.py tests/sqla_dlock/test_fencing_rows.py tests/sqla_dlock/test_fencing_async.py",
            "tests/sqla_dlock/test_fence_functions.py",
        ),
    ),
    "table": Part(
        ("dlock_core/backends/table/statements.py",),
        (
            "tests/contract/test_table_clock.py tests/contract/test_table.py tests/contract/test_table_drivers.py",
            "tests/core/test_table_waiting.py",
            "tests/django_dlock/test_lease_table.py tests/sqla_dlock/test_lease_table.py tests/faults/test_table.py tests/faults/test_sql.py",
        ),
        users=("dlock_core/backends/table/backend.py",),
    ),
    "rows": Part(
        ("dlock_core/sql/row_locks.py", "django_dlock/row_sql.py", "sqla_dlock/row_sql.py"),
        (
            "tests/core/test_row_locks.py tests/core/test_options.py tests/core/test_http.py",
            "tests/django_dlock/test_rows.py tests/sqla_dlock/test_rows.py",
            "tests/django_dlock/test_errors.py tests/sqla_dlock/test_fencing_rows.py",
        ),
    ),
    "advisory": Part(
        ("dlock_core/backends/advisory/postgresql.py", "dlock_core/backends/advisory/mysql.py"),
        (
            "tests/contract/test_advisory.py tests/core/test_advisory.py tests/django_dlock/test_advisory.py",
            "tests/sqla_dlock/test_advisory.py tests/inspect/test_advisory.py tests/faults/test_advisory.py",
        ),
    ),
    "locks": Part(
        (
            "dlock_core/leases/lock.py",
            "dlock_core/leases/handles.py",
            "dlock_core/leases/blocks.py",
            "dlock_core/leases/multilock.py",
        ),
        (
            "tests/core/test_lock.py tests/core/test_many.py tests/core/test_interrupted.py tests/core/test_lease.py",
            "tests/core/test_options.py tests/core/test_in_a_loop.py tests/core/test_observability.py",
            "tests/core/test_late_releases.py tests/contract/test_memory.py tests/contract/test_redis.py",
        ),
    ),
    "retry": Part(
        ("dlock_core/transactions/retry.py", "django_dlock/retry.py", "sqla_dlock/retry.py"),
        ("tests/core/test_retry.py tests/django_dlock/test_retry.py tests/sqla_dlock/test_retry.py",),
    ),
    "versions": Part(
        (
            "dlock_core/sql/versions.py",
            "django_dlock/version_field.py",
            "django_dlock/versions.py",
            "django_dlock/versioned_querysets.py",
            "django_dlock/comparisons.py",
            "django_dlock/lazy.py",
            "django_dlock/refresh.py",
            "django_dlock/historical.py",
            "sqla_dlock/statements.py",
            "sqla_dlock/versions/*.py",
        ),
        (
            "tests/django_dlock/test_versions.py tests/django_dlock/test_versions_shapes.py tests/django_dlock/test_own_delete.py",
            "tests/sqla_dlock/test_versions.py tests/sqla_dlock/test_versions_mapping.py",
            "tests/sqla_dlock/test_versions_sessions.py tests/sqla_dlock/test_versions_bulk.py",
            "tests/sqla_dlock/test_versions_expected.py tests/sqla_dlock/test_versions_undone.py",
            "tests/sqla_dlock/test_versions_savepoints.py tests/sqla_dlock/test_versions_model.py",
            "tests/sqla_dlock/test_aggregates.py tests/django_dlock/test_versions_model.py",
            "tests/django_dlock/test_rest.py",
        ),
    ),
    "requests": Part(
        (
            "django_dlock/rest.py",
            "django_dlock/shown_versions.py",
            "django_dlock/preconditions.py",
            "django_dlock/version_field.py",
        ),
        (
            "tests/django_dlock/test_rest.py tests/django_dlock/test_shown_versions.py tests/django_dlock/test_preconditions.py",
            "tests/django_dlock/test_versions.py tests/django_dlock/test_forms.py tests/django_dlock/test_own_delete.py",
        ),
    ),
}

EXPLAINED: Final[dict[str, str]] = {
    f"{LUA}/queue.lua: local lives = alive and (alive + 0 >= now or redis.call('EXISTS', list .. ':alive') == 1) "
    "→ local lives = alive and (alive + 1 >= now or redis.call('EXISTS', list .. ':alive') == 1)": (
        "a waiter counts as alive for a millisecond more"
    ),
    f"{LUA}/queue.lua: local LINGER = 10000 → local LINGER = 10001": "a queue stays for a millisecond more",
    f"{LUA}/acquire.lua: if redis.call('PTTL', queue) < linger * 0.8 then "
    "→ if redis.call('PTTL', queue) <= linger * 0.8 then": "the queue's ttl is pushed a millisecond earlier",
    f"{LUA}/confirm.lua: local now = at[1] * 1000 + math.floor(at[2] / 1000) "
    "→ local now = at[1] * 1000 + math.floor(at[2] / 1001)": "the clock is a millisecond slow at most",
    f"{LUA}/tokens.lua: local clock = text + 0 → local clock = text - 0": "either makes the text a number",
    f"{LUA}/held_locks.lua: local found, over = redis.call('SSCAN', index, cursor, 'COUNT', 16), 0 "
    "→ local found, over = redis.call('SSCAN', index, cursor, 'COUNT', 17), 0": "one lock more is looked at each time",
    f"{LUA}/held_locks.lua: if token % 64 ~= 0 then return end "
    "→ if token % 65 ~= 0 then return end": "one draw in 65 tidies up",
    "dlock_core/leases/acquisition.py: if isinstance(error, BackendUnavailable) and runtime.now() > until + MAX_OVERTIME_S: "
    "→ if isinstance(error, BackendUnavailable) and runtime.now() >= until + MAX_OVERTIME_S:": "both keep the bound",
    "dlock_core/leases/late_releases.py: late.attempts += 1 → late.attempts += 2": "the order is the same",
    "dlock_core/leases/late_releases.py: self.holder, self.step, self.until, self.attempts = (holder, step, until, 0) "
    "→ self.holder, self.step, self.until, self.attempts = (holder, step, until, 1)": "the order is the same",
    "dlock_core/leases/watchdog.py: TICKS_PER_S: Final = 32 → TICKS_PER_S: Final = 33": "a look a millisecond earlier",
    "dlock_core/leases/late_releases.py: if is_away and clock() > began + MAX_FAILING_S: "
    "→ if is_away and clock() >= began + MAX_FAILING_S:": "the clock is never that exact",
    "dlock_core/leases/lease.py: self._releases = (*self._releases[:1], holds) "
    "→ self._releases = (*self._releases[:2], holds)": "the first decides: what has run out does not hold again",
    "dlock_core/leases/watchdog.py: …ks = [tick for tick in [*self._due] if tick <= now or (clean and (not self._due[tick]))] "
    "→ ticks = [tick for tick in [*self._due] if tick < now or (clean and (not self._due[tick]))]": (
        "what is due at this very moment is found at the next look"
    ),
    "dlock_core/leases/watchdog.py: self.plan(min(held.remaining(), max(held.request.ttl / 20, 1 / TICKS_PER_S)), held) "
    "→ self.plan(min(held.remaining(), max(held.request.ttl / 20, 2 / TICKS_PER_S)), held)": "it is asked a tick later",
    "sqla_dlock/connections.py: self.listens = False → self.listens = True": (
        "a connection that nobody listens to is told once more that nobody does"
    ),
    "sqla_dlock/versions/flush.py: for some in in_parts(writes) if len(writes) > 1 else (): "
    "→ for some in in_parts(writes) if len(writes) >= 1 else ():": (
        "a row that is alone is written by one UPDATE with the same check, here or by the flush that follows"
    ),
    "sqla_dlock/versions/conflicts.py: if len(rows) > MAX_ROWS_PER_QUERY: → if len(rows) >= MAX_ROWS_PER_QUERY:": (
        "exactly as many rows as one query takes are sorted without need"
    ),
    "dlock_core/transactions/fence_sql.py: …S_MARKED: Final = 'SELECT CASE WHEN s_token > token THEN 1 ELSE 0 END FROM dlock_fence WHE… → …S_MARKED: Final = 'SELECT CASE WHEN s_token >= token THEN 1 ELSE 0 END FROM dlock_fence WH…": "a mark is never equal to a token: what has the same one is refused",
    "dlock_core/transactions/fence_sql.py: … dlock_fence WHERE name = :name AND s_token > token' → … dlock_fence WHERE name = :name AND s_token >= token'": "a mark is never equal to a token: what has the same one is refused",
    "dlock_core/transactions/fence_sql.py: …fence AS m WHERE m.name = {n} AND m.s_token > m.token)' → …fence AS m WHERE m.name = {n} AND m.s_token >= m.token)'": "a mark is never equal to a token: what has the same one is refused",
    "dlock_core/transactions/fence_sql.py: …'SELECT 1 FROM dlock_fence WHERE {_OURS} FOR UPDATE'), share=f'{_MARKED_TOKEN} LOCK IN SHA… → …'SELECT 1 FROM dlock_fence WHERE {_OURS} FOR SHARE'), share=f'{_MARKED_TOKEN} LOCK IN SHAR…": "the INSERT before it has locked the row; this reads the newest version of it, either way",
    "dlock_core/transactions/fence_sql.py: …'SELECT 1 FROM dlock_fence WHERE {_OURS} FOR UPDATE', confirm_shared=f'SELECT 1 FROM dlock… → …'SELECT 1 FROM dlock_fence WHERE {_OURS} FOR SHARE', confirm_shared=f'SELECT 1 FROM dlock_…": "a newer holder waits for either lock; only transactions of the same lease confirm side by side",
    f"{LUA}/acquire.lua: if last >= arrival + 0 then arrival = last + 1 end  -- last in the queue even if the clock was set back "
    "→ if last > arrival + 0 then arrival = last + 1 end  -- last in the queue even if the clock was set back": (
        "no two requests begin in the same microsecond"
    ),
    f"{LUA}/tokens.lua: return counter and counter < clock + 315576000000000 and math.floor(counter) or 0 "
    "→ return counter and counter <= clock + 315576000000000 and math.floor(counter) or 0": (
        "a token that is ten years ahead to the microsecond is not found damaged"
    ),
    f"{LUA}/queue.lua: text = holder .. '|' .. text .. '|' .. (floor + 0 > 0 and '0' or '') .. time[1] .. '|' .. owner "
    "→ text = holder .. '|' .. text .. '|' .. (floor + 0 > 1 and '0' or '') .. time[1] .. '|' .. owner": (
        "a floor is a token, which is a time in microseconds: none is 1"
    ),
    f"{LUA}/acquire_many.lua: local last, found = math.min(first + 999, #KEYS), {{unpack(KEYS, first, math.min(first + 999, #KEYS))}} "
    "→ local last, found = math.min(first + 1000, #KEYS), {unpack(KEYS, first, math.min(first + 999, #KEYS))}": (
        "one lock of a thousand is looked at twice"
    ),
    f"{LUA}/inspect.lua: local now = time[1] * 1000 + math.floor(time[2] / 1000) "
    "→ local now = time[1] * 1000 + math.floor(time[2] / 1001)": "the clock is a millisecond slow at most",
    "dlock_core/transactions/fence_sql.py: …locked('f.token', 'name = :name AND s_token > token', 'SHARE'), is_marked=_IS_MARKED, mark… → …locked('f.token', 'name = :name AND s_token >= token', 'SHARE'), is_marked=_IS_MARKED, mar…": "a mark is never equal to a token: what has the same one is refused",
    "dlock_core/transactions/fence_sql.py: …), dlock_fence.holder),\\ntoken = IF(s_token < VALUES(token), GREATEST(dlock_fence.token, V… → …), dlock_fence.holder),\\ntoken = IF(s_token <= VALUES(token), GREATEST(dlock_fence.token, …": "a mark is never equal to a token: what has the same one is refused",
    "dlock_core/backends/table/statements.py: UNUSED: Final = 32 → UNUSED: Final = 33": "one row more goes at a time",
    "dlock_core/backends/table/statements.py: …HANNEL}', name)) FILTER (WHERE wanted_until > {_POSTGRESQL_NOW}) FROM ended\" → …HANNEL}', name)) FILTER (WHERE wanted_until >= {_POSTGRESQL_NOW}) FROM ended\"": "one notification more, of which a waiter learns nothing wrong",
    "dlock_core/backends/advisory/postgresql.py: await runtime.sleep(0.005) → pass": "it asks more often whether the session is gone",
    "dlock_core/backends/advisory/mysql.py: waiting = await self._waiting(runtime, name or '') → waiting = await self._waiting(runtime, name and '')": "the name is told in an error only",
    "dlock_core/leases/acquisition.py: self.sent = self.runtime.now() → pass": "it is asked once more when its wait is over",
    "dlock_core/leases/late_releases.py: if began < self._due: → if began <= self._due:": "the clock is never that exact",
    "dlock_core/sql/versions.py: def first_version(bits: int=63) -> int: → def first_version(bits: int=64) -> int:": (
        "either column has room for the time"
    ),
    "sqla_dlock/versions/in_memory.py: state.info[_READ_LATE] = True → state.info[_READ_LATE] = False": "its presence counts",
    "sqla_dlock/versions/matches.py: execution.statement = statement.where(false()) → pass": (
        "the key of an instance names its shard, so that no row is found that was loaded; but all that match are read"
    ),
    "sqla_dlock/versions/mapping.py: _BITS: Final = {BigInteger: 63, SmallInteger: 15} "
    "→ _BITS: Final = {BigInteger: 64, SmallInteger: 15}": "either column has room for the time",
    "sqla_dlock/versions/undone.py: if _failed and (not session.in_nested_transaction()): "
    "→ if _failed or not session.in_nested_transaction():": "with no error there is nothing to find, at any end",
    "sqla_dlock/versions/writes.py: if name == version_name or not history.has_changes(): "
    "→ if name == version_name and (not history.has_changes()):": (
        "an attribute that was set to what it was takes a flush, which does not write it"
    ),
    "dlock_core/leases/handles.py: raise NotImplementedError → pass": "every class that is released has a step of its own",
    "dlock_core/transactions/fence_sql.py: PURGE_BATCH_SIZE: Final = 500 → PURGE_BATCH_SIZE: Final = 501": (
        "one row more is deleted at a time"
    ),
    "dlock_core/transactions/fence_sql.py: before = int(time.time() * 1000000) - days * MICROSECONDS_PER_DAY "
    "→ before = int(time.time() * 1000001) - days * MICROSECONDS_PER_DAY": "half an hour in a limit that is given in days",
    "dlock_core/transactions/fencing.py: MAX_TRIES_TO_MARK: Final = 10 → MAX_TRIES_TO_MARK: Final = 11": "one try more to leave a mark is as good",
    'dlock_core/transactions/fencing.py: …HEST: Final = "SELECT MAX(CASE WHEN s_token > token THEN s_token ELSE token END) FROM dloc… → …HEST: Final = "SELECT MAX(CASE WHEN s_token >= token THEN s_token ELSE token END) FROM dlo…': "a mark is never equal to a token: what has the same one is refused",
    "django_dlock/versions.py: return [] → return None": "Django asks only whether a row was updated",
    "django_dlock/preconditions.py: raise _not_found(self.model, value) from None → pass": (
        "None is the key of no row, which is a 404 as well"
    ),
    "django_dlock/preconditions.py: request = next((each for each in args[:2] if hasattr(each, 'META'))) "
    "→ request = next((each for each in args[:3] if hasattr(each, 'META')))": (
        "the request is the first argument of a view, or the second of a method"
    ),
}
"""Mutants that no test can notice, by their names in a report without the line number, each with the reason."""
