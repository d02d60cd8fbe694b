"""System checks: mistakes in settings and models that would otherwise show only under load.

`manage.py check --tag dlock` runs them alone and `--deploy` adds those for production.
`manage.py check --database default` also looks for the fence table there.
"""

from __future__ import annotations

from django_dlock.checks import admin, databases, models, settings

__all__ = ["admin", "databases", "models", "settings"]
