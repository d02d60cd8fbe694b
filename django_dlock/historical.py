"""Models inside migrations: their writes increment versions, so that the running application notices them.

Such a model has the fields of the real one, but neither its mixins nor its managers.
"""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models.signals import class_prepared
from django.dispatch import receiver

from django_dlock.querysets import CountingQuerySet

__all__: list[str] = []

_Manager = models.Manager.from_queryset(CountingQuerySet)


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
