"""`VersionedModelAdmin`: saving, deleting and actions apply only to the version that the page has shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import InlineModelAdmin
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.forms import HiddenInput
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.html import format_html_join
from django.utils.translation import gettext as _

from django_dlock.acquire import no_lease_after
from django_dlock.atomic_blocks import own_block
from django_dlock.bases import guard_override, guards, require_left_of
from django_dlock.comparisons import lock_versions
from django_dlock.errors import StaleObject
from django_dlock.forms import VERSION, CheckedDeletion, VersionedForms, versioned
from django_dlock.forms.differences import resubmitted
from django_dlock.forms.snapshot import FormSnapshot, SnapshotMissing
from django_dlock.forms.views import again_when_stale, read_from_write_database
from django_dlock.version_field import has_had
from django_dlock.versions import VersionedMixin, read_version, require_unchanged
from dlock_core.observability.hooks import emit_conflict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from django.contrib.admin import ModelAdmin
    from django.db.models import Model, QuerySet
    from django.http import HttpRequest
    from django.utils.safestring import SafeString

    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin

__all__ = ["VersionedInlineMixin", "VersionedModelAdmin", "VersionedStackedInline", "VersionedTabularInline"]


@guards
def _guarded_form(get_form: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: Any, request: HttpRequest, obj: Any = None, *args: Any, **kwargs: Any) -> Any:
        form = get_form(self, request, obj, *args, **kwargs)
        return versioned(form, also_shown=tuple(self.get_readonly_fields(request, obj)))

    return guarded


@guards
def _guarded_list(get_changelist_formset: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        formset = get_changelist_formset(self, request, *args, **kwargs)
        return versioned_rows(formset, self.get_list_display(request))

    return guarded


@guards
def _guarded_rows(get_formset: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: Any, request: HttpRequest, obj: Any = None, *args: Any, **kwargs: Any) -> Any:
        formset = get_formset(self, request, obj, *args, **kwargs)
        return versioned_rows(formset, self.get_readonly_fields(request, obj))

    return guarded


_ACTED: Final = "_dlock_has_acted"
"""Attribute of a request whose action has begun, so that it must not be run again."""


class VersionedModelAdmin(_ModelAdmin):
    """A ModelAdmin of a VersionedMixin model that never overwrites, or deletes, a change which the user has not seen.

    Saving an object, or a row of the list, that has changed since the page was shown displays the differences and asks.
    Deleting it, or running an action on it, is refused, and the page is shown again. An action runs once, in a
    transaction of the model's database with the rows of the page locked, and StaleObject rolls all of it back. With
    "select all across pages", the rows that were on no page are neither checked nor locked: what the action changes of
    them by `save()` is checked, but not what it changes by `queryset.update()`.
    """

    unguarded_actions: ClassVar[tuple[str, ...]] = ()
    """Names of actions that are neither checked nor run in a transaction.

    An export, or an action that opens its own transactions or takes leases, for which a row lock would come too early.
    """

    delete_confirmation_template = "admin/django_dlock/delete_confirmation.html"
    delete_selected_confirmation_template = "admin/django_dlock/delete_selected_confirmation.html"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        guard_override(cls, "get_form", _guarded_form)
        guard_override(cls, "get_changelist_formset", _guarded_list)

    def __init__(self, model: type[Model], admin_site: admin.AdminSite) -> None:
        super().__init__(model, admin_site)
        if not issubclass(model, VersionedMixin):
            raise ImproperlyConfigured(f"{type(self).__name__} needs a model with VersionedMixin")
        names: Any = self.unguarded_actions
        if isinstance(names, str):
            raise ImproperlyConfigured(f"unguarded_actions of {type(self).__name__} is a list of names, not one text")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return read_from_write_database(super().get_queryset(request), request)

    # One object

    @_guarded_form
    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        return super().get_form(request, obj, change, **kwargs)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return [name for name in super().get_fields(request, obj) if name != VERSION]

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        view = super().changeform_view
        return again_when_stale(lambda: view(request, *args, **kwargs), unless=lambda: _has_acted(request))

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any) -> Any:
        form = context["adminform"].form
        formsets = [inline.formset for inline in context["inline_admin_formsets"]]
        if page := conflict_page(self, request, form, formsets):
            return page
        for row in (row for formset in formsets if formset.is_bound for row in formset.forms):
            if getattr(row, "is_gone", False):  # Django does not render the form of a deleted row, nor its errors.
                self.message_user(request, row.non_field_errors()[0], messages.ERROR)
        response = super().render_change_form(request, context, *args, **kwargs)
        if VERSION in form.fields and context["has_change_permission"]:
            _carry_version(context["adminform"])
        return response

    # The list

    @_guarded_list
    def get_changelist_formset(self, request: HttpRequest, **kwargs: Any) -> Any:
        return super().get_changelist_formset(request, **kwargs)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        view = super().changelist_view
        response = again_when_stale(lambda: view(request, extra_context), unless=lambda: _has_acted(request))
        formset = _bound_formset(response)
        if formset is None:
            return response
        if page := conflict_page(self, request, None, [formset]):
            return page
        for form in formset.forms:
            if form.is_refused:
                self.message_user(request, f"{form.instance}: {form.non_field_errors()[0]}", messages.ERROR)
        return response

    # Actions

    def action_checkbox(self, obj: Any) -> SafeString:
        return super().action_checkbox(obj) + self.version_inputs([obj])

    def version_inputs(self, rows: Iterable[Model]) -> SafeString:
        """Return the hidden inputs with the versions that a page shows, for the pages of your own actions.

        A page that an action renders with "queryset" in its context has them as `{{ dlock_versions }}`.
        """
        inputs = ((_input_name(row), FormSnapshot(read_version(row)).sign(row)) for row in rows)
        return format_html_join("\n", '<input type="hidden" name="{}" value="{}">', inputs)

    def response_action(self, request: HttpRequest, queryset: QuerySet[Any], **where: Any) -> Any:
        """Run an action once, in a transaction, if its rows are unchanged since the page was shown.

        `where` is passed since Django 6.1: the action's location, in the list or on an object's form.
        """
        vars(request)[_ACTED] = True
        action = _action(request, **where)
        if action in self.unguarded_actions:
            return super().response_action(request, queryset, **where)
        queryset = read_from_write_database(queryset, request)
        try:
            with own_block(queryset.db):
                if changed := self._changed_rows(request, queryset):
                    return self._refuse_action(request, changed)
                with no_lease_after(f"the admin action {action!r}"):
                    response = super().response_action(request, queryset, **where)
                _require_usable(action, queryset.db)
        except StaleObject as error:
            return self._refuse_action(request, [error.name if error.instance is None else str(error.instance)])
        context = getattr(response, "context_data", None) or {}
        if "queryset" in context:
            context["dlock_versions"] = self.version_inputs(context["queryset"])
        return response

    def _changed_rows(self, request: HttpRequest, queryset: QuerySet[Any]) -> list[str]:
        """Return the rows of an action that are not as the page has shown them.

        All of them are locked, so that they stay as they are until the action has written them.
        """
        rows = list(_rows_of_action(request, queryset))
        found = lock_versions([row.pk for row in rows], self.model._dlock_version, queryset.db)
        return [str(row) for row in rows if found.get(row.pk) != _shown_version(request, row)]

    def _refuse_action(self, request: HttpRequest, changed: Sequence[str]) -> None:
        text = _("Nothing was done, because these have changed since the page was shown: %s. Check them and try again.")
        self.message_user(request, text % ", ".join(changed), messages.ERROR)

    # Deleting one

    def render_delete_form(self, request: HttpRequest, context: Any) -> Any:
        row = context["object"]
        context["dlock_version"] = HiddenInput().render(VERSION, FormSnapshot(read_version(row)).sign(row))
        return super().render_delete_form(request, context)

    def delete_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().delete_view(request, *args, **kwargs)
        except (StaleObject, SnapshotMissing):
            text = _(
                "Nothing was deleted, because the object has changed since the page was shown. This is its state now."
            )
            self.message_user(request, text, messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Delete the version that the confirmation page has shown; raises StaleObject or SnapshotMissing."""
        version, read = _snapshot(request, obj).version, read_version(obj)
        if not has_had(obj, version):
            raise emit_conflict(StaleObject(obj, expected=version, found=read, action="delete"))
        require_unchanged(obj)
        super().delete_model(request, obj)


def _carry_version(form: Any) -> None:
    (name, options), *others = form.fieldsets or [(None, {})]
    form.fieldsets = [(name, {**options, "fields": [*options.get("fields", ()), VERSION]}), *others]


def _bound_formset(response: Any) -> Any:
    cl = (getattr(response, "context_data", None) or {}).get("cl")
    formset = getattr(cl, "formset", None)
    return formset if formset is not None and formset.is_bound else None


def _action(request: HttpRequest, action_location: Any = None) -> str:
    """Return the name of the action whose button was pressed; there may be one above and one below the list."""
    prefix = getattr(action_location, "value", "CHANGE_LIST")
    names = request.POST.getlist("action" if prefix == "CHANGE_LIST" else f"{prefix}-action")
    index = request.POST.get("index", "0")
    return names[int(index)] if index.isdecimal() and int(index) < len(names) else ""


def _has_acted(request: HttpRequest) -> bool:
    return _ACTED in vars(request)


def _require_usable(action: str, using: str) -> None:
    """Raise TransactionManagementError if Django would roll back in silence what the action reports as done."""
    if transaction.get_rollback(using=using):
        raise transaction.TransactionManagementError(
            f"the action {action!r} has hidden an error of the transaction that it runs in, so that nothing of it "
            "would be kept: call save_with_version() in place of save(), or open atomic() around what may fail"
        )


def _rows_of_action(request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
    if request.POST.get("select_across") != "1":
        return queryset.filter(pk__in=request.POST.getlist(ACTION_CHECKBOX_NAME))
    shown = [name.removeprefix(_input_name()) for name in request.POST if name.startswith(_input_name())]
    return queryset.filter(pk__in=shown)


def _input_name(row: Model | None = None) -> str:
    return f"{VERSION}:{row.pk if row else ''}"


def _snapshot(request: HttpRequest, row: Model) -> FormSnapshot:
    return FormSnapshot.read(request.POST.get(_input_name(row)) or request.POST.get(VERSION), row)


def _shown_version(request: HttpRequest, row: Model) -> int | None:
    try:
        return _snapshot(request, row).version
    except SnapshotMissing:
        return None


def conflict_page(admin: ModelAdmin[Any], request: HttpRequest, form: Any, formsets: Sequence[Any]) -> Any:
    """Return the page of conflicts; None if there are none, or if other errors must be corrected first."""
    errors = [form.errors] if form else []
    errors += [each for formset in formsets for each in [*formset.errors, formset.non_form_errors()]]
    forms = [*([form] if form else []), *(row for formset in formsets for row in formset.forms)]
    conflicts = [each.conflict for each in forms if getattr(each, "conflict", None)]
    if not conflicts or len(conflicts) < sum(map(bool, errors)):
        return None
    context = {
        **admin.admin_site.each_context(request),
        "title": _("Changed by someone else"),
        "opts": admin.opts,
        "conflicts": conflicts,
        "is_unanswered": any(each.is_unanswered for each in conflicts),
        "hidden": list(resubmitted(request.POST, conflicts)),
        "uploads": [(name, file.name) for name, files in request.FILES.lists() for file in files],
        "here": request.get_full_path(),
        "last": _last_entry(form.instance) if form else None,
        "is_popup": "_popup" in request.POST,
    }
    return TemplateResponse(request, "admin/django_dlock/conflict.html", context, status=409)


def _last_entry(instance: Any) -> LogEntry | None:
    # The admin logs proxies under their own types.
    kind = ContentType.objects.get_for_model(instance, for_concrete_model=False)
    return LogEntry.objects.filter(content_type=kind, object_id=instance.pk).select_related("user").first()


class _KeyWithVersion(forms.BoundField):
    """The input of a row's key, followed by that of its version: the admin's templates render no other hidden input."""

    def as_widget(self, *args: Any, **kwargs: Any) -> Any:
        return super().as_widget(*args, **kwargs) + self.form[VERSION].as_widget()


class _Rows(VersionedForms):
    def add_fields(self, form: Any, index: int | None) -> None:
        super().add_fields(form, index)
        if VERSION in form.fields:
            name = self._pk_field.name  # type: ignore[attr-defined]
            form._bound_fields_cache[name] = _KeyWithVersion(form, form.fields[name], name)  # noqa: SLF001 - Django renders what is in it


def versioned_rows(formset: Any, also_shown: Sequence[Any]) -> Any:
    """Return a formset class whose rows are checked; one refused row refuses all of them."""
    if issubclass(formset, _Rows):
        return formset
    form = versioned(formset.form, also_shown=tuple(also_shown))
    return type(formset.__name__, (_Rows, formset, CheckedDeletion), {"form": form})


class VersionedInlineMixin:
    """A mixin for inlines of a VersionedMixin model: a row that has changed is neither overwritten nor deleted.

    It stands to the left of Django's class.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        require_left_of(InlineModelAdmin, VersionedInlineMixin, cls)
        guard_override(cls, "get_formset", _guarded_rows)

    @_guarded_rows
    def get_formset(self, request: HttpRequest, obj: Any = None, **kwargs: Any) -> Any:
        return super().get_formset(request, obj, **kwargs)  # type: ignore[misc]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return [name for name in super().get_fields(request, obj) if name != VERSION]  # type: ignore[misc]


class VersionedTabularInline(VersionedInlineMixin, admin.TabularInline):  # type: ignore[type-arg]
    """A TabularInline of a VersionedMixin model."""


class VersionedStackedInline(VersionedInlineMixin, admin.StackedInline):  # type: ignore[type-arg]
    """A StackedInline of a VersionedMixin model."""
