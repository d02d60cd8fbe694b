"""System checks: mistakes in settings and models that would otherwise show only under load.

`manage.py check --tag dlock` runs them alone; `--deploy` and `--database` add those that need it.
"""

from __future__ import annotations

from django_dlock.checks import databases, models, settings

__all__ = ["databases", "models", "settings"]
