"""Class-based views that change or delete what their user has seen, and nothing newer."""

from __future__ import annotations

from typing import Any

from django.db import router, transaction

from django_dlock.errors import StaleObject
from django_dlock.forms import versioned

__all__ = ["VersionedEditMixin"]


class VersionedEditMixin:
    """For UpdateView and DeleteView, to the left of them; their template renders `{{ form }}` and a submit button.

    An object that was changed since the page was shown is neither saved nor deleted: the page comes again, with what
    differs. A change in the moment of saving is found, too.
    """

    def get_form_class(self) -> Any:
        model = self.get_queryset().model  # type: ignore[attr-defined]
        return versioned(super().get_form_class(), model)  # type: ignore[misc]

    def get_form_kwargs(self) -> dict[str, Any]:
        return {"instance": self.object, **super().get_form_kwargs()}  # type: ignore[attr-defined, misc]

    def post(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with transaction.atomic(using=router.db_for_write(self.get_queryset().model)):  # type: ignore[attr-defined]
                return super().post(*args, **kwargs)  # type: ignore[misc]
        except StaleObject:  # changed after it was read for this request: read it again, and ask
            return super().post(*args, **kwargs)  # type: ignore[misc]
