"""Models and their instances in a lock's name: every spelling of a key is one lock."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from django.apps import apps
from django.core.exceptions import ValidationError
from django.db import models
from django.db.models.manager import BaseManager
from django.utils.functional import Promise

from django_dlock.errors import NotSupported
from django_dlock.fencing import FencedMixin
from dlock_core import names
from dlock_core.errors import NoSuchKey

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["kind_of", "plain", "with_model"]

_PLAIN: Final = frozenset({str, int, UUID})
"""Types of parts that need no look."""


def with_model(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put a model in the place of its label, "shop.Order" or "shop.order": both are the same locks, with one fence."""
    if not parts or type(parts[0]) is not str or "." not in parts[0]:
        return parts
    app, _, name = parts[0].partition(".")
    model = apps.all_models.get(app, {}).get(name.lower())
    if model is None:
        return parts
    with suppress(NoSuchKey, NotSupported, TypeError):
        plain((model, *parts[1:]))
        return model, *parts[1:]
    return model._meta.label_lower, *parts[1:]  # A text that is no key of the model names a lock all the same.


def plain(parts: Sequence[Any]) -> Sequence[Any]:
    """Turn models, and the keys that follow them, into values for `dlock_core.names.join`.

    Raises NoSuchKey for what cannot be a key of the model, TypeError for an instance where no key is expected, for
    managers, lazy texts and SQL expressions.
    """
    if all(type(part) in _PLAIN for part in parts):
        return parts
    found = names.with_keys(parts, kind_of)
    for part in found:
        if isinstance(part, models.Model):  # its text may change while the row stays the same
            kind = type(part).__name__
            raise TypeError(f"an instance is no name: lock its class and primary key, lock({kind}, key)")
    return found


def kind_of(part: Any) -> names.Kind | None:
    """Tell what a model is in a name; None for any other part; raises TypeError for what can be none."""
    if isinstance(part, type) and issubclass(part, models.Model):
        return _kind(part)
    if isinstance(part, BaseManager):
        raise TypeError(f"a manager is no name: lock its model, lock({part.model.__name__}, key)")
    if isinstance(part, Promise):
        raise TypeError("a lazy text is no part of a lock's name: it may be another one in another language")
    if hasattr(part, "resolve_expression"):
        raise TypeError(f"{type(part).__name__} is a question to the database: give the value, such as a primary key")
    return None


@lru_cache(maxsize=1024)
def _kind(model: type[models.Model]) -> names.Kind:
    if model._meta.abstract:
        raise TypeError(f"{model.__name__} is abstract and has no rows: lock a model that inherits from it")
    model = _with_the_row(model)
    fields: Any = model._meta.pk_fields
    return names.Kind(
        label=model._meta.label_lower,
        converters=tuple(partial(_converted, _target(field)) for field in fields),
        key_of=partial(_key_of, model, fields),
    )


def _with_the_row(model: type[models.Model]) -> type[models.Model]:
    """Find the model of the table in which a proxy, or a child with its parent's key, has its row.

    A row that is its own fence is that of the model with the fence's columns, and so is the name.
    """
    model = model._meta.concrete_model or model
    fenced = model._meta.get_field("dlock_token").model if issubclass(model, FencedMixin) else None
    link: Any = model._meta.pk
    if model is not fenced and link.remote_field and link.remote_field.parent_link:
        return _with_the_row(link.remote_field.model)
    if fenced not in (None, model):
        raise NotSupported(f"{model.__name__} has a key of its own, and its fence in the rows of {fenced.__name__}")
    return model


def _target(field: Any) -> Any:
    """Follow a key that is another model's key."""
    return _target(field.target_field) if field.remote_field else field


def _key_of(model: type[models.Model], fields: Sequence[Any], value: Any) -> list[Any] | None:
    if not isinstance(value, models.Model):
        return None
    if isinstance(value, model):
        if len(fields) == 1 and _with_the_row(value.__class__) is model:
            return [value.pk]  # a child that is not saved has not set its parent's
        return [getattr(value, field.attname) for field in fields]
    if len(fields) == 1 and fields[0].remote_field and isinstance(value, fields[0].remote_field.model):
        return [getattr(value, fields[0].target_field.attname)]
    raise TypeError(f"an instance of {type(value).__name__} is no key of {model.__name__}")


def _converted(field: Any, value: Any) -> Any:
    try:
        value = field.to_python(value)
    except ValidationError as error:
        raise ValueError from error
    return field.get_prep_value(value) if isinstance(field, models.DateTimeField) else value  # a naive one is aware now
