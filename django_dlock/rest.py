"""Django REST framework: ETag and If-Match on viewsets and generic views of versioned models."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from django.db import DEFAULT_DB_ALIAS
from django.db.models import Model
from django.views import View

from django_dlock.bases import guard_override, guards, require_left_of
from django_dlock.connections import on_rollback
from django_dlock.errors import StaleObject
from django_dlock.lazy import unwrapped
from django_dlock.preconditions import check_preconditions, require_version, tag_of_version
from django_dlock.shown_versions import (
    Seen,
    ShownVersions,
    oldest_committed,
    shown_as,
    shown_by,
    version_now,
    version_written,
)
from django_dlock.version_field import SentVersion, has_had, latest_version
from django_dlock.versions import read_version, require_unchanged
from dlock_core.extras import needed_by
from dlock_core.observability.hooks import emit_conflict
from dlock_core.web.preconditions import READ_METHODS

with needed_by("django_dlock.rest"):
    from rest_framework import serializers

if TYPE_CHECKING:
    from collections.abc import Callable

    from rest_framework.generics import GenericAPIView

    _View = GenericAPIView[Any]
    _Serializer = serializers.ModelSerializer[Any]
else:
    _View = _Serializer = object

__all__ = ["PreconditionMixin", "VersionedSerializerMixin"]

_OBJECT_ACTIONS = (None, "retrieve", "create", "update", "partial_update")
"""Actions that return the object itself; None stands for generic views, which have no actions."""
_METHOD_OF_ACTION = {"update": "PUT", "partial_update": "PATCH", "destroy": "DELETE"}
"""The methods of the actions that change the object itself; a route may give them others, such as POST."""
_NO_OBJECT_ACTIONS = ("list", "create")
"""Actions that change no object that exists; your own say so by `detail=False`."""


@guards
def _watching(get_serializer: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `get_serializer` so that its serializers remember the versions which they show."""

    def watching(self: PreconditionMixin, *args: Any, **kwargs: Any) -> Any:
        serializer = get_serializer(self, *args, **kwargs)
        if isinstance(serializer, serializers.BaseSerializer):
            if self._dlock_shown_versions is None:
                self._dlock_shown_versions = ShownVersions()
            self._dlock_shown_versions.watch(serializer)
        return serializer

    return watching


@guards
def _checking(get_object: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a `get_object` so that its object is checked, once even if several classes override the method."""

    def checking(self: PreconditionMixin) -> Any:
        instance = unwrapped(get_object(self))
        if not self._dlock_has_checked(instance):
            self._dlock_check(instance)
        return instance

    return checking


def _methods(given: Any, view: Any) -> set[str]:
    """Return HTTP methods in upper case; raises TypeError for those of no request, which would need nothing."""
    known = {*View.http_method_names, *getattr(view, "http_method_names", ())}
    is_list = isinstance(given, Collection) and not isinstance(given, str)
    if is_list and all(isinstance(each, str) and each.lower() in known for each in given):
        return {each.upper() for each in given}
    raise TypeError(
        f'if_match_required of {view.__name__} is a list of HTTP methods, such as ["PUT", "DELETE"], not {given!r:.80}'
    )


class _Checked(Seen):
    """An object that was checked, with the version that it had then."""

    version: int

    def __init__(self, instance: Any, *, client_has_it: bool | None, origin: _Checked | None) -> None:
        super().__init__(instance)
        self.client_has_it = client_has_it
        """Whether the client has the object; None if nothing was compared."""
        self.origin = origin
        """The object that was compared in its place, and had its version: a rollback may undo that."""

    def holds(self) -> bool:
        """Return whether the object was compared, and all that has been written since came from this request."""
        if self.client_has_it is None or not has_had(self.instance, self.version):
            return False
        return self.origin is None or (self.origin.holds() and has_had(self.origin.instance, self.version))


class PreconditionMixin(_View):
    """A mixin to the left of a viewset or view: answers carry an ETag, and a change needs the version that was seen.

    A change without If-Match is answered with 428, and with 412 if If-Match does not hold. That includes a client that
    loses a race, because `perform_update` and `perform_destroy` write the instance that was checked. A GET with
    If-None-Match is answered with 304. Lists are unchanged. JSON and the browsable API have different tags.

    `update`, `partial_update` and `destroy` need what PUT, PATCH and DELETE need, even if a POST is routed to them. In
    your own actions the method decides: a POST is checked by `get_object()` if the client sends If-Match. A `post()` of
    a view without actions that calls `get_object()` needs it, and one that only creates does not.

    The object that `get_object()` returns is checked, whichever class defines that method. A view that changes an
    object without calling `get_object()` raises TypeError when it answers, also if its URL has no key, such as `/me/`;
    a list, `create`, and your own actions with `detail=False` need no object.
    """

    if_match_required: ClassVar[Collection[str]] = ("PUT", "PATCH", "DELETE")
    """The HTTP methods that need If-Match, in upper or lower case; () makes it optional everywhere."""
    accept_weak: ClassVar[bool] = False
    """Accept W/ tags as well; GZipMiddleware and nginx turn our tags into weak ones."""

    _dlock_checked: Sequence[_Checked] = ()
    _dlock_shown_versions: ShownVersions | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        require_left_of(View, PreconditionMixin, cls)
        guard_override(cls, "get_object", _checking)
        if hasattr(cls, "get_serializer"):
            guard_override(cls, "get_serializer", _watching)
        if not hasattr(cls.if_match_required, "__get__"):  # A property is checked when it is read.
            _methods(cls.if_match_required, cls)

    @classmethod
    def as_view(cls, *args: Any, **options: Any) -> Any:
        """Make the view function as Django REST framework does; raises TypeError for a wrong `if_match_required`."""
        if "if_match_required" in options:
            _methods(options["if_match_required"], cls)
        return super().as_view(*args, **options)

    @_checking
    def get_object(self) -> Any:
        """Return the object after checking permissions, and then preconditions."""
        return super().get_object()

    def _dlock_check(self, instance: Any, *, is_write: bool = False) -> None:
        require_version(type(instance))
        version = read_version(instance)
        # A row that was checked, and perhaps written by this very request since, is not compared with If-Match again.
        same = (each for each in reversed(self._dlock_checked) if each.instance == instance)
        former = next((each for each in same if latest_version(each.instance) == version and each.holds()), None)
        if former is None:
            checked = _Checked(instance, client_has_it=self._dlock_is_known(instance, is_write=is_write), origin=None)
        elif former.version == version:  # What was compared is the very version that this instance has.
            checked = _Checked(instance, client_has_it=former.client_has_it, origin=former.origin)
        else:
            checked = _Checked(instance, client_has_it=False, origin=former)
        self._dlock_checked = [*self._dlock_checked, checked]

    def _dlock_is_known(self, instance: Any, *, is_write: bool) -> bool | None:
        """Check the preconditions, and return whether the client has the object; None if nothing was compared."""
        # The browsable API and OPTIONS replace the method to find out what would be allowed: those check nothing.
        method = self.request.method
        if method != self.request._request.method and not is_write:  # noqa: SLF001 - it has no public name
            return None
        return check_preconditions(
            self.request,
            instance,
            required=self._dlock_requires(method) or self._dlock_is_plain_post(method),
            accept_weak=self.accept_weak,
            variant=self._dlock_variant(),
        )

    def _dlock_has_checked(self, instance: Any) -> bool:
        return any(each.instance is instance and each.holds() for each in self._dlock_checked)

    def _dlock_has_tag(self) -> bool:
        """Return whether the client has sent which version it wants to change."""
        return bool(self.request.headers.get("If-Match", "*").strip() != "*")

    def _dlock_requires(self, method: str | None) -> bool:
        """Return whether a request needs If-Match, by its method or by the usual method of its action."""
        required = _methods(self.if_match_required, type(self))
        return method in required or _METHOD_OF_ACTION.get(getattr(self, "action", "")) in required

    def _dlock_is_plain_post(self, method: str | None) -> bool:
        """Return whether it is a POST to a view without actions: it gets an object only to change it."""
        return method == "POST" and bool(self.if_match_required) and getattr(self, "action", None) is None

    def perform_update(self, serializer: Any) -> None:
        """Save the object that was checked; raises TypeError for another object."""
        self._require_checked(serializer.instance)
        super().perform_update(serializer)  # type: ignore[misc]

    def perform_destroy(self, instance: Any) -> None:
        """Delete the object that was checked; raises TypeError for another object."""
        self._require_checked(instance)
        if self._dlock_has_tag():  # Without a tag, the object's own delete() may decide by what it reads.
            require_unchanged(unwrapped(instance))
        super().perform_destroy(instance)  # type: ignore[misc]

    def handle_exception(self, exc: Any) -> Any:
        """Answer a conflict of a row that was checked with 412, as any other, whichever instance of it was saved."""
        if isinstance(exc, StaleObject):
            exc.instance = next(
                (each.instance for each in self._dlock_checked if each.instance == exc.instance), exc.instance
            )
        return super().handle_exception(exc)

    def finalize_response(self, request: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the response with the ETag, or as a 304."""
        response = super().finalize_response(request, response, *args, **kwargs)
        self._require_any_check(request, response)
        shows_it = getattr(self, "action", None) in _OBJECT_ACTIONS and response.status_code in {200, 201}
        shown, version = self._dlock_shown(response) if shows_it else (None, None)
        if shown is not None and version is not None:
            tag = tag_of_version(type(shown), shown.pk, version, self._dlock_variant())
            response.headers.setdefault("ETag", tag)
            # Of a preview, that is: the next writer may get the same version.
            on_rollback(partial(response.headers.pop, "ETag", None), using=_database_of(shown))
            if any(each.client_has_it for each in self._dlock_checked_as(shown) if each.version == version):
                response.status_code, response.data = 304, None
        return response

    def _dlock_shown(self, response: Any) -> tuple[Any, int | None]:
        """Return the instance that a response shows, and in which version: a view may read its object more than once.

        A response that is not what its serializer has made may show anything that the view has read. To a reader it has
        the oldest version that was shown: with the tag of a newer one, a client could overwrite what it has not seen.
        To a writer that has sent a tag, and so knows what was there before, it has the version that the serializer has
        shown last; to others, that which was written.
        """
        serializer = getattr(getattr(response, "data", None), "serializer", None)
        instance: Any = unwrapped(getattr(serializer, "instance", None))
        is_named = isinstance(instance, Model)  # With many=True it is a list.
        if not is_named:
            if not self._dlock_checked:
                return None, None
            instance = self._dlock_checked[-1].instance
        same = self._dlock_checked_as(instance)
        if not same and response.status_code != 201:
            return None, None
        is_read = self.request.method in READ_METHODS
        shown = shown_as(serializer, response.data) if is_named else None
        if is_named and shown is None and self._dlock_has_tag() and not is_read:
            shown = shown_by(serializer)[-1:] or None
        if shown is not None:
            return instance, oldest_committed(shown, same) if shown else version_now(instance, same)
        if not is_read:
            written = version_written(same)
            # With the tag of what it was before, a client would be told of a conflict with its own change.
            if written is not None or any(each.was_read_again for each in same):
                return instance, written
        return instance, self._dlock_oldest(instance, same)

    def _dlock_oldest(self, instance: Model, checked: Sequence[_Checked]) -> int | None:
        """Return the oldest version of an instance's row that the view may have shown; None if that is not known."""
        versions = self._dlock_shown_versions
        shown = [] if versions is None else versions.of_row(instance)
        if versions is not None and versions.is_full and not shown:
            return None
        # The rest of the answer may be made of what was checked.
        known = [each.oldest_now for each in checked]
        known.append(oldest_committed(shown, checked) if shown else version_now(instance, checked))
        return None if None in known else min(each for each in known if each is not None)

    def _dlock_checked_as(self, instance: Model) -> list[_Checked]:
        return [each for each in self._dlock_checked if each.instance == instance]

    def _require_checked(self, instance: Any) -> None:
        instance = unwrapped(instance)
        if self._dlock_has_checked(instance):
            return
        if any(each.instance is instance for each in self._dlock_checked):
            self._dlock_check(instance, is_write=True)  # It was read again since, in place, or not compared at all.
        else:
            raise TypeError(
                f"{type(self).__name__} writes an object whose preconditions were not checked: "
                "write the object that self.get_object() returns"
            )

    def _require_any_check(self, request: Any, response: Any) -> None:
        is_checked = any(each.client_has_it is not None for each in self._dlock_checked)
        if response.status_code < 400 and not is_checked and self._dlock_needs_object(request.method):
            raise TypeError(
                f"{type(self).__name__} has answered {request.method} without checking If-Match: "
                "write the object that self.get_object() returns; an action of your own on no single object says "
                f"detail=False, and a view without actions leaves {request.method} out of if_match_required"
            )

    def _dlock_needs_object(self, method: str | None) -> bool:
        """Return whether a request changes one object, as far as its method and its action say."""
        action = getattr(self, "action", None)
        details = (getattr(self, "detail", None), getattr(getattr(self, action or "", None), "detail", None))
        return self._dlock_requires(method) and action not in _NO_OBJECT_ACTIONS and False not in details

    def _dlock_variant(self) -> str:
        return getattr(getattr(self.request, "accepted_renderer", None), "format", None) or ""


def _database_of(instance: Any) -> str:
    return instance._state.db or DEFAULT_DB_ALIAS


class VersionedSerializerMixin(_Serializer):
    """A serializer mixin, to the left, that shows the version, under the model's name for it, as a read-only field.

    A version among the data of a change has to be that of the instance; so has a field of another name whose `source`
    is the version. It stays in `validated_data`, under the model's name for it, so that the first save of an instance
    that was read again, also in place as by `instance.lock_row()`, compares it, too. A change without one is not
    compared, unless you declare the field as required: then each change needs it, also a PATCH. With `allow_null=True`
    a null counts as not sent.

    A serializer of one object without an instance makes a new object, which needs no version and gets its own. In
    nested data and lists, where the serializer does not know the instance, declare the field and compare the versions
    of `validated_data` yourself; a required one is required there, too.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        require_left_of(serializers.Serializer, VersionedSerializerMixin, cls)

    def get_fields(self) -> dict[str, Any]:
        """Return the fields, including the version; raises TypeError if its name is that of another value's field."""
        name, fields = self._dlock_version_name(), super().get_fields()
        source = fields.setdefault(name, serializers.IntegerField(read_only=True)).source
        if source not in (None, name):
            raise TypeError(
                f"the field {name!r} of {type(self).__name__} shows {source!r} in place of the version: "
                "give it another name"
            )
        if self._dlock_makes_new():  # A client cannot know the version of an object that is not there yet.
            for key, field in fields.items():
                field.required = field.required and (field.source or key) != name
        return fields

    def to_internal_value(self, data: Any) -> Any:
        """Validate the data; raises StaleObject if they have another version than the instance."""
        validated, name = super().to_internal_value(data), self._dlock_version_name()
        validated.pop(name, None)
        if not self._dlock_makes_new():
            for key, field in self.fields.items():
                is_read = field.source == name and (_is_saved(self.instance) or not field.read_only)
                if is_read and self._dlock_has(key, field, data):
                    validated[name] = self._dlock_compared(SentVersion(_version_in(data, key)))
        return validated

    def _dlock_has(self, key: str, field: Any, data: Any) -> bool:
        is_sent: bool = key in data and not (data[key] is None and field.allow_null)
        if field.required and not is_sent:  # The framework itself does not require it of a PATCH.
            raise serializers.ValidationError({key: [field.error_messages["required"]]}, code="required")
        return is_sent

    def _dlock_compared(self, version: SentVersion) -> SentVersion:
        instance = unwrapped(self.instance)
        if _is_saved(instance):
            if version != (read := read_version(instance)):
                raise emit_conflict(StaleObject(instance, expected=version, found=read))
            version.note_compared(instance)
        return version

    def _dlock_makes_new(self) -> bool:
        """Return whether the data are of a new object, which only the outermost serializer of one object knows."""
        instance: Any = self.instance
        return self.root is self and (instance is None or (isinstance(instance, Model) and not _is_saved(instance)))

    def _dlock_version_name(self) -> str:
        model: Any = self.Meta.model
        require_version(model)
        name: str = model._dlock_version.name
        return name


def _is_saved(instance: Any) -> bool:
    return isinstance(instance, Model) and not instance._state.adding


def _version_in(data: Any, name: str) -> int:
    try:
        version: int = serializers.IntegerField().run_validation(data[name])
    except serializers.ValidationError as error:
        raise serializers.ValidationError({name: error.detail}) from None
    return version
