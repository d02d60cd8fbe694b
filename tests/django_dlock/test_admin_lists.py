"""VersionedModelAdmin keeps its promises about the list, its actions, and deleting."""

import re
from functools import partial

import django
import pytest
from django.contrib.admin.models import LogEntry
from django.db import connections, transaction
from django.db.models.signals import pre_delete, pre_save
from django.db.transaction import TransactionManagementError

from django_dlock import lock
from django_dlock.admin import VersionedModelAdmin
from django_dlock.errors import NotSupported, StaleObject
from django_dlock.versions import VersionedMixin
from tests.django_dlock.admin_fixtures import change
from tests.django_dlock.admin_urls import TicketAdmin
from tests.django_dlock.pages import form
from tests.django_dlock.parties import until_blocked
from tests.testapp.models import Code, Draft, Ticket

DRAFTS = "/admin/testapp/draft/"
TICKETS = "/admin/testapp/ticket/"
CODES = "/admin/testapp/code/"


def text(response):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode()))


def titles(model):
    return [each.title for each in model.objects.order_by("pk")]


@pytest.fixture
def drafts(admin_pages):
    return [Draft.objects.create(title=title) for title in ("c", "b", "a")]  # the list has the reverse order


def listed(browser, address=DRAFTS, **changes):
    return form(browser.get(address), **changes)


# editing in the list


def test_rows_of_the_list_are_saved(browser, drafts):
    sent = listed(browser, **{"form-0-title": "a!", "form-2-title": "c!", "_save": "1"})
    assert browser.post(DRAFTS, sent).status_code == 302
    assert titles(Draft) == ["c!", "b", "a!"]


def test_row_that_was_changed_refuses_the_whole_list_and_is_named(browser, drafts):
    sent = listed(browser, **{"form-0-title": "a!", "form-2-title": "c!", "_save": "1"})
    change(drafts[2], title="theirs")
    response = browser.post(DRAFTS, sent)
    assert response.status_code == 409
    assert titles(Draft) == ["c", "b", "theirs"]
    assert f"Draft object ({drafts[2].pk})" in text(response)
    assert f"Draft object ({drafts[0].pk})" not in text(response)
    assert "Title a a! theirs" in text(response)
    response = browser.post(DRAFTS, form(response, **{"form-0-dlock_version_title": "mine"}))
    assert response.status_code == 302
    assert titles(Draft) == ["c!", "b", "a!"]


def test_theirs_can_be_kept_in_the_list(browser, drafts):
    sent = listed(browser, **{"form-0-title": "a!", "form-2-title": "c!", "_save": "1"})
    change(drafts[2], title="theirs")
    response = browser.post(DRAFTS, sent)
    browser.post(DRAFTS, form(response, **{"form-0-dlock_version_title": "theirs"}))
    assert titles(Draft) == ["c!", "b", "theirs"]


def test_rows_that_the_user_left_alone_keep_what_others_wrote(browser, drafts):
    sent = listed(browser, **{"form-0-title": "a!", "_save": "1"})
    change(drafts[0], title="theirs")
    assert browser.post(DRAFTS, sent).status_code == 302
    assert titles(Draft) == ["theirs", "b", "a!"]
    assert LogEntry.objects.count() == 1


@pytest.mark.parametrize("version", ["", "1:x"])
def test_row_with_a_forged_version_refuses_the_whole_list(browser, drafts, version):
    sent = listed(browser, **{"form-0-title": "a!", "form-2-title": "c!", "_save": "1"})
    response = browser.post(DRAFTS, {**sent, "form-0-dlock_version": version})
    assert "Load the page again" in text(response)
    assert titles(Draft) == ["c", "b", "a"]


def test_versions_of_two_rows_cannot_be_swapped(browser, drafts):
    sent = listed(browser, **{"form-0-title": "a!", "_save": "1"})
    response = browser.post(DRAFTS, {**sent, "form-0-dlock_version": sent["form-1-dlock_version"]})
    assert "Load the page again" in text(response)
    assert titles(Draft) == ["c", "b", "a"]


def test_mistake_in_another_row_comes_first_and_names_the_stale_one(browser, drafts):
    sent = listed(browser, **{"form-0-title": "a!", "form-1-title": "x" * 200, "_save": "1"})
    change(drafts[2], title="theirs")
    response = browser.post(DRAFTS, sent)
    assert response.status_code == 200
    assert f"Draft object ({drafts[2].pk}): This object was changed by someone else" in text(response)
    assert titles(Draft) == ["c", "b", "theirs"]


def test_row_that_is_gone_is_not_made_anew(browser, admin_pages):
    Code.objects.create(code="A", title="a")
    Code.objects.create(code="B", title="b")
    sent = listed(browser, CODES, **{"form-0-title": "new", "form-1-title": "new", "_save": "1"})
    Code.objects.filter(code="A").delete()
    response = browser.post(CODES, sent)
    assert "was deleted by someone else" in text(response)
    assert titles(Code) == ["b"]


# actions


def act(browser, action, rows, **changes):
    return listed(browser, TICKETS, action=action, index="0", _selected_action=[row.pk for row in rows], **changes)


def test_action_runs_on_rows_as_they_were_shown(browser, ticket):
    response = browser.post(TICKETS, act(browser, "close", [ticket]))
    assert response.status_code == 302
    assert Ticket.objects.get().state == "closed"


def test_action_is_refused_when_a_row_was_changed(browser, ticket):
    other = Ticket.objects.create(title="other")
    sent = act(browser, "close", [ticket, other])
    change(ticket, notes="theirs")
    response = browser.post(TICKETS, sent, follow=True)
    assert "Nothing was done, because these have changed since the page was shown: old." in text(response)
    assert {each.state for each in Ticket.objects.all()} == {"open"}


def test_action_does_not_mind_changes_of_rows_that_are_not_selected(browser, ticket):
    other = Ticket.objects.create(title="other")
    sent = act(browser, "close", [ticket])
    change(other, notes="theirs")
    browser.post(TICKETS, sent)
    assert Ticket.objects.get(pk=ticket.pk).state == "closed"


def test_action_on_everything_is_refused_when_a_row_of_the_page_was_changed(browser, ticket):
    sent = act(browser, "close", [ticket], select_across="1")
    hidden = Ticket.objects.create(title="hidden")
    change(ticket, notes="theirs")
    browser.post(TICKETS, sent)
    assert Ticket.objects.get(pk=hidden.pk).state == "open"
    browser.post(TICKETS, act(browser, "close", [ticket], select_across="1"))
    assert Ticket.objects.get(pk=hidden.pk).state == "closed"


@pytest.mark.parametrize("version", [None, "", "1:x"])
def test_action_without_a_believable_version_is_refused(browser, ticket, version):
    sent = act(browser, "close", [ticket])
    sent.pop(f"dlock_version:{ticket.pk}")
    if version is not None:
        sent[f"dlock_version:{ticket.pk}"] = version
    browser.post(TICKETS, sent)
    assert Ticket.objects.get().state == "open"


def test_action_that_changes_nothing_may_be_left_unguarded(browser, ticket):
    sent = act(browser, "export", [ticket])
    change(ticket, title="theirs")
    assert browser.post(TICKETS, sent).content == b"theirs"


@pytest.fixture
def overtaken(on_postgresql, browser, ticket, party):
    """An action on a page with a ticket and, on no page, one that another user changes when the action saves it."""
    shown, other, saved = Ticket.objects.create(title="shown"), party(), []

    def overtake(sender, instance, **_):
        saved.append(instance.title)
        if instance.pk == ticket.pk:
            other.now(partial(Ticket.objects.filter(pk=ticket.pk).update, title="theirs"))

    def run(action):
        sent = act(browser, action, [shown], select_across="1")
        del sent[f"dlock_version:{ticket.pk}"]
        return browser.post(TICKETS, sent, follow=True)

    pre_save.connect(overtake, sender=Ticket)
    yield run, saved
    pre_save.disconnect(overtake, sender=Ticket)


@pytest.mark.parametrize("atomic_requests", [False, True])
def test_action_that_meets_a_change_runs_once_and_changes_nothing(overtaken, monkeypatch, atomic_requests):
    monkeypatch.setitem(connections["postgresql"].settings_dict, "ATOMIC_REQUESTS", atomic_requests)
    run, saved = overtaken
    response = run("close")
    assert saved == ["shown", "old"]
    assert response.status_code == 200
    assert "Nothing was done, because these have changed since the page was shown: old." in text(response)
    assert sorted((each.title, each.state) for each in Ticket.objects.all()) == [("shown", "open"), ("theirs", "open")]


def test_unguarded_action_that_meets_a_change_runs_once_too(overtaken):
    run, saved = overtaken
    with pytest.raises(StaleObject):
        run("close_unguarded")
    assert saved == ["shown", "old"]


def test_action_that_hides_the_failure_of_its_transaction_does_not_pass_for_done(overtaken):
    run, _ = overtaken
    with pytest.raises(TransactionManagementError, match=r"the action 'close_some' .* save_with_version\(\)"):
        run("close_some")
    assert {each.state for each in Ticket.objects.all()} == {"open"}


def test_action_may_leave_out_what_has_changed(overtaken):
    run, saved = overtaken
    run("close_others")
    assert saved == ["shown", "old"]
    assert sorted((each.title, each.state) for each in Ticket.objects.all()) == [
        ("shown", "closed"),
        ("theirs", "open"),
    ]


def test_rows_that_were_shown_are_locked_while_an_action_runs(on_postgresql, browser, ticket, party):
    other, changes = party(), []

    def overtake(sender, instance, **_):
        changes.append(other.do(partial(Ticket.objects.filter(pk=ticket.pk).update, title="theirs")))
        until_blocked("postgresql")

    sent = act(browser, "close", [ticket])
    pre_save.connect(overtake, sender=Ticket)
    try:
        browser.post(TICKETS, sent)
    finally:
        pre_save.disconnect(overtake, sender=Ticket)
    assert changes[0].result(60) == 1
    assert [(each.title, each.state) for each in Ticket.objects.all()] == [("theirs", "closed")]


def test_action_that_takes_a_lease_after_its_row_locks_is_refused_and_one_without_them_is_not(
    browser, ticket, monkeypatch, store
):
    def close(self, request, queryset):
        with lock("tickets", wait=0), transaction.atomic():
            queryset.update(state="closed")

    monkeypatch.setattr(TicketAdmin, "close", close)
    monkeypatch.setattr(TicketAdmin, "close_unguarded", close)
    with pytest.raises(NotSupported, match=r"'close' has locked rows before 'tickets'.* unguarded_actions"):
        browser.post(TICKETS, act(browser, "close", [ticket]))
    assert Ticket.objects.get().state == "open"
    browser.post(TICKETS, act(browser, "close_unguarded", [ticket]))
    assert Ticket.objects.get().state == "closed"


def test_selected_rows_are_deleted_after_a_confirmation(browser, ticket):
    response = browser.post(TICKETS, act(browser, "delete_selected", [ticket]))
    assert "Are you sure" in text(response)
    assert browser.post(TICKETS, form(response), follow=True).status_code == 200
    assert not Ticket.objects.exists()


def test_selected_rows_are_not_deleted_when_one_was_changed_after_the_confirmation_page(browser, ticket):
    other = Ticket.objects.create(title="other")
    response = browser.post(TICKETS, act(browser, "delete_selected", [ticket, other]))
    change(ticket, notes="theirs")
    assert "have changed since the page was shown: old." in text(browser.post(TICKETS, form(response), follow=True))
    assert Ticket.objects.count() == 2
    assert not LogEntry.objects.exists()


def test_selected_rows_are_locked_between_the_check_and_the_deletion(on_postgresql, browser, ticket, party):
    response = browser.post(TICKETS, act(browser, "delete_selected", [ticket]))
    other, changes = party(), []

    def overtake(sender, instance, **_):
        changes.append(other.do(partial(Ticket.objects.filter(pk=instance.pk).update, title="theirs")))

    pre_delete.connect(overtake, sender=Ticket)
    try:
        browser.post(TICKETS, form(response))
    finally:
        pre_delete.disconnect(overtake, sender=Ticket)
    assert changes[0].result(60) == 0  # it had to wait, and then found no row
    assert not Ticket.objects.exists()


@pytest.mark.skipif(django.VERSION < (6, 1), reason="since Django 6.1 actions can be on the form of an object")
def test_action_on_the_form_of_an_object_is_refused_after_a_change(browser, ticket):
    page = f"{TICKETS}{ticket.pk}/change/"

    def sent():
        fields = form(browser.get(page), _selected_action=str(ticket.pk), index="0")
        del fields["_save"]
        return {**fields, "CHANGE_FORM-action": "close_it"}

    stale = sent()
    change(ticket, notes="theirs")
    assert "have changed since the page was shown: old." in text(browser.post(page, stale, follow=True))
    browser.post(page, sent())
    assert Ticket.objects.get().state == "closed"


# deleting one


def test_object_is_deleted_after_a_confirmation(browser, ticket):
    page = f"{TICKETS}{ticket.pk}/delete/"
    assert browser.post(page, form(browser.get(page))).status_code == 302
    assert not Ticket.objects.exists()


def test_object_that_was_changed_after_the_confirmation_page_is_not_deleted(browser, ticket):
    page = f"{TICKETS}{ticket.pk}/delete/"
    sent = form(browser.get(page))
    change(ticket, title="theirs")
    response = browser.post(page, sent, follow=True)
    assert "Nothing was deleted, because the object has changed" in text(response)
    assert "theirs" in text(response)
    assert not LogEntry.objects.exists()
    browser.post(page, form(response))
    assert not Ticket.objects.exists()


def test_object_whose_delete_reads_it_again_is_not_deleted_after_a_change(browser, ticket, monkeypatch):
    def delete(self, **options):
        self.refresh_from_db()
        return VersionedMixin.delete(self, **options)

    monkeypatch.setattr(Ticket, "delete", delete)
    page = f"{TICKETS}{ticket.pk}/delete/"
    sent = form(browser.get(page))
    change(ticket, title="theirs")
    assert "Nothing was deleted" in text(browser.post(page, sent, follow=True))
    assert Ticket.objects.get().title == "theirs"


def test_object_whose_delete_reads_it_again_is_not_deleted_after_a_change_in_between(browser, ticket, monkeypatch):
    def delete_model(self, request, obj):
        change(obj, title="theirs")
        VersionedModelAdmin.delete_model(self, request, obj)

    def delete(self, **options):
        self.refresh_from_db()
        return VersionedMixin.delete(self, **options)

    page = f"{TICKETS}{ticket.pk}/delete/"
    sent = form(browser.get(page))
    monkeypatch.setattr(TicketAdmin, "delete_model", delete_model)
    monkeypatch.setattr(Ticket, "delete", delete)
    assert "Nothing was deleted" in text(browser.post(page, sent, follow=True))
    assert Ticket.objects.exists()


def test_object_is_deleted_after_its_admin_has_saved_it(browser, ticket, monkeypatch):
    def delete_model(self, request, obj):
        obj.notes = f"deleted by {request.user}"
        obj.save()
        VersionedModelAdmin.delete_model(self, request, obj)

    monkeypatch.setattr(TicketAdmin, "delete_model", delete_model)
    page = f"{TICKETS}{ticket.pk}/delete/"
    browser.post(page, form(browser.get(page)))
    assert not Ticket.objects.exists()


def test_object_is_not_deleted_without_its_version(browser, ticket):
    page = f"{TICKETS}{ticket.pk}/delete/"
    for version in ({}, {"dlock_version": "1:x"}):
        assert "Nothing was deleted" in text(browser.post(page, {"post": "yes", **version}, follow=True))
    assert Ticket.objects.exists()
