"""Questions that every database is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dlock_core.doctor.clocks import SAMPLES, Sample, clock, round_trip, timing, wall
from dlock_core.doctor.finding import Finding, ok, unsafe, warning

if TYPE_CHECKING:
    from dlock_core.database import Database

__all__ = ["clocks", "connections", "isolation", "version", "writable"]

FULL: Final = 0.8
"""The part of its connections at which a server is about to refuse some."""
CLOCK: Final = "`dlock purge` and the times in listings compare its clock with ours; no lock depends on it"


def clocks(database: Database, question: str) -> list[Finding]:
    """Measure the round trip and the clock, by a question for the seconds since 1970."""
    database.query(question)  # connects
    found = timing([_sample(database, question) for _ in range(SAMPLES)])
    return [round_trip(found.round_trip), clock(found, CLOCK)]


def _sample(database: Database, question: str) -> Sample:
    sent = wall()
    ((theirs,),) = database.query(question)
    return Sample(sent, wall(), float(theirs))


def version(text: str, found: tuple[int, ...], least: tuple[int, ...]) -> Finding:
    """Judge the server's version."""
    if found >= least:
        return ok("version", text)
    wanted = ".".join(map(str, least))
    return unsafe("version", text, "dlock's statements need features that it lacks", f"upgrade it to {wanted} or newer")


def isolation(level: str) -> Finding:
    """Judge the level at which transactions begin that do not say one."""
    if level in ("READ COMMITTED", "READ UNCOMMITTED"):
        return ok("isolation", f"{level} unless the program says otherwise")
    reason = "at this level a lock that is taken after a transaction's first read protects nothing (SnapshotTooOld)"
    remedy = "let the program ask for READ COMMITTED (Django does on MySQL), or take every lock before BEGIN"
    return warning("isolation", f"{level} unless the program says otherwise", reason, remedy)


def connections(used: Any, most: Any) -> Finding:
    """Judge whether the server has connections to spare."""
    measured = f"{int(used)} of {int(most)} connections in use"
    if int(used) < FULL * int(most):
        return ok("connections", measured)
    reason = "a holder that gets no connection waits while it holds its lock, and others wait for it"
    return warning("connections", measured, reason, "use smaller pools, or raise max_connections")


def writable(*, is_replica: bool) -> Finding:
    """Judge whether the server takes writes."""
    if not is_replica:
        return ok("role", "takes writes")
    reason = "a replica takes no row locks and no fence"
    return unsafe("role", "a replica, or read-only", reason, "connect to the primary")
