"""Which versions of its rows a view of Django REST framework has shown, as its serializers remember them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.db.models import Model

from django_dlock.lazy import unwrapped
from django_dlock.version_field import is_undone, last_undo, read_version

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_SHOWN_ROWS", "Shown", "ShownVersions", "known_version", "shown_by"]

MAX_SHOWN_ROWS: Final = 1000
"""How many rows a view remembers that its serializers have shown; a response that shows more has no single version."""

_SHOWN: Final = "_dlock_shown"
"""Attribute of a serializer that keeps what it has shown last."""


class Shown(NamedTuple):
    """An instance whose data a serializer has made."""

    instance: Any
    known_version: int | None
    """The version that it had then; see `known_version`."""
    last_undo: object
    """Tells whether a write of the instance was rolled back since."""

    @property
    def version(self) -> int | None:
        """The version of the data; None if it is not known, or was rolled back."""
        instance = self.instance
        return None if instance._state.adding or last_undo(instance) is not self.last_undo else self.known_version


class ShownVersions:
    """The versions that the serializers of one view have shown while it has answered one request."""

    def __init__(self) -> None:
        self._oldest: dict[tuple[type[Model], Any], Shown] = {}

    def watch(self, serializer: Any) -> None:
        """Remember from now on what a serializer shows, or with many=True its child."""
        maker = getattr(serializer, "child", serializer)
        if "to_representation" not in vars(maker):
            maker.to_representation = partial(self._represent, type(maker).to_representation, maker)

    def _represent(self, make: Callable[..., Any], serializer: Any, instance: Any) -> Any:
        shown = unwrapped(instance)
        if isinstance(shown, Model):
            known = Shown(shown, known_version(shown), last_undo(shown))
            setattr(serializer, _SHOWN, known)
            self._note(known)
        return make(serializer, instance)

    def _note(self, known: Shown) -> None:
        row, version = _row(known.instance), known.known_version
        former = self._oldest.get(row)
        if former is None and len(self._oldest) >= MAX_SHOWN_ROWS:
            return
        is_older = former is None or version is None or (former.known_version or version) > version
        if is_older and (former is None or former.known_version is not None):
            self._oldest[row] = known

    def oldest_of(self, instance: Model) -> Shown | None:
        """Return what was shown of an instance's row, in its oldest version or an unknown one; None if nothing was."""
        return self._oldest.get(_row(instance))

    @property
    def is_full(self) -> bool:
        """Whether more rows may have been shown than are remembered."""
        return len(self._oldest) >= MAX_SHOWN_ROWS


def shown_by(serializer: Any) -> Shown | None:
    """Return what a serializer has shown last; None if it is not watched, or has shown nothing."""
    return getattr(serializer, _SHOWN, None)


def known_version(instance: Any) -> int | None:
    """Return the version of the data that an instance has; None if they are not those of one version of its row."""
    instance = unwrapped(instance)
    if not isinstance(instance, Model) or not hasattr(type(instance), "_dlock_version") or is_undone(instance):
        return None
    try:
        return read_version(instance)
    except ValueError:
        return None


def _row(instance: Model) -> tuple[Any, Any]:
    return instance._meta.concrete_model, instance.pk
