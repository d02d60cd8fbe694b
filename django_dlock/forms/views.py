"""Class-based views that change or delete what their user has seen, and nothing newer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import router, transaction
from django.views.generic import View

from django_dlock.errors import StaleObject
from django_dlock.forms import versioned

if TYPE_CHECKING:
    from django.db.models import QuerySet
    from django.http import HttpRequest

__all__ = ["VersionedEditMixin"]


def where_written(rows: QuerySet[Any], request: HttpRequest) -> QuerySet[Any]:
    """Read what is going to be written from where it is written: a replica may not know the newest version."""
    if request.method == "POST" and rows._db is None:  # type: ignore[attr-defined]
        return rows.using(router.db_for_write(rows.model))
    return rows


class VersionedEditMixin:
    """For UpdateView and DeleteView, to the left of them; their template renders `{{ form }}` and a submit button.

    An object that was changed since the page was shown is neither saved nor deleted: the page comes again, with what
    differs. A change in the moment of saving is found, too. The HTTP method DELETE, which has no form, is refused.
    """

    http_method_names = [method for method in View.http_method_names if method != "delete"]  # noqa: RUF012 - Django's

    def get_queryset(self) -> Any:
        return where_written(super().get_queryset(), self.request)  # type: ignore[attr-defined, misc]

    def get_form_class(self) -> Any:
        model = self.get_queryset().model
        return versioned(super().get_form_class(), model)  # type: ignore[misc]

    def get_form_kwargs(self) -> dict[str, Any]:
        return {"instance": self.object, **super().get_form_kwargs()}  # type: ignore[attr-defined, misc]

    def post(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with transaction.atomic(using=router.db_for_write(self.get_queryset().model)):
                return super().post(*args, **kwargs)  # type: ignore[misc]
        except StaleObject:  # changed after it was read for this request: read it again, and ask
            return super().post(*args, **kwargs)  # type: ignore[misc]
