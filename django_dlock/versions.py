"""Optimistic locking: a version column that every UPDATE checks and counts up.

The check is part of the UPDATE itself, `… SET version = 4 WHERE id = 42 AND version = 3`: one statement, no window.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from asgiref.sync import sync_to_async
from django.db import connections, models, router, transaction
from django.db.models import F
from django.db.models.sql.where import AND

from django_dlock.errors import StaleObject
from django_dlock.transactions import on_rollback
from django_dlock.version_queries import LockManager, VersionedQuerySet, count_up, found_versions, read_version
from dlock_core.hooks import refused

if TYPE_CHECKING:
    _BigIntegerField = models.BigIntegerField[int, int]
else:
    _BigIntegerField = models.BigIntegerField

__all__ = ["LockManager", "VersionField", "VersionedMixin", "VersionedQuerySet"]

FIRST: Final = 1


class _NextVersion:
    """Stands in an UPDATE for the version that its guard allows."""


NEXT: Final = _NextVersion()


class VersionField(_BigIntegerField):
    """Counts the writes of a row: 1 after its INSERT, one more after every UPDATE.

    `VersionedMixin` checks it; raw SQL and `bulk_create(update_conflicts=True)` write past it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Both defaults: without db_default other software cannot insert, without default a new instance has no number.
        kwargs.update(default=FIRST, db_default=FIRST, editable=False)
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        for fixed in ("default", "db_default", "editable"):
            kwargs.pop(fixed, None)
        return name, "django_dlock.models.VersionField", args, kwargs

    def contribute_to_class(self, cls: type[models.Model], name: str, private_only: bool = False) -> None:  # noqa: FBT001, FBT002
        super().contribute_to_class(cls, name, private_only)
        cls._dlock_version = self  # type: ignore[attr-defined]
        if hasattr(cls, "_dlock_rows") and not cls._meta.base_manager_name:
            cls._meta.base_manager_name = "_dlock_rows"

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:  # noqa: FBT001
        if add:
            return super().pre_save(model_instance, add)
        # Models of migrations are without the mixin; their saves count, too.
        return NEXT if isinstance(model_instance, VersionedMixin) else F(self.attname) + 1


class VersionedMixin(models.Model):
    """A model whose rows are never saved over a change that the instance has not seen.

    To call the version something else, set `version = None` and add a `VersionField` of your own.
    Not covered: raw SQL, and what is written through a manager of yours that is not a `LockManager`.
    """

    _dlock_version: ClassVar[Any]  # the VersionField; Any, as a descriptor's type is what it gives

    version = VersionField()
    objects = LockManager()
    _dlock_rows = LockManager()  # the base manager: what SET_NULL and related managers write with counts, too

    class Meta:
        abstract = True

    def save_with_version(self, **options: Any) -> None:
        """Save, or raise StaleObject when the row changed or went away since this instance was read.

        `save()` does that, too; this also leaves a transaction around it usable. After StaleObject the instance is as
        it was: saving it again conflicts again, so read it anew. What signal handlers wrote before the conflict stays.
        """
        using = options.get("using") or router.db_for_write(type(self), instance=self)
        if self._meta.concrete_model._meta.parents:  # type: ignore[union-attr]  # the table of a parent may be written before the conflict shows
            with transaction.atomic(using=using):
                self.save(**options)
            return
        connection = connections[using]
        was_doomed = connection.needs_rollback
        try:
            self.save(**options)
        except StaleObject as error:
            if error.instance is self:  # an UPDATE of no row: nothing to roll back
                connection.needs_rollback = was_doomed
            raise

    async def asave_with_version(self, **options: Any) -> None:
        """As `save_with_version`, in a thread."""
        await sync_to_async(self.save_with_version)(**options)

    def delete(self, using: str | None = None, keep_parents: bool = False) -> tuple[int, dict[str, int]]:  # noqa: FBT001, FBT002
        """As Django's, or raise StaleObject when the row changed or went away since this instance was read."""
        if self.pk is None:
            return super().delete(using, keep_parents)  # which says why not
        using = using or router.db_for_write(type(self), instance=self)
        with transaction.atomic(using=using):
            version = self._dlock_version
            expected = read_version(self)
            rows = self._version_rows(using).filter(**{version.name: expected})
            if not models.QuerySet.update(rows, **{version.name: expected + 1}):
                raise self._stale(using, "delete")
            return super().delete(using, keep_parents)

    def delete_with_version(self, **options: Any) -> tuple[int, dict[str, int]]:
        """The same as `delete()`, by a name that says it; a transaction around it stays usable after StaleObject."""
        return self.delete(**options)

    async def adelete_with_version(self, **options: Any) -> tuple[int, dict[str, int]]:
        """As `delete_with_version`, in a thread."""
        return await sync_to_async(self.delete_with_version)(**options)

    def _do_update(self, base_qs: Any, using: str, pk_val: Any, values: Any, *how: Any) -> Any:  # type: ignore[override]
        version = self._dlock_version
        others = [value for value in values if value[0] is not version]
        is_raw = len(others) < len(values) and not any(value[2] is NEXT for value in values)
        if is_raw or base_qs.model._meta.concrete_model is not version.model:  # a fixture, another table
            return super()._do_update(base_qs, using, pk_val, values, *how)
        _, forced_update, *returning_fields = how  # the last since Django 6.0
        if self._state.adding and not forced_update:
            return []  # Django inserts next; an UPDATE could hit somebody else's row
        expected = read_version(self)
        rows = _only(base_qs, {version.model._meta.pk: pk_val, version: expected})
        values = [*others, (version, None, expected + 1)]
        updated = rows._update(values, *returning_fields)  # says how many, so that select_on_save has nothing to ask
        if updated:
            count_up(self, using)
        elif forced_update or self._state.db == using:
            raise self._stale(using, "save")
        return updated  # nothing in another database than the one it was read from: Django inserts it there

    def _do_insert(self, manager: Any, using: str, *args: Any, **named: Any) -> Any:
        inserted = super()._do_insert(  # type: ignore[misc]
            manager, using, *args, **named
        )
        on_rollback(partial(setattr, self._state, "adding", True), using=using)
        return inserted

    def _version_rows(self, using: str) -> Any:
        table = self._dlock_version.model
        return table._base_manager.using(using).filter(pk=self._get_pk_val(table._meta))

    def _stale(self, using: str, action: str) -> StaleObject:
        found = found_versions(self._version_rows(using), self._dlock_version)
        version = next(iter(found.values()), None)
        return refused(StaleObject(self, expected=read_version(self), found=version, action=action))


def _only(rows: Any, values: dict[Any, Any]) -> Any:
    """Filter a queryset that is ours alone; `filter()` would cost a third of the whole save."""
    table = rows.query.get_initial_alias()
    for field, value in values.items():
        rows.query.where.add(field.get_lookup("exact")(field.get_col(table), value), AND)
    return rows
