"""The fence and lease tables, and the mixins for models whose rows are locked, versioned or fenced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.db import models
from django.utils.translation import gettext_lazy as _

from dlock_core.owner import printable

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from django_dlock.fencing import FencedMixin
    from django_dlock.rows import RowLockMixin
    from django_dlock.versions import VersionedMixin, VersionField

    _CharField = models.CharField[str, str]
else:
    _CharField = models.CharField

__all__ = ["Fence", "FencedMixin", "Lease", "RowLockMixin", "VersionField", "VersionedMixin"]

_HOMES: Final = {
    "FencedMixin": "fencing",
    "RowLockMixin": "rows",
    "VersionField": "versions",
    "VersionedMixin": "versions",
}


def __getattr__(name: str) -> Any:
    """Import a mixin when a model first uses it: Django imports this module in every process."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"django_dlock.{_HOMES[name]}"), name)


_COLUMN: Final = {
    "postgresql": 'character varying(512) COLLATE "C"',
    "mysql": "varchar(512) CHARACTER SET ascii COLLATE ascii_bin",
}


class LockNameField(_CharField):
    """A lock's name: ASCII, compared byte by byte, so that "order:A" and "order:a" are two locks in every database."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "max_length": 512})

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        return _COLUMN.get(connection.vendor) or super().db_type(connection)


class Fence(models.Model):
    """The newest holder admitted to each lock; the row named '' is the floor that `dlock purge` leaves."""

    name = LockNameField(primary_key=True)
    token = models.BigIntegerField()
    holder = models.CharField(max_length=32)
    s_token = models.BigIntegerField(default=0, db_default=0)

    class Meta:
        db_table = "dlock_fence"
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.name} {self.token}"


class Lease(models.Model):
    """The newest lease of a lock, for `database://alias`; written on dedicated connections, never in your transactions.

    Times are microseconds since 1970; `expires_at` is in the past, or below zero, if the lock is free. Later acquires
    delete a row that has not been used for an hour. On SQLite the leases are in a separate file next to the database.
    """

    name = LockNameField(primary_key=True)
    token = models.BigIntegerField()
    holder = models.CharField(max_length=32)
    owner = models.TextField()
    since = models.BigIntegerField()
    expires_at = models.BigIntegerField(db_index=True)
    wanted_until = models.BigIntegerField(default=0, db_default=0)

    class Meta:
        db_table = "dlock_lease"
        default_permissions = ("view",)
        required_db_features = ("has_select_for_update",)

    def __str__(self) -> str:
        return f"{self.name} {self.token}"


class Lock(Fence):
    """The admin's page "Locks", with the permissions to view and to release; it has no rows."""

    class Meta:
        proxy = True
        default_permissions = ("view",)
        permissions = (("release_lock", "Can release lock"),)
        verbose_name = _("lock")
        verbose_name_plural = _("locks")

    def __str__(self) -> str:
        return printable(self.name)
