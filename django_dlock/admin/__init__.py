"""The Django admin: pages that never overwrite a change which their user has not seen, and the page of locks."""

from __future__ import annotations

from django.contrib import admin

from django_dlock.admin.locks import LockAdmin
from django_dlock.admin.versions import (
    VersionedInlineMixin,
    VersionedModelAdmin,
    VersionedStackedInline,
    VersionedTabularInline,
)
from django_dlock.models import Lock

__all__ = [
    "LockAdmin",
    "VersionedInlineMixin",
    "VersionedModelAdmin",
    "VersionedStackedInline",
    "VersionedTabularInline",
]

admin.site.register(Lock, LockAdmin)
