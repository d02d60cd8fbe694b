"""Django REST framework: ETag and If-Match on viewsets and generic views of versioned models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.db.models import Model
from rest_framework import serializers

from django_dlock.preconditions import check_preconditions, etag_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from rest_framework.generics import GenericAPIView

    _View = GenericAPIView[Any]
    _Serializer = serializers.ModelSerializer[Any]
else:
    _View = _Serializer = object

__all__ = ["PreconditionMixin", "VersionedSerializerMixin"]

_OF_THE_OBJECT = (None, "retrieve", "create", "update", "partial_update")
"""Actions that answer with the object itself; None in generic views, which have no actions."""


class PreconditionMixin(_View):
    """Goes before the viewset or view: one object gives its ETag, and is changed only by who has seen its version.

    428 without If-Match, 412 when it does not hold, also for who loses a race: `perform_update` and `perform_destroy`
    write the instance that was checked. 304 to a GET with If-None-Match. Lists are as before. In actions of your own
    that change, `get_object()` checks If-Match where it is sent. JSON and the browsable API have tags of their own.
    """

    if_match_required: ClassVar[Collection[str]] = ("PUT", "PATCH", "DELETE")
    """The methods that need If-Match."""
    accept_weak: ClassVar[bool] = False
    """Take W/ tags, too, which is what GZipMiddleware and nginx make of ours."""

    _dlock_object: Model | None = None
    _dlock_is_known = False

    def get_object(self) -> Any:
        """Find the object, check permissions, then preconditions."""
        self._dlock_object = instance = super().get_object()
        method = self.request._request.method  # the browsable API and OPTIONS ask as if it were another
        if method == self.request.method:
            self._dlock_is_known = check_preconditions(
                self.request,
                instance,
                required=method in self.if_match_required,
                accept_weak=self.accept_weak,
                variant=self._dlock_variant(),
            )
        return instance

    def perform_create(self, serializer: Any) -> None:
        """Create, and know the new object's ETag; many at once have none."""
        super().perform_create(serializer)  # type: ignore[misc]
        self._dlock_object = serializer.instance if isinstance(serializer.instance, Model) else None

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
                "its get_object() has to call super().get_object(), and to return what that gives"
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
