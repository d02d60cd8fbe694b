"""Checks of models with VersionedMixin, and of their admin classes: no write bypasses the version of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004 - Django's own name
from django.db import models
from django.db.models import Model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from django.apps import AppConfig


def check_models(app_configs: Sequence[AppConfig] | None = None) -> list[CheckMessage]:
    """Check models (E006, E007, W008, W009, W012, W014, W016): no write bypasses the version of a row."""
    from django_dlock.models import VersionedMixin

    checks: tuple[Callable[[type[Model]], Iterable[CheckMessage]], ...] = (
        _version_field,
        _base_manager,
        _managers,
        _on_delete,
        _parents,
    )
    return [
        *(
            message
            for model in models_of(VersionedMixin, app_configs=app_configs)
            for check in checks
            for message in check(model)
        ),
        *(message for model in models_of(Model, app_configs=app_configs) for message in _unchecked_version(model)),
    ]


def models_of(*mixins: type, app_configs: Sequence[AppConfig] | None = None) -> list[type[Model]]:
    """Return the installed models with any of these mixins, in these apps (None: in all)."""
    found = [model for model in apps.get_models() if issubclass(model, mixins)]
    return [model for model in found if app_configs is None or model._meta.app_config in app_configs]


def _version_field(model: type[Model]) -> Iterator[CheckMessage]:
    from django_dlock.models import VersionField

    names = [field.name for field in model._meta.fields if isinstance(field, VersionField)]
    if not names:
        hint = "Add `version = VersionField()` to the model."
        yield Error("VersionedMixin is used without a VersionField.", hint=hint, obj=model, id="dlock.E006")
    if len(names) > 1:
        text = f"There are {len(names)} version fields ({', '.join(names)}), but only one of them can be checked."
        yield Error(text, hint="Keep the one in the topmost model that has any.", obj=model, id="dlock.E007")


def _unchecked_version(model: type[Model]) -> Iterator[CheckMessage]:
    """Check version fields outside of VersionedMixin.

    It is no error: packages that keep a history of rows copy all fields into a model of their own.
    """
    from django_dlock.models import VersionedMixin, VersionField

    if issubclass(model, VersionedMixin):
        return
    for field in model._meta.local_fields:
        if isinstance(field, VersionField):
            yield Warning(
                f"{field.name!r} counts the writes of a row, but no save checks it.",
                hint="Add VersionedMixin to the bases of the model, unless it only keeps copies of other rows.",
                obj=model,
                id="dlock.W016",
            )


def _base_manager(model: type[Model]) -> Iterator[CheckMessage]:
    if model._base_manager.get_queryset().query.where:
        yield Warning(
            "The base manager filters rows, so saving a row that it hides is reported as a conflict.",
            hint="Set Meta.base_manager_name to a manager that returns every row, and filter in another manager.",
            obj=model,
            id="dlock.W008",
        )


def _managers(model: type[Model]) -> Iterator[CheckMessage]:
    from django_dlock.versions import VersionedQuerySet

    for manager in model._meta.managers:
        if not isinstance(manager.get_queryset(), VersionedQuerySet):
            yield Warning(
                f"update() and bulk_update() of the manager {manager.name!r} do not increment the version.",
                hint="Derive its queryset from django_dlock.versions.VersionedQuerySet.",
                obj=model,
                id="dlock.W009",
            )


def _on_delete(model: type[Model]) -> Iterator[CheckMessage]:
    """Check foreign keys: Django, or the database itself, changes them when their target is deleted."""
    from django_dlock.versions import VersionedQuerySet

    counts = isinstance(model._base_manager.get_queryset(), VersionedQuerySet)
    for field in model._meta.local_fields:
        on_delete = getattr(field.remote_field, "on_delete", None)
        # Django changes rows that it need not read by an update() of the base manager, and others past every manager.
        is_lazy = getattr(on_delete, "lazy_sub_objs", False)
        if _changes_rows(on_delete) and not (is_lazy and counts):
            yield Warning(
                f"When its target is deleted, {field.name!r} changes without incrementing the version.",
                hint='Set Meta.base_manager_name = "objects", if that is a manager that increments versions.'
                if is_lazy
                else "Use SET_NULL, or SET() with a fixed value: Django changes those through the base manager.",
                obj=model,
                id="dlock.W012",
            )


def _changes_rows(on_delete: Any) -> bool:
    """Return whether it is SET(…), or one of the others that change a row; Django 6.1 has added two."""
    names = ("SET_NULL", "SET_DEFAULT", "DB_SET_NULL", "DB_SET_DEFAULT")
    known = [getattr(models, name) for name in names if hasattr(models, name)]
    return on_delete in known or hasattr(on_delete, "deconstruct")


def _parents(model: type[Model]) -> Iterator[CheckMessage]:
    """Check multi-table inheritance: a row saved as its parent bypasses the child's version."""
    version = getattr(model, "_dlock_version", None)
    if version is None or version.model is not model:
        return
    for parent in model._meta.get_parent_list():
        yield Warning(
            f"Its parent {parent.__name__} has no version: a row saved as a {parent.__name__} is neither checked nor "
            "incremented.",
            hint=f"Move VersionedMixin to {parent.__name__}, or save these rows only as {model.__name__}.",
            obj=model,
            id="dlock.W014",
        )


def check_admin() -> list[CheckMessage]:
    """Check the admin (W013): plain classes of it read a row anew when they save, and so overwrite changes."""
    return list(_unguarded_admins()) if apps.is_installed("django.contrib.admin") else []


def _unguarded_admins() -> Iterator[CheckMessage]:
    from django.contrib.admin.sites import all_sites

    from django_dlock.admin import VersionedInlineMixin, VersionedModelAdmin

    for site in all_sites:
        for model, admin in site._registry.items():  # noqa: SLF001 - Django has no public list
            yield from _unguarded(type(admin), model, VersionedModelAdmin)
            for inline in admin.inlines:
                if isinstance(getattr(inline, "model", None), type):  # Django's own checks report any other.
                    yield from _unguarded(inline, inline.model, VersionedInlineMixin)


def _unguarded(admin: type, model: type[Model], guard: type) -> Iterator[CheckMessage]:
    from django_dlock.models import VersionedMixin

    if issubclass(model, VersionedMixin) and not issubclass(admin, guard):
        yield Warning(
            f"{admin.__name__} saves {model.__name__} over changes that its user has not seen.",
            hint=f"Derive it from django_dlock.admin.{guard.__name__}.",
            obj=model,
            id="dlock.W013",
        )
