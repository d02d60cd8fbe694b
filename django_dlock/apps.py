"""The Django app: its name and its system checks."""

from __future__ import annotations

from django.apps import AppConfig

__all__ = ["DlockConfig"]


class DlockConfig(AppConfig):
    """The configuration of the app."""

    name = "django_dlock"
    verbose_name = "Locks"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks, and nothing else."""
        from django_dlock import checks  # noqa: F401
