"""Everything dlock can raise.

Each error carries its data as attributes, survives pickling, names the lock and says what to do next.
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
    """Say a time as people do: "10 s", "2.5 s", "303 ms", "less than 1 ms"."""
    if seconds >= 1:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 else "less than 1 ms"


class DLockError(Exception):
    """The base of every error of dlock; `name` is the lock or object it speaks of."""

    name: str = ""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self), self.args, self.__dict__)


def rebuild(kind: type[E], args: tuple[Any, ...], data: dict[str, Any]) -> E:
    """Make an error of another class (or process) out of the text and the data of one."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(data)
    return error


class AcquireTimeout(DLockError, TimeoutError):
    """The lock stayed taken for all of `wait`.

    `waited` and `retry_after` are seconds; `held_by` is what the holder said of itself, or an empty text. `once`: it
    was not waited for at all (`wait=0`), which the message then says.
    """

    def __init__(
        self, name: str, *, waited: float, held_by: str = "", retry_after: float = 1.0, once: bool = False
    ) -> None:
        if once:
            text = f"lock {name!r} is held by {held_by or 'somebody else'}; it was tried once: try again later"
        else:
            holder = f", held by {held_by}" if held_by else ""
            text = f"lock {name!r} not acquired within {format_seconds(waited)}{holder}: try again later"
        super().__init__(text, name=name)
        self.waited, self.held_by, self.retry_after = waited, held_by, retry_after


class AlreadyHeld(DLockError):
    """The same thread, task or transaction asked again for a lock that it holds: waiting would never end."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"lock {name!r} is already held by this thread, task or transaction: "
            "release it first, or ask with reentrant=True",
            name=name,
        )


class LeaseLost(DLockError):
    """The lease was held before and is not provably held now: another holder may be at work, so stop."""

    def __init__(self, name: str, *, token: int = 0, reason: str = "it ran out") -> None:
        super().__init__(f"lease of lock {name!r} (token {token}) is lost: {reason}; stop and start over", name=name)
        self.token, self.reason = token, reason


class NotHeld(DLockError):
    """This process never had, or no longer has, the lease that it wants to renew or release."""

    def __init__(self, name: str, *, reason: str = "it was never acquired here") -> None:
        super().__init__(f"lease of lock {name!r} is not held: {reason}", name=name)
        self.reason = reason


class StaleToken(DLockError):
    """The database has seen a newer holder (`highest`, None when unknown) and refused `token`; roll back."""

    def __init__(self, name: str, *, token: int, highest: int | None = None) -> None:
        newer = f" (it has admitted {highest})" if highest is not None else ""
        super().__init__(
            f"token {token} of lock {name!r} is stale{newer}: a newer holder is at work, roll back", name=name
        )
        self.token, self.highest = token, highest


class StaleObject(DLockError):
    """The row changed, or went away (`found` is None), since `instance` was read with version `expected`."""

    def __init__(
        self, instance: Any, *, expected: Any, found: Any = None, action: str = "save", key: Any = None
    ) -> None:
        name = f"{type(instance).__name__}({getattr(instance, 'pk', None) if key is None else key!r})"
        what = "the row is gone" if found is None else f"the row has version {found!r}"
        super().__init__(f"cannot {action} {name} at version {expected!r}: {what}; read it again and retry", name=name)
        self.instance, self.expected, self.found, self.action = instance, expected, found, action


class SnapshotTooOld(DLockError):
    """The lock was asked for after the transaction had taken its snapshot: reads would be older than the lock."""

    def __init__(self, name: str, *, isolation: str) -> None:
        super().__init__(
            f"lock {name!r} was asked for inside a {isolation} transaction that has already read: "
            "take the lock first, use READ COMMITTED, or pass snapshot='ignore'",
            name=name,
        )
        self.isolation = isolation


class RowLocked(DLockError):
    """Another transaction holds the row: NOWAIT, or the time to wait for it (`waited` seconds) ran out.

    `is_database`: it holds all of the database, which has one writer at a time (SQLite), and may work on other rows.
    """

    def __init__(self, name: str, *, waited: float = 0.0, is_database: bool = False) -> None:
        what = f"the database is busy with another transaction, so that row {name!r} cannot be locked"
        if not is_database:
            what = f"row {name!r} is locked by another transaction"
        super().__init__(f"{what} (waited {format_seconds(waited)}): try again", name=name)
        self.waited, self.retry_after, self.is_database = waited, 1.0, is_database


class BackendUnavailable(DLockError):
    """The store cannot be asked, or did not answer: the effect is unknown; `__cause__` is the client's error."""

    retry_after = 1.0

    def __init__(self, name: str, *, reason: str, broken: bool = False, refused: bool = False) -> None:
        of = f" for lock {name!r}" if name else ""
        super().__init__(f"store unavailable{of}: {reason}", name=name)
        self.reason = reason
        self.broken = broken
        """A connection that had been idle turned out to be dead: a new one may work at once."""
        self.refused = refused
        """The store does not let us in (wrong password, no permission): asking again will not help."""


class NotSupported(DLockError, NotImplementedError):
    """The store or database cannot do this at all; raised before any I/O."""


class NoSuchKey(DLockError, ValueError):
    """The `key` cannot be one of what is locked (`name`), so that no row has it; raised before any I/O."""

    def __init__(self, name: str, *, key: object) -> None:
        super().__init__(f"{key!r:.80} cannot be a key of {name}: there is nothing to lock", name=name)
        self.key = f"{key!r:.80}"


class PreconditionFailed(DLockError):
    """The object is not what `header` (If-Match or If-None-Match), as it was `given`, asks it to be."""

    def __init__(self, name: str, *, header: str, given: str) -> None:
        weak = " (a weak tag, W/, never matches here)" if header == "If-Match" and "W/" in given else ""
        super().__init__(f"{header}: {given:.200} does not hold for {name}{weak}: read it again and retry", name=name)
        self.header, self.given = header, given


class PreconditionMalformed(DLockError):
    """The `header`, as it was `given`, is no list of entity-tags: nothing can be checked, so nothing is done."""

    def __init__(self, name: str, *, header: str, given: str) -> None:
        super().__init__(
            f'{header} for {name} must be * or a list of quoted tags such as "abc", "def", not {given!r:.200}',
            name=name,
        )
        self.header, self.given = header, given


class PreconditionRequired(DLockError):
    """The object is only changed by who says in If-Match which version was seen."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not changed without If-Match: read it, and send its ETag back", name=name)
