"""For the Django admin: pages that never overwrite a change which their user has not seen."""

from __future__ import annotations

from django_dlock.admin.rows import VersionedInlineMixin, VersionedStackedInline, VersionedTabularInline
from django_dlock.admin.versions import VersionedModelAdmin

__all__ = ["VersionedInlineMixin", "VersionedModelAdmin", "VersionedStackedInline", "VersionedTabularInline"]
