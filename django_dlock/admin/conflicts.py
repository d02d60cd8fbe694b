"""The page that shows, instead of the admin's own, what has changed meanwhile, and asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from django_dlock.conflicts import sent_again

if TYPE_CHECKING:
    from collections.abc import Sequence

    from django.contrib.admin import ModelAdmin
    from django.http import HttpRequest

__all__ = ["conflict_page"]


def conflict_page(admin: ModelAdmin[Any], request: HttpRequest, form: Any, formsets: Sequence[Any]) -> Any:
    """Give the page, or None where nothing is to be decided, or other errors have to be corrected first."""
    errors = [form.errors] if form else []
    errors += [each for formset in formsets for each in [*formset.errors, formset.non_form_errors()]]
    forms = [*([form] if form else []), *(row for formset in formsets for row in formset.forms)]
    conflicts = [each.conflict for each in forms if getattr(each, "conflict", None)]
    if not conflicts or len(conflicts) < sum(map(bool, errors)):
        return None
    context = {
        **admin.admin_site.each_context(request),
        "title": _("Changed meanwhile"),
        "opts": admin.opts,
        "conflicts": conflicts,
        "is_unanswered": any(each.is_unanswered for each in conflicts),
        "hidden": list(sent_again(request.POST, conflicts)),
        "uploads": [(name, file.name) for name, files in request.FILES.lists() for file in files],
        "here": request.get_full_path(),
        "last": _last_entry(form.instance) if form else None,
        "is_popup": "_popup" in request.POST,
    }
    return TemplateResponse(request, "admin/django_dlock/conflict.html", context, status=409)


def _last_entry(instance: Any) -> LogEntry | None:
    kind = ContentType.objects.get_for_model(instance, for_concrete_model=False)  # as the admin writes them
    return LogEntry.objects.filter(content_type=kind, object_id=instance.pk).select_related("user").first()
