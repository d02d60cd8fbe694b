"""Row locks on a model: `Order.objects.lock_row(pk)`, `order.lock_row()`, `with Order.locked_row(pk) as order`."""

from __future__ import annotations

import pickle
from contextlib import contextmanager
from copy import Error as CopyError
from copy import deepcopy
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from asgiref.sync import sync_to_async
from django.db import models, router
from django.db.models.fields.files import FieldFile
from django.db.models.query_utils import DeferredAttribute

from django_dlock.atomic_blocks import own_block
from django_dlock.connections import restore_on_rollback
from django_dlock.querysets import RowLock, RowLockOptions, RowLockQuerySet, row_name
from django_dlock.refresh import fields_read
from django_dlock.versioned_querysets import LockManager
from django_dlock.versions import VersionField

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from typing import Unpack

__all__ = ["RowLockMixin"]

T = TypeVar("T")

REFUSED_COPY: Final = (AttributeError, LookupError, RuntimeError, TypeError, ValueError, CopyError)
"""The errors of a value that cannot be copied; others may come from a signal handler, and must propagate."""
REFUSED_COMPARISON: Final = (*REFUSED_COPY, ArithmeticError, pickle.PickleError)
"""The errors of values that cannot be compared, or not be pickled."""
SAVED_VALUES: Final = "_dlock_saved"
"""Attribute of an instance that keeps the values of its fields that were last read or written."""
DJANGO_FETCH_PEERS: Final[Any] = getattr(models, "FETCH_PEERS", None)
"""The fetch mode that reads a deferred field for all instances of a queryset at once; None before Django 6.1."""


class _FetchPeers:
    """Django's FETCH_PEERS, which sets the field without `refresh_from_db()`: the instances remember what was read."""

    track_peers = True

    def fetch(self, fetcher: Any, instance: Any) -> None:
        """Fetch a deferred field, or related objects, as Django does."""
        if not isinstance(fetcher, DeferredAttribute):
            DJANGO_FETCH_PEERS.fetch(fetcher, instance)
            return
        name, peers = fetcher.field.attname, (each() for each in instance._state.peers)
        unread = [each for each in peers if isinstance(each, RowLockMixin) and name not in vars(each)]
        DJANGO_FETCH_PEERS.fetch(fetcher, instance)
        for each in unread:
            each._remember((name,))  # noqa: SLF001 - of the mixin below

    def __reduce__(self) -> str:
        return "FETCH_PEERS"


FETCH_PEERS: Final = _FetchPeers()


class RowLockMixin(models.Model):
    """A model whose rows can be locked.

    An instance remembers the values last read or written, so that `lock_row()`, which refreshes it, can refuse to
    discard a change that was not saved.
    """

    objects = LockManager()

    class Meta:
        abstract = True

    def lock_row(self, *, using: str | None = None, **how: Unpack[RowLockOptions]) -> None:
        """Lock this row until the end of the transaction, and refresh the instance under the lock.

        Options and errors are those of the manager's `lock_row`, without `skip_locked`. Raises ValueError if the
        instance has unsaved changes, which would be lost.
        """
        lock = _row_lock(type(self), how)
        self._refuse_unsaved()
        using = using or router.db_for_write(type(self), instance=self)
        rows: RowLockQuerySet[Self] = RowLockQuerySet(type(self), using=using)
        lock.fetch(row_name(type(self), self.pk), rows, lambda locked: self.refresh_from_db(from_queryset=locked))

    @classmethod
    @contextmanager
    def locked_row(cls, pk: Any, *, using: str | None = None, **how: Unpack[RowLockOptions]) -> Iterator[Self]:
        """Open a transaction, lock a row, and yield its current state.

        Inside another transaction it opens a savepoint, and the lock lasts until the outer transaction ends. Options
        and errors are those of the manager's `lock_row`, without `skip_locked`.
        """
        lock = _row_lock(cls, how)
        using = using or router.db_for_write(cls)
        with own_block(using):
            rows = cls._default_manager.using(using)
            yield lock.fetch(row_name(cls, pk), rows, lambda locked: locked.get(pk=pk))

    @classmethod
    async def alocked_row(
        cls, pk: Any, work: Callable[[Self], T], *, using: str | None = None, **how: Unpack[RowLockOptions]
    ) -> T:
        """Call `work(row)` in a thread, with the row locked, and return its result.

        A transaction belongs to a thread and cannot live in a coroutine, so the work is a plain function. If the caller
        is cancelled, the work still runs to its end under the lock.
        """

        def locked_work() -> T:
            with cls.locked_row(pk, using=using, **how) as row:
                return work(row)

        return await sync_to_async(locked_work)()

    @classmethod
    def from_db(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an instance as Django does, and remember what was read."""
        if "fetch_mode" in kwargs and kwargs["fetch_mode"] is DJANGO_FETCH_PEERS:
            kwargs["fetch_mode"] = FETCH_PEERS
        instance = super().from_db(*args, **kwargs)
        saved = vars(instance).copy()
        for name in _mutable_fields(cls):
            if name in saved:
                saved[name] = _copied(saved[name])
        vars(instance)[SAVED_VALUES] = saved
        return instance

    def refresh_from_db(self, using: str | None = None, fields: Any = None, from_queryset: Any = None) -> None:
        """Refresh as Django does, and remember what was read."""
        fields = None if fields is None else set(fields)
        read = fields_read(self, fields, from_queryset)
        super().refresh_from_db(using, fields, from_queryset=from_queryset)
        self._remember(read)

    def save_base(self, *args: Any, **kwargs: Any) -> None:
        """Save as Django does, and remember what was written unless it is rolled back."""
        before = vars(self).get(SAVED_VALUES)
        super().save_base(*args, **kwargs)
        restore_on_rollback(self, {SAVED_VALUES: before}, using=str(self._state.db))
        self._remember(kwargs.get("update_fields"))

    def _remember(self, fields: Collection[str] | None) -> None:
        values = vars(self)
        saved = {} if fields is None else dict(values.get(SAVED_VALUES) or {})
        mutable = _mutable_fields(type(self))
        for field in self._meta.concrete_fields:
            name = field.attname
            if name in values and (fields is None or field.name in fields or name in fields):
                saved[name] = _copied(values[name]) if name in mutable else values[name]
        values[SAVED_VALUES] = saved

    def _refuse_unsaved(self) -> None:
        values, saved = vars(self), vars(self).get(SAVED_VALUES)
        if saved is None:
            raise ValueError(
                f"{row_name(type(self), self.pk)} was not read or saved as an instance, so unsaved changes cannot "
                "be detected: read it before lock_row()"
            )
        changed = [
            field.name
            for field in self._meta.concrete_fields
            if not (isinstance(field, VersionField) or field.generated)
            and _is_changed(values.get(field.attname), saved.get(field.attname))
        ]
        if changed:
            raise ValueError(
                f"{row_name(type(self), self.pk)} has changes that are not saved, in {', '.join(changed)}: "
                "call save() or refresh_from_db() before lock_row(), which would overwrite them"
            )


def _row_lock(model: type[models.Model], how: RowLockOptions) -> RowLock:
    if how.get("skip_locked"):
        raise TypeError(
            f"skip_locked=True would leave nothing to work with: call {model.__name__}.objects.lock_row(pk, "
            "skip_locked=True), which returns None for a locked row"
        )
    return RowLock(**how)


@lru_cache(maxsize=1024)
def _mutable_fields(model: type[models.Model]) -> frozenset[str]:
    """Return the fields whose values can change without an assignment: JSON, arrays, files, those of other packages."""
    return frozenset(field.attname for field in model._meta.concrete_fields if not _is_immutable(field))


def _is_immutable(field: Any) -> bool:
    if isinstance(field, models.JSONField | models.BinaryField | models.FileField):
        return False
    return isinstance(field, VersionField) or type(field).__module__.startswith("django.db.models.fields")


def _copied(value: Any) -> Any:
    """Return a copy of a value to compare it with later; of a file its name, as a save renames the file in place."""
    if isinstance(value, FieldFile):
        return value.name
    try:
        return deepcopy(value)
    except REFUSED_COPY:
        return value


def _is_changed(value: Any, saved: Any) -> bool:
    """Return whether a value differs from the one saved; a file that was assigned differs even if its name does not.

    A comparison alone cannot tell: NaN differs from itself, and arrays compare their elements.
    """
    if isinstance(value, FieldFile) and not value._committed:  # type: ignore[attr-defined]  # noqa: SLF001
        return True
    return not (value is saved or _are_equal(value, saved) or _are_stored_alike(value, saved))


def _are_equal(value: Any, saved: Any) -> bool:
    try:
        differs = value != saved
        return not (hasattr(differs, "__len__") or differs)
    except REFUSED_COMPARISON:
        return False


def _are_stored_alike(value: Any, saved: Any) -> bool:
    try:
        return pickle.dumps(value) == pickle.dumps(saved)
    except REFUSED_COMPARISON:
        return False
