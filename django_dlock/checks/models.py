"""Checks of models with VersionedMixin: nothing writes a row past its version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from django.apps import apps
from django.core.checks import CheckMessage, Error, Tags, Warning, register  # noqa: A004 - Django's own name
from django.db.models import SET_DEFAULT, SET_NULL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from django.apps import AppConfig
    from django.db.models import Model

TAG: Final = "dlock"


@register(TAG, Tags.models)
def check_models(app_configs: Sequence[AppConfig] | None = None, **_: Any) -> list[CheckMessage]:
    """E006, E007, W008, W009, W012, W014: nothing writes a versioned row past its version."""
    from django_dlock.models import VersionedMixin

    checks: tuple[Callable[[type[Model]], Iterable[CheckMessage]], ...] = (
        _version_field,
        _base_manager,
        _managers,
        _on_delete,
        _parents,
    )
    return [
        message
        for model in models_of(VersionedMixin, app_configs=app_configs)
        for check in checks
        for message in check(model)
    ]


def models_of(*mixins: type, app_configs: Sequence[AppConfig] | None = None) -> list[type[Model]]:
    """List the installed models with any of these mixins, of these apps (None: of all)."""
    found = [model for model in apps.get_models() if issubclass(model, mixins)]
    return [model for model in found if app_configs is None or model._meta.app_config in app_configs]


def _version_field(model: type[Model]) -> Iterator[CheckMessage]:
    from django_dlock.models import VersionField

    names = [field.name for field in model._meta.fields if isinstance(field, VersionField)]
    if not names:
        hint = "Add version = VersionField()."
        yield Error("VersionedMixin is used without a VersionField.", hint=hint, obj=model, id="dlock.E006")
    if len(names) > 1:
        text = f"There are {len(names)} version fields ({', '.join(names)}); only one can count."
        yield Error(text, hint="Keep one, in the topmost model that has any.", obj=model, id="dlock.E007")


def _base_manager(model: type[Model]) -> Iterator[CheckMessage]:
    if model._base_manager.get_queryset().query.where:
        yield Warning(
            "The base manager filters rows: saving a row that it hides looks like a conflict.",
            hint="Name a manager in Meta.base_manager_name that shows every row, and filter in another one.",
            obj=model,
            id="dlock.W008",
        )


def _managers(model: type[Model]) -> Iterator[CheckMessage]:
    from django_dlock.versions import VersionedQuerySet

    for manager in model._meta.managers:
        if not isinstance(manager.get_queryset(), VersionedQuerySet):
            yield Warning(
                f"update() and bulk_update() of the manager {manager.name!r} do not count the version up.",
                hint="Derive its queryset from django_dlock.versions.VersionedQuerySet.",
                obj=model,
                id="dlock.W009",
            )


def _on_delete(model: type[Model]) -> Iterator[CheckMessage]:
    """Django clears a foreign key through the base manager when its target is deleted."""
    from django_dlock.versions import VersionedQuerySet

    if isinstance(model._base_manager.get_queryset(), VersionedQuerySet):
        return
    for field in model._meta.local_fields:
        if getattr(field.remote_field, "on_delete", None) in (SET_NULL, SET_DEFAULT):
            yield Warning(
                f"When its target is deleted, {field.name!r} changes without a count of the version.",
                hint='Set Meta.base_manager_name = "objects", a manager that counts versions.',
                obj=model,
                id="dlock.W012",
            )


def _parents(model: type[Model]) -> Iterator[CheckMessage]:
    """A row that is saved as its parent passes the child's version by."""
    version = getattr(model, "_dlock_version", None)
    if version is None or version.model is not model:
        return
    for parent in model._meta.get_parent_list():
        yield Warning(
            f"{parent.__name__}, which it inherits a table from, has no version: what is saved as a {parent.__name__} "
            "is neither checked nor counted.",
            hint=f"Move VersionedMixin to {parent.__name__}, or write its rows as {model.__name__} only.",
            obj=model,
            id="dlock.W014",
        )
