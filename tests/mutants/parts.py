"""Which files and which tests each part has."""

from dataclasses import dataclass
from typing import Final

LUA: Final = "dlock_core/backends/redis/lua"


@dataclass(frozen=True)
class Part:
    files: tuple[str, ...]
    """Patterns, from the root of the project."""
    tests: tuple[str, ...]
    """Arguments of pytest."""


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
        ("dlock_core/leases/engine.py", "dlock_core/leases/lease.py"),
        (
            "tests/core/test_engine.py tests/core/test_lease.py tests/core/test_lock.py tests/core/test_watchdog.py",
            "tests/core/test_many.py tests/core/test_interrupted.py tests/core/test_stateful.py tests/core/test_hooks.py",
            "tests/core/test_observability.py tests/core/test_in_a_loop.py tests/core/test_scheduler.py",
            "tests/contract/test_memory.py tests/django_dlock/test_locks.py tests/sqla_dlock/test_locks.py",
        ),
    ),
    "tie": Part(
        ("dlock_core/transactions/tie.py", "django_dlock/tie.py"),
        (
            "tests/scenarios/test_tie.py tests/django_dlock/test_locks.py tests/sqla_dlock/test_locks.py",
            "tests/django_dlock/test_transactions.py tests/django_dlock/test_transactions_lost.py",
            "tests/django_dlock/test_transactions_in_testcases.py tests/django_dlock/test_displaced.py",
            "tests/django_dlock/test_blocks_elsewhere.py tests/django_dlock/test_transactions_statements.py",
            "tests/sqla_dlock/test_transactions.py tests/sqla_dlock/test_transactions_async.py",
            "tests/sqla_dlock/test_transactions_lost.py tests/scenarios/test_fence_in_transaction.py",
            "tests/scenarios/test_fence_of_leases.py tests/django_dlock/test_async.py tests/django_dlock/test_together.py",
            "tests/django_dlock/test_advisory.py",
        ),
    ),
    "fencing": Part(
        ("dlock_core/transactions/fencing.py", "dlock_core/transactions/fence_sql.py"),
        (
            "tests/core/test_row_fence.py tests/scenarios/test_fence_in_transaction.py tests/scenarios/test_fence_of_leases.py",
            "tests/django_dlock/test_fencing.py tests/django_dlock/test_fence_functions.py tests/django_dlock/test_command.py",
            "tests/sqla_dlock/test_fencing.py tests/sqla_dlock/test_fencing_rows.py tests/sqla_dlock/test_fencing_async.py",
        ),
    ),
    "retry": Part(
        ("dlock_core/transactions/retry.py", "django_dlock/retry.py", "sqla_dlock/retry.py"),
        ("tests/core/test_retry.py tests/django_dlock/test_retry.py tests/sqla_dlock/test_retry.py",),
    ),
    "versions": Part(
        ("dlock_core/sql/versions.py", "django_dlock/versions.py", "sqla_dlock/versions/*.py"),
        (
            "tests/django_dlock/test_versions.py tests/django_dlock/test_versions_shapes.py",
            "tests/sqla_dlock/test_versions.py tests/sqla_dlock/test_versions_mapping.py",
            "tests/sqla_dlock/test_versions_sessions.py tests/sqla_dlock/test_versions_bulk.py",
            "tests/sqla_dlock/test_versions_expected.py",
        ),
    ),
}

EXPLAINED: Final[dict[str, str]] = {
    "dlock_core/leases/engine.py: if isinstance(error, BackendUnavailable) and runtime.now() > until + MAX_OVERTIME_S: "
    "→ if isinstance(error, BackendUnavailable) and runtime.now() >= until + MAX_OVERTIME_S:": "both keep the bound",
    "sqla_dlock/versions/conflicts.py: if len(expected) > MAX_ROWS_PER_QUERY: → if len(expected) >= MAX_ROWS_PER_QUERY:": (
        "exactly as many rows as one query takes are sorted without need"
    ),
}
"""Mutants that no test can notice, as a report names them but without the line's number, each with the reason."""
