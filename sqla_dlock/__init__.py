"""Locks for SQLAlchemy: leases held until COMMIT, fencing, version columns, row locks; sync and async."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dlock_core.extras import needed_by, version

if TYPE_CHECKING:
    from sqla_dlock.fencing import FencedMixin
    from sqla_dlock.handlers import arg, locked
    from sqla_dlock.locks import alock, lock
    from sqla_dlock.retry import is_retry, retry_on_conflict
    from sqla_dlock.rows import alock_row, alock_rows, lock_row, lock_rows
    from sqla_dlock.stores import configure
    from sqla_dlock.versions import (
        VersionedMixin,
        adelete_with_version,
        asave_with_version,
        atouch,
        delete_with_version,
        save_with_version,
        touch,
    )

__all__ = [
    "FencedMixin",
    "VersionedMixin",
    "adelete_with_version",
    "alock",
    "alock_row",
    "alock_rows",
    "arg",
    "asave_with_version",
    "atouch",
    "configure",
    "delete_with_version",
    "is_retry",
    "lock",
    "lock_row",
    "lock_rows",
    "locked",
    "retry_on_conflict",
    "save_with_version",
    "touch",
]

_HOMES: Final = {
    "alock": "locks",
    "arg": "handlers",
    "configure": "stores",
    "FencedMixin": "fencing",
    "is_retry": "retry",
    "lock": "locks",
    "locked": "handlers",
    "retry_on_conflict": "retry",
    **dict.fromkeys(("alock_row", "alock_rows", "lock_row", "lock_rows"), "rows"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: those for asyncio need greenlet."""
    if name == "__version__":
        return version()
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    with needed_by(f"sqla_dlock.{name}"):
        return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'versions')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
