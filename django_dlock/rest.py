"""Django REST framework: ETag and If-Match on viewsets and generic views of versioned models."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

from django.db.models import Model

from django_dlock.preconditions import check_preconditions, etag_of
from dlock_core.extras import needed_by

with needed_by("django_dlock.rest"):
    from rest_framework import serializers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from rest_framework.generics import GenericAPIView

    _View = GenericAPIView[Any]
    _Serializer = serializers.ModelSerializer[Any]
else:
    _View = _Serializer = object

__all__ = ["PreconditionMixin", "VersionedSerializerMixin"]

_OF_THE_OBJECT = (None, "retrieve", "create", "update", "partial_update")
"""Actions that answer with the object itself; None in generic views, which have no actions."""
_CHANGING = (None, "update", "partial_update", "destroy")
"""Actions that change the object itself."""


def _checking(get_object: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Have what a view finds checked, once however many classes take part in finding it."""

    @wraps(get_object)
    def checking(self: PreconditionMixin) -> Any:
        instance = get_object(self)
        if instance is not self._dlock_object:
            self._dlock_check(instance)
        return instance

    vars(checking)["_dlock_checks"] = True
    return checking


class PreconditionMixin(_View):
    """Goes before the viewset or view: one object gives its ETag, and is changed only by who has seen its version.

    428 without If-Match, 412 when it does not hold, also for who loses a race: `perform_update` and `perform_destroy`
    write the instance that was checked. 304 to a GET with If-None-Match. Lists are as before. In actions of your own
    that change, `get_object()` checks If-Match where it is sent. JSON and the browsable API have tags of their own.

    What `get_object()` returns is checked, whichever class defines it. A view that has changed an object without
    asking `get_object()` for one raises TypeError when it answers.
    """

    if_match_required: ClassVar[Collection[str]] = ("PUT", "PATCH", "DELETE")
    """The methods that need If-Match."""
    accept_weak: ClassVar[bool] = False
    """Take W/ tags, too, which is what GZipMiddleware and nginx make of ours."""

    _dlock_object: Model | None = None
    _dlock_is_known = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls.get_object, "_dlock_checks"):
            cls.get_object = _checking(cls.get_object)  # type: ignore[method-assign]

    @_checking
    def get_object(self) -> Any:
        """Find the object, check permissions, then preconditions."""
        return super().get_object()

    def _dlock_check(self, instance: Any) -> None:
        self._dlock_object = instance
        method = self.request._request.method  # the browsable API and OPTIONS ask as if it were another
        if method == self.request.method:
            self._dlock_is_known = check_preconditions(
                self.request,
                instance,
                required=method in self.if_match_required,
                accept_weak=self.accept_weak,
                variant=self._dlock_variant(),
            )

    def perform_update(self, serializer: Any) -> None:
        """Save what was checked; TypeError for anything else."""
        self._require_checked(serializer.instance)
        super().perform_update(serializer)  # type: ignore[misc]

    def perform_destroy(self, instance: Any) -> None:
        """Delete what was checked; TypeError for anything else."""
        self._require_checked(instance)
        super().perform_destroy(instance)  # type: ignore[misc]

    def finalize_response(self, request: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
        """Send the ETag along."""
        response = super().finalize_response(request, response, *args, **kwargs)
        self._require_any_check(request, response)
        if response.status_code == 201 and self._dlock_object is None:
            instance = getattr(getattr(response.data, "serializer", None), "instance", None)  # many have a list
            self._dlock_object = instance if isinstance(instance, Model) else None
        shows_it = getattr(self, "action", None) in _OF_THE_OBJECT and response.status_code in {200, 201}
        if self._dlock_object is not None and shows_it:
            response.headers.setdefault("ETag", etag_of(self._dlock_object, variant=self._dlock_variant()))
            if self._dlock_is_known:
                response.status_code, response.data = 304, None
        return response

    def _require_checked(self, instance: Any) -> None:
        if instance is not self._dlock_object:
            raise TypeError(
                f"{type(self).__name__} writes an object whose preconditions were not checked: "
                "it has to write the one that self.get_object() gives"
            )

    def _require_any_check(self, request: Any, response: Any) -> None:
        is_of_one = (self.lookup_url_kwarg or self.lookup_field) in self.kwargs
        needs_it = request.method in self.if_match_required and getattr(self, "action", None) in _CHANGING
        if is_of_one and needs_it and response.status_code < 300 and self._dlock_object is None:
            raise TypeError(
                f"{type(self).__name__} has answered {request.method} without a look at If-Match: "
                "it has to write the object that self.get_object() gives"
            )

    def _dlock_variant(self) -> str:
        return getattr(getattr(self.request, "accepted_renderer", None), "format", None) or ""


class VersionedSerializerMixin(_Serializer):
    """Shows the version as a field that is only read, whatever the model calls it: a client cannot set it."""

    def get_fields(self) -> dict[str, Any]:
        """Add the version."""
        model: Any = self.Meta.model
        name = model._dlock_version.name
        return {**super().get_fields(), name: serializers.IntegerField(read_only=True)}
