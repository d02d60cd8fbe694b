"""Locks for Django: leases held until COMMIT, fencing, version columns, row locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dlock_core.extras import needed_by, version

if TYPE_CHECKING:
    from django_dlock.locks import lock
    from django_dlock.retry import is_retry, retry_on_conflict
    from django_dlock.views import arg, locked, pk

__all__ = ["arg", "is_retry", "lock", "locked", "pk", "retry_on_conflict"]

_HOMES: Final = {
    "arg": "views",
    "is_retry": "retry",
    "lock": "locks",
    "locked": "views",
    "pk": "views",
    "retry_on_conflict": "retry",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: Django imports this package before its models can be."""
    if name == "__version__":
        return version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    with needed_by(f"django_dlock.{name}"):
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
