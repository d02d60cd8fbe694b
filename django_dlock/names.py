"""Models and their instances in a lock's name: every spelling of a key is one lock."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from functools import lru_cache, partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import DEFAULT_DB_ALIAS, models, router
from django.db.models.manager import BaseManager
from django.utils.functional import Promise
from django.utils.timezone import is_aware

from django_dlock.errors import NotSupported
from django_dlock.fencing import fence_field, fence_for
from django_dlock.lazy import unwrapped
from dlock_core import names
from dlock_core.errors import NoSuchKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django_dlock.fencing import TableFence

__all__ = ["identify", "kind_of"]


def identify(parts: tuple[Any, ...], using: str | None) -> tuple[str, TableFence, str]:
    """Return the name of a lock, its fence, and the database that it protects: `using`, or that of the models.

    A model's label, "shop.Order" or "shop.order", names the same locks as the model, with the same fence.

    Raises NoSuchKey for a value that cannot be a key of the model, and TypeError for managers, lazy texts, SQL
    expressions, and an instance where no key is expected; ValueError for models of several databases without `using`.
    """
    parts = _with_model(tuple(map(unwrapped, parts)))
    values = _plain(parts)
    name, fence = names.join(*values), fence_for((*parts[:1], *values[1:]))
    return name, fence, _database_of(parts) if using is None else using


def _database_of(parts: Sequence[Any]) -> str:
    """Return the database to which the router writes the models, and each instance that follows its model as the key.

    `save()` writes an instance to where it was read, unless a router knows better, and the model's managers do not.
    """
    found = {
        router.db_for_write(part, **hints)
        for part, key in zip_longest(parts, parts[1:])
        if isinstance(part, type)
        for hints in ([{}, {"instance": key}] if isinstance(key, models.Model) else [{}])
    }
    if len(found) > 1:
        aliases = " and ".join(map(repr, sorted(found)))
        raise ValueError(f"what a lock's name names is written to {aliases}: pass using= with the one that it protects")
    return found.pop() if found else DEFAULT_DB_ALIAS


def _with_model(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the parts with a model in the place of its label."""
    label = names.label_text(parts[0]) if parts else None
    if label is None or "." not in label:
        return parts
    app, _, name = label.partition(".")
    model = apps.all_models.get(app, {}).get(name.lower())
    if model is None:
        return parts
    errors: tuple[type[Exception], ...] = (NoSuchKey, TypeError)
    if len(parts) == 1 or len(model._meta.pk_fields) > 1:  # Otherwise the lock of a row is refused by its label, too.
        errors = (*errors, NotSupported)
    with suppress(*errors):
        _plain((model, *parts[1:]))
        return model, *parts[1:]
    return model._meta.label_lower, *parts[1:]  # A text that cannot be a key of the model is still a valid name.


def _plain(parts: Sequence[Any]) -> Sequence[Any]:
    """Return the parts with models, and the keys that follow them, as values."""
    found = names.with_keys(parts, kind_of)
    for part in found:
        if isinstance(part, models.Model):  # Its text may change while the row stays the same.
            kind = part.__class__.__name__  # that of the instance in a lazy object
            raise TypeError(f"an instance cannot be part of a name: use its class and primary key, lock({kind}, key)")
    return found


def kind_of(part: Any) -> names.Kind | None:
    """Return how a model appears in a name, or None for any other part; raises TypeError for an invalid part."""
    if isinstance(part, type) and issubclass(part, models.Model):
        return _kind(part)
    if isinstance(part, BaseManager):
        raise TypeError(f"a manager cannot be part of a name: use its model, lock({part.model.__name__}, key)")
    if isinstance(part, Promise):
        raise TypeError("a lazy text cannot be part of a name, because it changes with the language: use a fixed text")
    if hasattr(part, "resolve_expression"):
        raise TypeError(f"{type(part).__name__} is a database expression: use a value, such as a primary key")
    return None


@lru_cache(maxsize=1024)
def _kind(model: type[models.Model]) -> names.Kind:
    if model._meta.abstract:
        raise TypeError(f"{model.__name__} is abstract and has no rows: lock a model that inherits from it")
    model = _row_model(model)
    fields: Any = model._meta.pk_fields
    if len(fields) > 1 and fence_field(model) is not None:
        raise NotSupported(f"{model.__name__} has a composite key: name its lock by a text instead of its class")
    return names.Kind(
        label=model._meta.label_lower,
        converters=tuple(partial(_converted, _target(field)) for field in fields),
        key_of=partial(_key_of, model, fields),
    )


def _row_model(model: type[models.Model]) -> type[models.Model]:
    """Return the model whose table has the row of a proxy, or of a child with its parent's key.

    A fence has to be in that row: the parent's own lock would otherwise be another one, or have another fence.
    """
    model = model._meta.concrete_model or model
    field, link = fence_field(model), model._meta.pk
    fenced = None if field is None else field.model
    parent: Any = link.remote_field.model if link.remote_field and link.remote_field.parent_link else None
    if parent is None and fenced not in (None, model):
        raise NotSupported(
            f"{model.__name__} has its own key, but its fence is in {fenced.__name__}: lock {fenced.__name__}"
        )
    if parent is not None and fenced is not None and not issubclass(parent, fenced):
        raise NotSupported(
            f"{model.__name__} is a row of {parent.__name__}, whose own lock has not the fence of {fenced.__name__}: "
            f"put FencedMixin on {parent.__name__}, or lock {parent.__name__}"
        )
    return model if parent is None else _row_model(parent)


def _target(field: Any) -> Any:
    """Return the field that a foreign key refers to in the end, or the field itself."""
    return _target(field.target_field) if field.remote_field else field


def _key_of(model: type[models.Model], fields: Sequence[Any], value: Any) -> list[Any] | None:
    if not isinstance(value, models.Model):
        return None
    if isinstance(value, model):
        if len(fields) == 1 and _row_model(value.__class__) is model:
            return [value.pk]  # A child that is not saved has not set its parent's key.
        return [getattr(value, field.attname) for field in fields]
    if len(fields) == 1 and fields[0].remote_field and isinstance(value, fields[0].remote_field.model):
        return [getattr(value, fields[0].target_field.attname)]
    raise TypeError(f"an instance of {value.__class__.__name__} cannot be a key of {model.__name__}")


def _converted(field: Any, value: Any) -> Any:
    """Return what the field stores: a naive datetime becomes aware, and a field of the application may change case."""
    try:
        found = field.get_prep_value(field.to_python(value))
    except ValidationError as error:
        raise ValueError from error
    if isinstance(found, datetime) and is_aware(found) and not settings.USE_TZ:
        # PostgreSQL would convert it to the zone of the session, and the other databases refuse it.
        raise names.AmbiguousKey("without USE_TZ give the time as it is stored, without a time zone")
    if isinstance(found, Decimal) and (places := getattr(field, "decimal_places", None)) is not None:
        names.refuse_rounded(found, places)
    return found
