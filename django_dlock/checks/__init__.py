"""System checks: mistakes in settings and models that would otherwise show only under load.

`manage.py check --tag dlock` runs only these checks; `--deploy` adds those for production.
`manage.py check --database default` also checks that the fence table exists there.
"""

from __future__ import annotations

from django_dlock.checks import databases, models, settings

__all__ = ["databases", "models", "settings"]
