"""Row locks on a model: `Order.objects.lock_row(pk)`, `order.lock_row()`, `with Order.locked_row(pk) as order`."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from asgiref.sync import sync_to_async
from django.db import models, router, transaction

from django_dlock.row_queries import HowToLock, RowLock, RowLockQuerySet, row_name
from django_dlock.transactions import on_rollback
from django_dlock.version_queries import LockManager
from django_dlock.versions import VersionField

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from typing import Unpack

__all__ = ["RowLockMixin"]

T = TypeVar("T")


class RowLockMixin(models.Model):
    """A model whose rows can be locked; it remembers what was last read or written, to refuse to overwrite a change."""

    objects = LockManager()

    class Meta:
        abstract = True

    def lock_row(self, *, using: str | None = None, **how: Unpack[HowToLock]) -> None:
        """Lock this row until the end of the transaction, and refresh the instance under the lock.

        Options and errors as of the manager's `lock_row`. Raises ValueError on an instance with changes that are not
        saved: they would be lost.
        """
        lock = RowLock(**how)
        self._refuse_unsaved()
        rows: RowLockQuerySet[Self] = RowLockQuerySet(type(self), using=using or self._state.db)
        lock.fetch(row_name(type(self), self.pk), rows, lambda locked: self.refresh_from_db(from_queryset=locked))

    @classmethod
    @contextmanager
    def locked_row(cls, pk: Any, *, using: str | None = None, **how: Unpack[HowToLock]) -> Iterator[Self]:
        """Open a transaction, lock a row, and give it as it is then.

        Inside another transaction it opens a savepoint, and the lock lasts until the outer end. Options and errors as
        of the manager's `lock_row`.
        """
        lock = RowLock(**how)
        using = using or router.db_for_write(cls)
        with transaction.atomic(using=using):
            rows = cls._default_manager.using(using)
            yield lock.fetch(row_name(cls, pk), rows, lambda locked: locked.get(pk=pk))

    @classmethod
    async def alocked_row(
        cls, pk: Any, work: Callable[[Self], T], *, using: str | None = None, **how: Unpack[HowToLock]
    ) -> T:
        """Call `work(row)` in a thread, with the row locked, and return its result.

        A transaction belongs to a thread and cannot live in a coroutine; so the work is a plain function. When the
        caller is cancelled, it still runs to its end, under its lock.
        """

        def locked_work() -> T:
            with cls.locked_row(pk, using=using, **how) as row:
                return work(row)

        return await sync_to_async(locked_work)()

    @classmethod
    def from_db(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember what was read."""
        instance = super().from_db(*args, **kwargs)
        instance._dlock_saved = vars(instance).copy()
        return instance

    def refresh_from_db(self, using: str | None = None, fields: Any = None, *args: Any, **kwargs: Any) -> None:
        """Remember what was read."""
        super().refresh_from_db(using, fields, *args, **kwargs)
        self._remember(fields)

    def save_base(self, *args: Any, **kwargs: Any) -> None:
        """Remember what was written, until it is rolled back."""
        before = vars(self).get("_dlock_saved")
        super().save_base(*args, **kwargs)
        self._remember(kwargs.get("update_fields"))
        on_rollback(partial(setattr, self, "_dlock_saved", before), using=str(self._state.db))

    def _remember(self, fields: Collection[str] | None) -> None:
        values = vars(self)
        saved = {} if fields is None else dict(values.get("_dlock_saved") or {})
        for field in self._meta.concrete_fields:
            if field.attname in values and (fields is None or field.name in fields or field.attname in fields):
                saved[field.attname] = values[field.attname]
        self._dlock_saved = saved

    def _refuse_unsaved(self) -> None:
        values, saved = vars(self), vars(self).get("_dlock_saved")
        if saved is None:
            raise ValueError(
                f"{row_name(type(self), self.pk)} was not read or saved one by one: read it before lock_row()"
            )
        changed = [
            field.name
            for field in self._meta.concrete_fields
            if not isinstance(field, VersionField) and values.get(field.attname) != saved.get(field.attname)
        ]
        if changed:
            raise ValueError(
                f"{row_name(type(self), self.pk)} has changes that are not saved, in {', '.join(changed)}: "
                "save() or refresh_from_db() before lock_row(), which would overwrite them"
            )
