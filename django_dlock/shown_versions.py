"""Which versions of its rows a view of Django REST framework has shown, as its serializers remember them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from django.db import DEFAULT_DB_ALIAS
from django.db.models import Model

from django_dlock.connections import restore_on_rollback
from django_dlock.lazy import unwrapped
from django_dlock.version_field import has_had, is_undone, last_undo, read_version, row_key
from dlock_core.extras import needed_by

with needed_by("django_dlock.rest"):
    from rest_framework.serializers import ListSerializer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "MAX_SHOWN",
    "Seen",
    "ShownVersions",
    "oldest_committed",
    "shown_as",
    "shown_by",
    "version_now",
    "version_written",
]

MAX_SHOWN: Final = 1000
"""How much of what its serializers show a view remembers; a response that shows more has no single version."""

_SHOWN: Final = "_dlock_shown"
"""Attribute of a serializer that keeps what it has shown of the rows of its instances."""


class Seen:
    """A version of an instance that a view has seen: it was read, checked or shown."""

    is_undone = False
    """Whether the work was rolled back in which that happened: the version may never have been committed."""

    def __init__(self, instance: Any) -> None:
        self.instance, self.version = instance, known_version(instance)
        """None: it is not known."""
        self._last_undo = last_undo(instance)
        restore_on_rollback(self, {"is_undone": True}, using=instance._state.db or DEFAULT_DB_ALIAS)

    @property
    def is_known(self) -> bool:
        """Whether the version is known, and no write of the instance was rolled back since."""
        return self.version is not None and not self.instance._state.adding and self.has_no_later_undo

    @property
    def has_no_later_undo(self) -> bool:
        """Whether no write of the instance was rolled back since."""
        return last_undo(self.instance) is self._last_undo

    def has_become(self, version: int) -> bool:
        """Return whether only its own writes have brought the instance to a version, and none that was rolled back."""
        if self.version is None or not has_had(self.instance, self.version) or not has_had(self.instance, version):
            return False
        return version != self.version or self.has_no_later_undo

    @property
    def was_read_again(self) -> bool:
        """Whether the instance was read again in place since, after others had changed its row."""
        now = known_version(self.instance)
        return now is not None and now != self.version and not self.has_become(now)

    @property
    def oldest_now(self) -> int | None:
        """The oldest version that data of the instance may have which were made since; None if that is not known."""
        now = known_version(self.instance)
        if now is not None and self.has_become(now):
            return now
        return self.version if self.has_no_later_undo else None


class Shown(Seen):
    """A version of an instance that a serializer has shown."""

    made: Any = None
    """A copy of what the serializer made of it, if it was the row of the serializer's own instance."""


class ShownVersions:
    """The versions that the serializers of one view have shown while it has answered one request."""

    def __init__(self) -> None:
        self._shown: dict[tuple[type[Model], Any], list[Shown]] = {}
        self._count = 0

    def watch(self, serializer: Any) -> None:
        """Remember from now on what a serializer shows, or with many=True its child."""
        maker: Any = serializer.child if isinstance(serializer, ListSerializer) else serializer
        if "to_representation" not in vars(maker):
            maker.to_representation = partial(self._represent, type(maker).to_representation, maker)

    def _represent(self, make: Callable[..., Any], serializer: Any, instance: Any, *args: Any, **named: Any) -> Any:
        shown = unwrapped(instance)
        if not isinstance(shown, Model) or shown._state.adding:
            return make(serializer, instance, *args, **named)
        seen = Shown(shown)
        if not self.is_full:
            self._shown.setdefault(row_key(shown), []).append(seen)
            self._count += 1
        is_own = shown == unwrapped(getattr(serializer, "instance", None))  # It is the same row, perhaps read again.
        if is_own:
            vars(serializer).setdefault(_SHOWN, []).append(seen)
        made = make(serializer, instance, *args, **named)
        if is_own:
            seen.made = _copied(made)
        return made

    def of_row(self, instance: Model) -> list[Shown]:
        """Return what was shown of the row of an instance, as far as that is remembered."""
        return self._shown.get(row_key(instance), [])

    @property
    def is_full(self) -> bool:
        """Whether more may have been shown than is remembered."""
        return self._count >= MAX_SHOWN


def shown_by(serializer: Any) -> list[Shown]:
    """Return what a serializer has shown of the row of its instance; nothing if it is not watched."""
    instance = unwrapped(getattr(serializer, "instance", None))
    found: list[Shown] = getattr(serializer, _SHOWN, [])
    return [each for each in found if each.instance == instance]


def shown_as(serializer: Any, data: Any) -> list[Shown] | None:
    """Return when a serializer has shown its instance in these data; None if anything was added or changed since.

    The list is empty if the serializer is not watched: what was changed inside of its nested data is not noticed.
    """
    shown = shown_by(serializer)
    if not shown:
        return [] if _is_copy(getattr(serializer, "_data", None), data) else None
    return [each for each in shown if _is_copy(each.made, data)] or None


def oldest_committed(shown: Sequence[Seen], checked: Sequence[Seen]) -> int | None:
    """Return the oldest of the versions that were shown; None if one is not known, or may never have been committed.

    Args:
        shown: What was shown of one row; not empty.
        checked: The instances of this row that were checked. What they were or became was also shown by work that was
            rolled back.
    """
    sure = [each for each in checked if not each.is_undone and each.version is not None]
    found = []
    for each in shown:
        version = each.version
        if version is None or not each.is_known:
            return None
        if each.is_undone and not any(one.has_become(version) or version <= (one.version or 0) for one in sure):
            return None
        found.append(version)
    return min(found)


def version_now(instance: Any, checked: Sequence[Seen]) -> int | None:
    """Return the version of an instance that was shown in an unknown version; None if others have changed it since.

    Then what was shown may be older than what was read last.
    """
    version = known_version(instance)
    if version is None or not checked:
        return version
    if any(each.was_read_again for each in checked):
        return None
    sure = [each for each in checked if not each.is_undone]
    found = [version, *(each.version for each in checked if each.is_undone and each.version is not None)]
    return version if all(any(each.has_become(one) for each in sure) for one in found) else None


def version_written(checked: Sequence[Seen]) -> int | None:
    """Return the newest version that this request has written, one write after the other; None if it has written none.

    What was read after a write of others is not among what the client knows, even if it was written then.
    """
    first = known = checked[0].version if checked else None
    for each in checked:
        now = known_version(each.instance)
        if now is None or each.version is None or not each.has_become(now):
            continue
        if known is not None and each.version <= known < now:
            known = now
    return known if known != first else None


def known_version(instance: Any) -> int | None:
    """Return the version of the data that an instance has; None if they are not those of one version of its row."""
    instance = unwrapped(instance)
    if not isinstance(instance, Model) or not hasattr(type(instance), "_dlock_version") or is_undone(instance):
        return None
    try:
        return read_version(instance)
    except ValueError:
        return None


def _copied(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _copied(value) for key, value in data.items()}
    return [_copied(value) for value in data] if isinstance(data, list) else data


def _is_copy(copy: Any, data: Any) -> bool:
    """Return whether all values are the very same: comparing them could raise an error, as that of arrays does."""
    if isinstance(data, dict) and isinstance(copy, dict):
        return copy.keys() == data.keys() and all(_is_copy(copy[key], value) for key, value in data.items())
    if isinstance(data, list) and isinstance(copy, list):
        return len(copy) == len(data) and all(map(_is_copy, copy, data))
    return copy is data
