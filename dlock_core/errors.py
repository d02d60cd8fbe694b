"""Every error that dlock raises.

Each error carries its data as attributes, survives pickling, names the lock or the object, and says what to do next.
"""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = [
    "AcquireTimeout",
    "AlreadyHeld",
    "BackendUnavailable",
    "DLockError",
    "LeaseLost",
    "NoSuchKey",
    "NotHeld",
    "NotSupported",
    "PreconditionFailed",
    "PreconditionMalformed",
    "PreconditionRequired",
    "RowLocked",
    "SnapshotTooOld",
    "StaleObject",
    "StaleToken",
]

E = TypeVar("E", bound="DLockError")


def format_seconds(seconds: float) -> str:
    """Format a time for a message: "10 s", "2.5 s", "303 ms", "less than 1 ms"."""
    if seconds >= 1:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 else "less than 1 ms"


class DLockError(Exception):
    """The base of every error of dlock; `name` is the lock or object concerned."""

    name: str = ""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self), self.args, self.__dict__)


def rebuild(kind: type[E], args: tuple[Any, ...], data: dict[str, Any]) -> E:
    """Build an error of a class from the text and the data of another error, or of a pickled one."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(data)
    return error


class AcquireTimeout(DLockError, TimeoutError):
    """Another holder kept the lock for all of `wait`.

    Attributes:
        waited: The seconds that the caller waited.
        held_by: What the holder tells of itself, such as "shop@web1 pid 4711"; an empty string if the store cannot say.
        retry_after: The seconds after which another try is sensible, for the Retry-After header.
    """

    def __init__(
        self, name: str, *, waited: float, held_by: str = "", retry_after: float = 1.0, once: bool = False
    ) -> None:
        if once:
            text = f"lock {name!r} is held by {held_by or 'another holder'}, and wait=0 tries only once"
        else:
            holder = f" because it is held by {held_by}" if held_by else ""
            text = f"lock {name!r} was not acquired within {format_seconds(waited)}{holder}"
        super().__init__(f"{text}: try again later", name=name)
        self.waited, self.held_by, self.retry_after = waited, held_by, retry_after


class AlreadyHeld(DLockError):
    """The caller already holds the lock in this thread, task or transaction: its wait would never end."""

    def __init__(self, name: str, *, shared: bool = False) -> None:
        advice = "release it first, or join its lease with reentrant=True"
        if shared:
            advice = (
                "it is shared there, and a shared lease cannot become an exclusive one: take the exclusive lock from "
                "the start, or when the shared one has ended, inside a transaction after its end"
            )
        super().__init__(f"lock {name!r} is already held by this thread, task or transaction: {advice}", name=name)
        self.shared = shared


class LeaseLost(DLockError):
    """The lease was held and can no longer be proven to be: another holder may be working, so the caller must stop."""

    def __init__(self, name: str, *, token: int = 0, reason: str = "it ran out") -> None:
        super().__init__(
            f"the lease of lock {name!r} (token {token}) is lost: {reason}; stop this work and start over", name=name
        )
        self.token, self.reason = token, reason


class NotHeld(DLockError):
    """This process never held, or no longer holds, the lease that it renews or releases."""

    def __init__(self, name: str, *, reason: str = "it was never acquired here") -> None:
        super().__init__(f"the lease of lock {name!r} is not held: {reason}; acquire the lock first", name=name)
        self.reason = reason


class StaleToken(DLockError):
    """The database has admitted a newer holder (`highest`, None if unknown) and refuses `token`: roll back."""

    def __init__(self, name: str, *, token: int, highest: int | None = None) -> None:
        newer = f" (it has admitted {highest})" if highest is not None else ""
        why = f"is stale{newer}: a newer holder is at work, so roll back and start over"
        if highest is not None and highest <= token:
            why = (
                "cannot be confirmed: the fence names another holder with it, or is gone with a row of FencedMixin, so "
                'roll back and start over; delete such a row with fence="transaction"'
            )
        super().__init__(f"token {token} of lock {name!r} {why}", name=name)
        self.token, self.highest = token, highest


class StaleObject(DLockError):
    """The row was changed or deleted since it was read.

    Attributes:
        instance: The object that was to be written; None for a row of which no instance is loaded.
        expected: The version with which the row was read.
        found: The version that the row has now; None if it was deleted.
        action: "save", "update" or "delete".
    """

    def __init__(
        self,
        instance: Any,
        *,
        expected: Any,
        found: Any = None,
        action: str = "save",
        key: Any = None,
        model: type | None = None,
        was_read: bool = True,
    ) -> None:
        kind = type(instance) if model is None else model
        name = f"{kind.__name__}({getattr(instance, 'pk', None) if key is None else key!r})"
        gone = "the row is gone" if was_read else "this instance was not read from the row"
        what = gone if found is None else f"the row has version {found!r}"
        super().__init__(f"cannot {action} {name} at version {expected!r}: {what}; read it again and retry", name=name)
        self.instance, self.expected, self.found, self.action = instance, expected, found, action


class SnapshotTooOld(DLockError):
    """The transaction had read before it requested the lock, so that its snapshot is older than the lock.

    Under the lock it would read the data as they were before the lock was granted.
    """

    def __init__(self, name: str, *, isolation: str) -> None:
        super().__init__(
            f"lock {name!r} was requested inside a {isolation} transaction that has already read: "
            "acquire the lock first, use READ COMMITTED, or pass snapshot='ignore'",
            name=name,
        )
        self.isolation = isolation


class RowLocked(DLockError):
    """Another transaction holds the row, and `nowait` was given or the wait (of `waited` seconds) is over.

    With `is_database` it holds the whole database, which allows one writer at a time (SQLite): it may be writing other
    rows. `retry_after` is in seconds.
    """

    def __init__(self, name: str, *, waited: float = 0.0, is_database: bool = False) -> None:
        what = f"the database is busy with another transaction, so that the row {name!r} cannot be locked"
        if not is_database:
            what = f"the row {name!r} is locked by another transaction"
        super().__init__(f"{what} (waited {format_seconds(waited)}): try again later", name=name)
        self.waited, self.retry_after, self.is_database = waited, 1.0, is_database


class BackendUnavailable(DLockError):
    """The store cannot be reached, or did not answer, so that the effect is unknown.

    `__cause__` is the error of the client library; `retry_after` is in seconds.
    """

    retry_after = 1.0
    is_late = False
    """The undo of the attempt may still be in flight, and would also end a later grant of the same holder."""

    def __init__(self, name: str, *, reason: str, broken: bool = False, refused: bool = False) -> None:
        of = f" for lock {name!r}" if name else ""
        super().__init__(f"the store is unavailable{of}: {reason}", name=name)
        self.reason = reason
        self.broken = broken
        """An idle connection turned out to be dead: a new one may work at once."""
        self.refused = refused
        """The store refuses access (wrong password, no permission): another try will not help."""


class NotSupported(DLockError, NotImplementedError):
    """The store or database cannot do this at all; raised before any I/O."""


class NoSuchKey(DLockError, ValueError):
    """The `key` cannot be a key of `name`, the class of the lock, so no row has it; raised before any I/O."""

    def __init__(self, name: str, *, key: object, reason: str = "there is nothing to lock") -> None:
        super().__init__(f"{key!r:.80} cannot be a key of {name}: {reason}", name=name)
        self.key = f"{key!r:.80}"


class PreconditionFailed(DLockError):
    """The object does not meet `header` (If-Match or If-None-Match) with the value `given`."""

    def __init__(self, name: str, *, header: str, given: str) -> None:
        weak = " (a weak tag, W/, never matches here)" if header == "If-Match" and "W/" in given else ""
        super().__init__(f"{header}: {given:.200} does not hold for {name}{weak}: read it again and retry", name=name)
        self.header, self.given = header, given


class PreconditionMalformed(DLockError):
    """The value `given` of `header` is not a list of entity-tags, so nothing can be checked and nothing is done."""

    def __init__(self, name: str, *, header: str, given: str) -> None:
        super().__init__(
            f'{header} for {name} must be * or a list of quoted tags such as "abc", "def", not {given!r:.200}',
            name=name,
        )
        self.header, self.given = header, given


class PreconditionRequired(DLockError):
    """The request must state in If-Match which version of the object its client has seen."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not changed without If-Match: read it and send its ETag back", name=name)
