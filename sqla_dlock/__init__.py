"""Locks for SQLAlchemy: leases held until COMMIT, fencing, version columns, row locks; sync and async."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sqla_dlock.alocks import alock
    from sqla_dlock.fencing import FencedMixin
    from sqla_dlock.locks import lock
    from sqla_dlock.stores import configure

__all__ = ["FencedMixin", "alock", "configure", "lock"]

_HOMES: Final = {"FencedMixin": "fencing", "alock": "alocks", "configure": "stores", "lock": "locks"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: those for asyncio need greenlet."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
