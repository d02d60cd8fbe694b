"""Lazy objects in place of instances, such as `request.user`: their `type()` and `vars()` are not the instance's."""

from __future__ import annotations

from typing import Any, TypeVar

from django.utils.functional import LazyObject, empty

__all__ = ["unwrapped"]

T = TypeVar("T")


def unwrapped(instance: T) -> T:
    """Return the instance inside a lazy object, which is read now if it was not yet; anything else unchanged."""
    found: Any = instance
    while isinstance(found, LazyObject):
        lazy: Any = found
        if lazy._wrapped is empty:  # noqa: SLF001 - Django has no public name for it
            lazy._setup()  # noqa: SLF001 - as above
        found = lazy._wrapped  # noqa: SLF001 - as above
    return found  # type: ignore[no-any-return]
