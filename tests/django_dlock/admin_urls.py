"""An admin of the test models, with the version guard."""

import contextlib

from django import forms
from django.contrib import admin
from django.http import HttpResponse
from django.template import engines
from django.urls import path
from django.views.generic import DeleteView, UpdateView

from django_dlock.admin import LockAdmin, VersionedModelAdmin, VersionedStackedInline, VersionedTabularInline
from django_dlock.errors import StaleObject
from django_dlock.forms import VersionedModelForm
from django_dlock.forms.views import VersionedEditMixin
from django_dlock.models import Lock
from tests.testapp.models import Code, Draft, Shop, Step, Tag, Ticket

site = admin.AdminSite()


class StepInline(VersionedTabularInline):
    model = Step
    extra = 0


@admin.register(Ticket, site=site)
class TicketAdmin(VersionedModelAdmin):
    inlines = [StepInline]
    save_as = True
    actions = ["close", "export", "close_it", "close_unguarded", "close_some", "close_others"]
    unguarded_actions = ("export", "close_unguarded")

    def close(self, request, queryset):
        for ticket in queryset:
            ticket.state = "closed"
            ticket.save()

    def close_unguarded(self, request, queryset):
        self.close(request, queryset)

    def close_some(self, request, queryset):
        with contextlib.suppress(StaleObject):
            self.close(request, queryset)

    def close_others(self, request, queryset):
        for ticket in queryset:
            ticket.state = "closed"
            with contextlib.suppress(StaleObject):
                ticket.save_with_version()

    def close_it(self, request, queryset):
        self.close(request, queryset)

    if hasattr(admin, "ActionLocation"):
        close_it.locations = [admin.ActionLocation.CHANGE_FORM]

    def export(self, request, queryset):
        return HttpResponse(",".join(ticket.title for ticket in queryset))


class StackedSteps(VersionedStackedInline):
    model = Step
    fields = ["text"]
    readonly_fields = ["is_done"]


@admin.register(Draft, site=site)
class DraftAdmin(VersionedModelAdmin):
    """The list is editable; the version field has another name."""

    list_display = ["id", "title", "revision"]
    list_editable = ["title"]
    readonly_fields = ["revision"]


@admin.register(Code, site=site)
class CodeAdmin(VersionedModelAdmin):
    """The list is editable; the author of a row chooses its key."""

    list_display = ["code", "title"]
    list_editable = ["title"]


@admin.register(Shop, site=site)
class ShopAdmin(VersionedModelAdmin):
    """The version is in another table."""

    fieldsets = [("All", {"fields": [("name", "owner")]})]


site.register(Lock, LockAdmin)
site.register(Tag)
site.register(Step, VersionedModelAdmin, readonly_fields=["text"])

readers = admin.AdminSite(name="readers")


@admin.register(Ticket, site=readers)
class ReaderAdmin(VersionedModelAdmin):
    def has_change_permission(self, request, obj=None):
        return False


class TicketForm(VersionedModelForm):
    class Meta:
        model = Ticket
        fields = ["title", "state", "tags"]


PAGE = "<h1>{{ object }}</h1><form method=post>{% csrf_token %}{{ form }}</form>"


class Page:
    model = Ticket
    success_url = "/done/"

    def render_to_response(self, context, **options):
        return HttpResponse(engines["django"].from_string(PAGE).render(context, self.request))


class EditTicket(VersionedEditMixin, Page, UpdateView):
    form_class = TicketForm


class EditPlain(VersionedEditMixin, Page, UpdateView):
    fields = ["title", "notes"]


class DeleteTicket(VersionedEditMixin, Page, DeleteView):
    pass


class AlmostSecret(forms.ModelForm):
    class Meta:
        model = Ticket
        fields = ["title", "notes"]
        widgets = {"title": forms.PasswordInput()}


class EditSecret(VersionedEditMixin, Page, UpdateView):
    form_class = AlmostSecret


urlpatterns = [
    path("admin/", site.urls),
    path("readers/", readers.urls),
    path("edit/<int:pk>/", EditTicket.as_view()),
    path("plain/<int:pk>/", EditPlain.as_view()),
    path("secret/<int:pk>/", EditSecret.as_view()),
    path("delete/<int:pk>/", DeleteTicket.as_view()),
]
