"""The Django app: its name, and its system checks, which are imported only when they run: a server does not need them.

`manage.py check --tag dlock` runs only these checks; `--deploy` adds those for production.
`manage.py check --database default` also checks that the fence table exists there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.apps import AppConfig
from django.core.checks import Tags, register

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.core.checks import CheckMessage

__all__ = ["TAG", "DlockConfig"]

TAG: Final = "dlock"
"""The tag of all checks of this package."""


class DlockConfig(AppConfig):
    """The configuration of the app."""

    name = "django_dlock"
    verbose_name = "Locks"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Follow every connection that is opened from now on, and register the system checks."""
        from django_dlock import connections  # noqa: F401

        register(check_project, TAG)
        register(check_models, TAG, Tags.models)
        register(check_deployment, TAG, deploy=True)
        # Only this tag: since Django 6.1, a check with ours would connect even without --database.
        register(check_fence_table, Tags.database)


def check_project(**_: Any) -> list[CheckMessage]:
    """Check the settings, and the admin classes of versioned models."""
    from django_dlock.checks import databases, models, settings

    return [
        *settings.check_stores(),
        *settings.check_middleware(),
        *databases.check_transactions(),
        *models.check_admin(),
    ]


def check_models(app_configs: Sequence[AppConfig] | None = None, **_: Any) -> list[CheckMessage]:
    """Check the models of these apps."""
    from django_dlock.checks import models

    return models.check_models(app_configs)


def check_deployment(**_: Any) -> list[CheckMessage]:
    """Check what matters in production only."""
    from django_dlock.checks import databases, settings

    return [*settings.check_shared_store(), *databases.check_atomic_requests()]


def check_fence_table(databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check the fence table of these databases."""
    from django_dlock.checks.databases import check_fence_table

    return check_fence_table(databases)
