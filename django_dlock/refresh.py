"""Which fields `refresh_from_db()` reads: Django leaves out those that the instance or the queryset defers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.db.models import Model

__all__ = ["fields_read", "is_key"]


def fields_read(instance: Model, fields: Iterable[str] | None, from_queryset: Any) -> set[str]:
    """Return the attribute names of the fields that `refresh_from_db(fields=…, from_queryset=…)` is about to read."""
    if fields is not None:
        fields = set(fields).difference(getattr(instance, "_prefetched_objects_cache", ()))
        if not fields:
            return set()
    columns = instance._meta.concrete_fields
    rows = type(instance)._base_manager if from_queryset is None else from_queryset
    query = rows.all().query
    deferred = instance.get_deferred_fields()
    if fields is None and deferred:
        fields = [each.attname for each in columns if each.attname not in deferred]
    if fields is not None:
        query.add_immediate_loading(fields)  # what only() does
    names, is_deferred = query.deferred_loading
    return {
        each.attname
        for each in columns
        if not names or is_key(each) or bool({each.name, each.attname} & names) is not is_deferred
    }


def is_key(field: Any) -> bool:
    """Return whether a field is the primary key or a part of it, which is always read."""
    return field.primary_key or field in field.model._meta.pk_fields
