"""Checks of the admin: no page saves a versioned row over a change that its user has not seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.apps import apps
from django.core.checks import CheckMessage, Warning, register  # noqa: A004 - Django's own name

if TYPE_CHECKING:
    from collections.abc import Iterator

TAG: Final = "dlock"


@register(TAG)
def check_admin(**_: Any) -> list[CheckMessage]:
    """W013: a versioned model is in the admin with the guard; a plain ModelAdmin reads the row anew when it saves."""
    return list(_unguarded()) if apps.is_installed("django.contrib.admin") else []


def _unguarded() -> Iterator[CheckMessage]:
    from django.contrib.admin.sites import all_sites

    from django_dlock.admin import VersionedModelAdmin
    from django_dlock.models import VersionedMixin

    for site in all_sites:
        for model, admin in site._registry.items():
            if issubclass(model, VersionedMixin) and not isinstance(admin, VersionedModelAdmin):
                yield Warning(
                    f"{type(admin).__name__} saves {model.__name__} over changes that its user has not seen.",
                    hint="Derive it from django_dlock.admin.VersionedModelAdmin.",
                    obj=model,
                    id="dlock.W013",
                )
