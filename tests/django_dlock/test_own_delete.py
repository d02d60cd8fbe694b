"""A `delete()` of the model's own that reads its row again deletes no change that was made in the meantime."""

import pytest
from asgiref.sync import async_to_sync
from django.forms import modelformset_factory
from rest_framework.generics import DestroyAPIView

from django_dlock.errors import StaleObject
from django_dlock.forms import BaseVersionedModelFormSet, VersionedModelForm
from django_dlock.preconditions import etag_of
from django_dlock.rest import PreconditionMixin
from django_dlock.versions import VersionedMixin
from tests.django_dlock.admin_fixtures import change
from tests.django_dlock.admin_urls import DeleteTicket
from tests.django_dlock.pages import form, sent_by
from tests.django_dlock.rest_views import send
from tests.testapp.models import Ticket

pytestmark = pytest.mark.usefixtures("versions_from_1", "admin_pages")

Tickets = modelformset_factory(
    Ticket, form=VersionedModelForm, formset=BaseVersionedModelFormSet, fields=["title"], extra=0, can_delete=True
)


class Destroy(PreconditionMixin, DestroyAPIView):
    queryset = Ticket.objects.all()


class LenientDestroy(Destroy):
    if_match_required = ()


def from_the_table(ticket):
    VersionedMixin.delete(ticket)


def softly(ticket):
    ticket.state = "closed"
    ticket.save()


def softly_after_a_save_of_its_own(ticket):
    ticket.notes = "deleted by anna"
    ticket.save()
    softly(ticket)


DELETIONS = [from_the_table, softly, softly_after_a_save_of_its_own]


def by_method(ticket, rf):
    ticket.delete_with_version()


def by_method_with_the_version_seen(ticket, rf):
    ticket.delete_with_version(expected=ticket.version)


def by_async_method(ticket, rf):
    async_to_sync(ticket.adelete_with_version)()


def by_formset(ticket, rf):
    formset = Tickets(sent_by(Tickets(), **{"form-0-DELETE": "on"}))
    assert formset.is_valid()
    formset.save()


def by_view(ticket, rf):
    sent = form(DeleteTicket.as_view()(rf.get("/"), pk=ticket.pk))
    assert DeleteTicket.as_view()(rf.post("/", sent), pk=ticket.pk).status_code == 302


def by_rest_view(ticket, rf):
    assert send(Destroy.as_view(), "delete", ticket, {}, if_match=etag_of(ticket)).status_code == 204


WAYS = [by_method, by_method_with_the_version_seen, by_async_method, by_formset, by_view, by_rest_view]


def read_again_before(deletion, monkeypatch, *, rival):
    """Give the model a `delete()` that sees what its row is by now, and before that another user who changes it."""

    def delete(self, **options):
        if rival:
            change(self, title="theirs")
        self.refresh_from_db()
        deletion(self)

    monkeypatch.setattr(Ticket, "delete", delete)


@pytest.mark.parametrize("deletion", DELETIONS)
@pytest.mark.parametrize("way", WAYS)
def test_own_delete_that_reads_the_row_again_deletes_no_change_of_others(ticket, rf, way, deletion, monkeypatch):
    read_again_before(deletion, monkeypatch, rival=True)
    with pytest.raises(StaleObject):
        way(ticket, rf)
    assert Ticket.objects.get().state == "open"


@pytest.mark.parametrize("deletion", DELETIONS)
@pytest.mark.parametrize("way", WAYS)
def test_own_delete_that_reads_an_unchanged_row_again_deletes_it(ticket, rf, way, deletion, monkeypatch):
    read_again_before(deletion, monkeypatch, rival=False)
    way(ticket, rf)
    assert not Ticket.objects.filter(state="open").exists()


def test_instance_may_be_deleted_again_after_a_conflict_and_a_refresh(ticket, monkeypatch):
    with monkeypatch.context() as patch:
        read_again_before(from_the_table, patch, rival=True)
        with pytest.raises(StaleObject):
            ticket.delete_with_version()
    ticket.refresh_from_db()
    ticket.delete_with_version()
    assert not Ticket.objects.exists()


def test_request_without_a_tag_deletes_what_the_own_delete_has_read(ticket, monkeypatch):
    read_again_before(from_the_table, monkeypatch, rival=True)
    assert send(LenientDestroy.as_view(), "delete", ticket, {}).status_code == 204
    assert not Ticket.objects.exists()
