"""Models inside migrations: their writes increment versions, so that the running application notices them.

Such a model has the fields of the real one, but neither its mixins nor its managers.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.models import F
from django.db.models.signals import class_prepared
from django.dispatch import receiver

from django_dlock.versioned_querysets import CountingQuerySet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__: list[str] = []


class _HistoricalQuerySet(CountingQuerySet[Any]):
    def bulk_create(  # noqa: PLR0917 - Django's
        self,
        objs: Iterable[Any],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,  # noqa: FBT001, FBT002
        update_conflicts: bool = False,  # noqa: FBT001, FBT002
        update_fields: Any = None,
        unique_fields: Any = None,
    ) -> list[Any]:
        """Create as Django does; an existing row that it overwrites gets a first version, like one created again."""
        if update_conflicts and update_fields:
            update_fields = {*update_fields, self.model._dlock_version.name}
        return super().bulk_create(objs, batch_size, ignore_conflicts, update_conflicts, update_fields, unique_fields)


_Manager = models.Manager.from_queryset(_HistoricalQuerySet)


class _CountingManager(_Manager[Any]):
    """A manager that increments versions, and refuses nothing that Django allows: old migrations must still run."""


@receiver(class_prepared)
def _count_in_migrations(sender: Any, **_: object) -> None:
    if sender.__module__ == "__fake__" and hasattr(sender, "_dlock_version"):
        meta = sender._meta
        for manager in meta.local_managers:
            if type(manager) is models.Manager:  # A manager that the model brings along is kept.
                manager.__class__ = _CountingManager
        if hasattr(sender, "_dlock_rows") and not meta.base_manager_name:
            meta.base_manager_name = "_dlock_rows"
        meta._expire_cache()  # noqa: SLF001 - it holds copies of the managers
        if sender._dlock_version.model is sender:
            sender._do_update = _counting(sender._do_update)  # noqa: SLF001 - what every save calls


def _counting(do_update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Django's UPDATE of one table: where only some fields are saved, the version is not among them."""

    @wraps(do_update)
    def counting(self: Any, base_qs: Any, using: str, pk_val: Any, values: list[Any], *how: Any) -> Any:
        version = self._dlock_version
        is_counted = any(field is version for field, *_ in values)
        if base_qs.model._meta.concrete_model is version.model and not is_counted:
            values = [*values, (version, None, F(version.attname) + 1)]
        return do_update(self, base_qs, using, pk_val, values, *how)

    return counting
