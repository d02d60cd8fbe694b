"""The fence table: is it there, and is it kept small?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlock_core.doctor.finding import Finding, ok, warning
from dlock_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from dlock_core.database import Database

__all__ = ["fence"]

MANY: Final = 1_000_000
TABLE: Final = "dlock_fence"


def fence(database: Database, *, exists: bool) -> list[Finding]:
    """Judge the fence table."""
    if not exists:
        remedy = "manage.py migrate django_dlock, or metadata.create_all of sqla_dlock.fence_table"
        return [warning("fence", f"no table {TABLE}", "a fenced lock fails in this database", remedy)]
    try:
        ((rows, floors),) = database.query(f"SELECT count(*), count(CASE WHEN name = '' THEN 1 END) FROM {TABLE}")  # noqa: S608
    except BackendUnavailable as error:
        remedy = "GRANT SELECT, INSERT, UPDATE, DELETE on it to the user of the program"
        return [warning("fence", error.reason, "a fenced lock needs it; what is not read is not judged", remedy)]
    return [_size(int(rows) - int(floors)), *_floor(database, is_there=bool(floors))]


def _size(rows: int) -> Finding:
    measured = f"{rows} rows in {TABLE}"
    if rows < MANY:
        return ok("fence", measured)
    reason = "every name that was ever locked leaves a row"
    return warning("fence", measured, reason, "run `dlock purge` once a day")


def _floor(database: Database, *, is_there: bool) -> list[Finding]:
    if is_there or database.vendor not in ("mysql", "mariadb"):
        return []
    reason = "every new name looks for it, and locks a gap where it is missing: new names wait for each other"
    remedy = f"INSERT INTO {TABLE} (name, token, holder, s_token) VALUES ('', 0, '', 0)"  # noqa: S608 - shown, not sent
    return [warning("floor", f"{TABLE} has no row named ''", reason, remedy)]
