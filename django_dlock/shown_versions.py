"""Which versions of its rows a view of Django REST framework has shown, as its serializers remember them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.db.models import Model

from django_dlock.lazy import unwrapped
from django_dlock.version_field import is_undone, last_undo, read_version

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MAX_SHOWN", "Shown", "ShownVersions", "known_version", "shown_by"]

MAX_SHOWN: Final = 1000
"""How much of what its serializers show a view remembers; a response that shows more has no single version."""

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
        self._shown: dict[tuple[type[Model], Any], list[Shown]] = {}
        self._count = 0

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
        if not self._is_full:
            self._shown.setdefault(_row(known.instance), []).append(known)
            self._count += 1

    def may_have_shown(self, instance: Model) -> bool:
        """Return whether the row of an instance was shown, as far as that is remembered."""
        return self._is_full or _row(instance) in self._shown

    def oldest_of(self, instance: Model) -> int | None:
        """Return the oldest version in which the row of an instance was shown; None if one of them is not known."""
        shown = self._shown.get(_row(instance), [])
        known = [each.version for each in shown if each.version is not None]
        return min(known) if known and len(known) == len(shown) and not self._is_full else None

    @property
    def _is_full(self) -> bool:
        return self._count >= MAX_SHOWN


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
