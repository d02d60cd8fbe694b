"""VersionedModelAdmin keeps its promises about one object, its rows, and its history."""

import re
from functools import partial

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.admin import GenericTabularInline
from django.core.exceptions import ImproperlyConfigured
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db.models.signals import pre_save
from django.forms import BaseInlineFormSet, ModelForm, inlineformset_factory, modelformset_factory
from django.utils import timezone

from django_dlock.admin import VersionedInlineMixin, VersionedModelAdmin, VersionedTabularInline
from django_dlock.errors import StaleObject
from django_dlock.forms import VersionedModelForm
from tests.django_dlock.admin_fixtures import change
from tests.django_dlock.admin_urls import site
from tests.django_dlock.pages import form
from tests.testapp.models import Draft, Shop, Step, Tag, Ticket

pytestmark = pytest.mark.usefixtures("versions_from_1")

TICKET = "/admin/testapp/ticket/{}/change/"


@pytest.fixture
def page(ticket):
    return TICKET.format(ticket.pk)


def now(instance):
    return type(instance).objects.get(pk=instance.pk)


def text(response):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode()))


# nothing in the way


def test_object_that_nobody_else_changed_is_saved(browser, ticket, page):
    response = browser.post(page, form(browser.get(page), title="new"))
    assert response.status_code == 302
    assert (now(ticket).title, now(ticket).version) == ("new", 2)


def test_page_can_be_saved_again_and_again(browser, ticket, page):
    for title in ("one", "two", "three"):
        response = browser.post(page, form(browser.get(page), title=title, _continue="1"), follow=True)
        browser.post(page, form(response, title=f"{title} again"))
        assert now(ticket).title == f"{title} again"


def test_other_mistakes_are_shown_as_ever_and_can_be_corrected(browser, ticket, page):
    response = browser.post(page, form(browser.get(page), title="", notes="new"))
    assert response.status_code == 200
    assert "This field is required." in text(response)
    assert browser.post(page, form(response, title="new")).status_code == 302
    assert (now(ticket).title, now(ticket).notes) == ("new", "new")


def test_objects_are_added_as_ever(browser):
    add = "/admin/testapp/ticket/add/"
    response = browser.post(add, form(browser.get(add), title="another"))
    assert response.status_code == 302, text(response)
    assert Ticket.objects.get().title == "another"


# conflicts


def test_change_of_somebody_else_is_not_overwritten(browser, ticket, page):
    sent = form(browser.get(page), title="mine")
    change(ticket, title="theirs", state="closed")
    for _ in range(2):
        response = browser.post(page, sent)
        assert response.status_code == 409
        assert now(ticket).title == "theirs"
    assert not LogEntry.objects.exists()


def test_conflict_shows_what_it_was_what_is_wanted_and_what_it_is(browser, ticket, page):
    ticket = change(ticket, notes="first\nsecond")
    sent = form(browser.get(page), title="mine", notes="first\r\nmy own")
    change(ticket, title="theirs", state="closed")
    shown = text(browser.post(page, sent))
    assert "Title old mine theirs" in shown
    assert "State Still open Still open Closed for good" in shown
    assert "Notes first second first my own first second" in shown
    assert "Price" not in shown
    assert "Extra" not in shown


def test_mine_and_theirs_can_be_chosen_for_each_field(browser, ticket, page):
    sent = form(browser.get(page), title="mine", price="12.50")
    change(ticket, title="theirs", price="99")
    chosen = {"dlock_version_title": "mine", "dlock_version_price": "theirs"}
    response = browser.post(page, form(browser.post(page, sent), **chosen))
    assert response.status_code == 302, text(response)
    assert (now(ticket).title, now(ticket).price, now(ticket).version) == ("mine", 99, 3)
    assert LogEntry.objects.get().get_change_message() == "Changed Title."


def test_only_one_side_s_changes_are_chosen_beforehand(browser, ticket, page):
    sent = form(browser.get(page), notes="mine")
    change(ticket, state="closed")
    response = browser.post(page, form(browser.post(page, sent)))
    assert response.status_code == 302
    assert (now(ticket).notes, now(ticket).state) == ("mine", "closed")


def test_nothing_is_saved_before_every_question_is_answered(browser, ticket, page):
    sent = form(browser.get(page), title="mine", notes="mine")
    change(ticket, title="theirs", notes="theirs")
    response = browser.post(page, form(browser.post(page, sent), dlock_version_title="theirs"))
    assert response.status_code == 409
    assert "Choose a value for each field" in text(response)
    assert now(ticket).version == 2
    response = browser.post(page, form(response, dlock_version_notes="mine"))
    assert response.status_code == 302
    assert (now(ticket).title, now(ticket).notes) == ("theirs", "mine")


@pytest.mark.parametrize("choice", ["mine", "theirs"])
def test_change_while_the_user_decides_is_asked_about_again(browser, ticket, page, choice):
    sent = form(browser.get(page), title="mine")
    change(ticket, title="theirs")
    decided = form(browser.post(page, sent), dlock_version_title=choice)
    change(ticket, title="later")
    response = browser.post(page, decided)
    assert response.status_code == 409
    assert "Title old mine later" in text(response)
    assert browser.post(page, form(response)).status_code == 409  # the choice was made between other values
    assert browser.post(page, form(response, dlock_version_title="mine")).status_code == 302
    assert now(ticket).title == "mine"


def test_mistake_found_after_the_decision_keeps_it(browser, ticket, page):
    sent = form(browser.get(page), title="mine", notes="mine")
    change(ticket, title="theirs")
    decided = form(browser.post(page, sent), dlock_version_title="theirs", price="no number")
    response = browser.post(page, decided)
    assert response.status_code == 200
    assert 'value="theirs"' in response.content.decode()
    assert browser.post(page, form(response, price="5")).status_code == 302
    assert (now(ticket).title, now(ticket).notes, now(ticket).price) == ("theirs", "mine", 5)


def test_mistake_is_to_be_corrected_before_the_decision(browser, ticket, page):
    sent = form(browser.get(page), title="")
    change(ticket, title="theirs")
    response = browser.post(page, sent)
    assert response.status_code == 200
    assert "was changed by someone else" in text(response)
    response = browser.post(page, form(response, title="mine"))
    assert response.status_code == 409
    assert "Title old mine theirs" in text(response)


def test_lines_ended_in_the_browser_s_way_are_no_change(browser, ticket, page):
    change(ticket, notes="first\nsecond")
    sent = form(browser.get(page))
    change(ticket, notes="theirs")
    assert browser.post(page, form(browser.post(page, sent))).status_code == 302
    assert now(ticket).notes == "theirs"


def test_same_number_and_the_same_moment_written_otherwise_are_no_change(browser, ticket, page):
    change(ticket, due=timezone.now(), price="48.00")
    sent = form(browser.get(page), price="48", notes="mine")
    change(ticket, title="theirs")
    shown = text(browser.post(page, sent))
    assert "Notes first mine first" in shown
    assert "Price" not in shown
    assert "Due" not in shown


def test_conflict_escapes_what_users_wrote(browser, ticket, page):
    sent = form(browser.get(page), title="<script>mine</script>")
    change(ticket, title="<img src=theirs>")
    html = browser.post(page, sent).content.decode()
    assert "<script>mine" not in html
    assert "<img src=theirs" not in html
    assert "&lt;img src=theirs&gt;" in html


def test_relations_dates_and_switches_are_shown_readable(browser, ticket, page):
    red, blue = Tag.objects.create(name="red"), Tag.objects.create(name="blue")
    ticket.tags.set([red])
    moment = {"due_0": "2030-05-04", "due_1": "12:30:00"}
    sent = form(browser.get(page), owner=red.pk, tags=[red.pk, blue.pk], is_urgent="on", extra='{"a": 1}', **moment)
    other = change(ticket, owner=blue, due=timezone.now(), extra={"a": 2})
    other.tags.set([])
    shown = text(browser.post(page, sent))
    assert "Owner empty red blue" in shown
    assert "Tags red blue, red empty" in shown.replace("red, blue", "blue, red")
    assert "Is urgent No Yes No" in shown
    assert "May 4, 2030, 12:30 p.m." in shown
    assert "&quot;a&quot;: 2" in shown


def test_relations_of_mine_are_saved_after_a_decision(browser, ticket, page):
    red, blue = Tag.objects.create(name="red"), Tag.objects.create(name="blue")
    sent = form(browser.get(page), tags=[red.pk, blue.pk])
    change(ticket, title="theirs")
    assert browser.post(page, form(browser.post(page, sent))).status_code == 302
    assert set(now(ticket).tags.all()) == {red, blue}
    assert now(ticket).title == "theirs"


def test_relations_of_theirs_can_be_kept(browser, ticket, page):
    red, blue = Tag.objects.create(name="red"), Tag.objects.create(name="blue")
    sent = form(browser.get(page), tags=[red.pk], owner=red.pk)
    change(ticket, owner=blue).tags.set([blue])
    chosen = {"dlock_version_tags": "theirs", "dlock_version_owner": "theirs"}
    assert browser.post(page, form(browser.post(page, sent), **chosen)).status_code == 302
    assert (set(now(ticket).tags.all()), now(ticket).owner) == ({blue}, blue)


def test_upload_has_to_be_chosen_again(browser, ticket, page):
    sent = form(browser.get(page))
    change(ticket, title="theirs")
    response = browser.post(page, {**sent, "paper": SimpleUploadedFile("plan.txt", b"mine")})
    assert "Paper empty plan.txt (new) empty" in text(response)
    assert "Choose plan.txt again" in text(response)
    again = form(response, paper=SimpleUploadedFile("plan.txt", b"mine"))
    assert browser.post(page, again).status_code == 302
    with now(ticket).paper as paper:
        assert paper.read() == b"mine"
    assert now(ticket).title == "theirs"


def test_file_of_theirs_can_be_kept(browser, ticket, page):
    sent = form(browser.get(page))
    change(ticket, paper=SimpleUploadedFile("theirs.txt", b"theirs"))
    response = browser.post(page, {**sent, "paper": SimpleUploadedFile("mine.txt", b"mine")})
    now(ticket).paper.storage.delete("theirs.txt")  # even if it is gone, because it does not have to be read
    again = SimpleUploadedFile("mine.txt", b"mine")  # selected, and not wanted after all
    assert browser.post(page, form(response, dlock_version_paper="theirs", paper=again)).status_code == 302
    assert now(ticket).paper.name == "theirs.txt"


def test_file_can_be_taken_away_after_a_conflict(browser, ticket, page):
    change(ticket, paper=SimpleUploadedFile("plan.txt", b"old"))
    sent = form(browser.get(page), **{"paper-clear": "on"})
    change(ticket, title="theirs")
    response = browser.post(page, sent)
    assert "Paper plan.txt empty plan.txt" in text(response)
    assert browser.post(page, form(response)).status_code == 302
    assert not now(ticket).paper


def test_json_of_theirs_can_be_kept_and_is_no_change_of_mine(browser, ticket, page):
    sent = form(browser.get(page), title="mine", extra='{"a": 1}')
    change(ticket, extra={"a": 2})
    browser.post(page, form(browser.post(page, sent), dlock_version_extra="theirs"))
    assert now(ticket).extra == {"a": 2}
    assert LogEntry.objects.get().get_change_message() == "Changed Title."


def test_upload_of_the_same_name_is_a_change(browser, ticket, page):
    change(ticket, paper=SimpleUploadedFile("plan.txt", b"old"))
    sent = form(browser.get(page))
    change(ticket, title="theirs")
    response = browser.post(page, {**sent, "paper": SimpleUploadedFile("plan.txt", b"mine")})
    assert "Paper plan.txt plan.txt (new) plan.txt" in text(response)


def test_field_that_is_only_shown_is_part_of_the_conflict(browser, ticket):
    step = Step.objects.create(ticket=ticket, text="saw")
    page = f"/admin/testapp/step/{step.pk}/change/"
    sent = form(browser.get(page), is_done="on")
    change(step, text="glue")
    response = browser.post(page, sent)
    assert response.status_code == 409
    assert "Text saw glue" in text(response)
    assert browser.post(page, form(response)).status_code == 302
    assert (now(step).text, now(step).is_done) == ("glue", True)


def test_version_may_be_in_another_table_and_fieldsets_may_be_set(browser):
    shop = Shop.objects.create(name="old", owner="old")
    page = f"/admin/testapp/shop/{shop.pk}/change/"
    sent = form(browser.get(page), owner="mine")
    change(shop, name="theirs")
    response = browser.post(page, sent)
    assert response.status_code == 409
    assert browser.post(page, form(response)).status_code == 302
    assert (now(shop).name, now(shop).owner) == ("theirs", "mine")


def test_version_may_have_another_name_and_be_shown(browser):
    draft = Draft.objects.create(title="old")
    page = f"/admin/testapp/draft/{draft.pk}/change/"
    sent = form(browser.get(page), title="mine")
    change(draft, title="theirs")
    response = browser.post(page, sent)
    assert "Title old mine theirs" in text(response)
    assert "Revision" not in text(response)


def test_history_tells_who_was_faster(browser, ticket, page):
    first, second = form(browser.get(page), title="first"), form(browser.get(page), title="second")
    browser.post(page, first)
    assert "anna" in text(browser.post(page, second))
    assert "Changed Title." in text(browser.post(page, second))


def test_row_that_is_gone_is_not_saved_anew(browser, ticket, page):
    sent = form(browser.get(page), title="mine")
    Ticket.objects.all().delete()
    assert browser.post(page, sent).status_code == 302
    assert not Ticket.objects.exists()


# missing, forged


@pytest.mark.parametrize("version", ["", "1", "[1,{},[]]:x:y", "\x00ü"])
def test_forged_version_is_refused_and_not_repaired_by_saving_again(browser, ticket, page, version):
    response = browser.post(page, form(browser.get(page), title="mine", dlock_version=version))
    assert response.status_code == 200
    assert "Load the page again" in text(response)
    response = browser.post(page, form(response))
    assert "Load the page again" in text(response)
    assert now(ticket).version == 1


def test_missing_version_is_refused(browser, ticket, page):
    sent = form(browser.get(page), title="mine")
    del sent["dlock_version"]
    assert "Load the page again" in text(browser.post(page, sent))
    assert now(ticket).version == 1


def test_version_of_another_object_is_refused(browser, ticket, page):
    other = Ticket.objects.create(title="other")
    foreign = form(browser.get(TICKET.format(other.pk)))["dlock_version"]
    assert "Load the page again" in text(browser.post(page, form(browser.get(page), dlock_version=foreign)))


def test_version_of_another_model_is_refused(browser, ticket, page):
    draft = Draft.objects.create(pk=ticket.pk)
    foreign = form(browser.get(f"/admin/testapp/draft/{draft.pk}/change/"))["dlock_version"]
    assert "Load the page again" in text(browser.post(page, form(browser.get(page), dlock_version=foreign)))


def test_answers_without_a_question_change_nothing(browser, ticket, page):
    response = browser.post(page, form(browser.get(page), title="mine", dlock_version_title="theirs"))
    assert response.status_code == 302
    assert now(ticket).title == "mine"


# at the moment of saving


@pytest.mark.usefixtures("on_postgresql")
def test_change_between_the_check_and_the_update_is_found(on_postgresql, browser, ticket, page, party):
    sent = form(browser.get(page), title="mine")
    other = party()

    def overtake(sender, instance, **_):
        if instance.title == "mine":
            other.now(partial(change, ticket, title="theirs"))

    pre_save.connect(overtake, sender=Ticket)
    try:
        response = browser.post(page, sent)
    finally:
        pre_save.disconnect(overtake, sender=Ticket)
    assert response.status_code == 409
    assert "Title old mine theirs" in text(response)
    assert now(ticket).title == "theirs"


# several databases


def test_page_that_a_late_replica_has_shown_overwrites_nothing(browser, ticket, late_replica, page):
    Ticket.objects.using("default").update(title="theirs")
    response = browser.post(page, form(browser.get(page), title="mine"))
    assert "Title old mine theirs" in text(response)
    assert browser.post(page, form(response, dlock_version_title="mine")).status_code == 302
    assert Ticket.objects.using("default").get().title == "mine"


# rows of the object


@pytest.fixture
def step(ticket):
    return Step.objects.create(ticket=ticket, text="saw")


def test_row_below_is_saved(browser, step, page):
    assert browser.post(page, form(browser.get(page), **{"step_set-0-text": "mine"})).status_code == 302
    assert now(step).text == "mine"


def test_row_below_that_was_changed_is_asked_about(browser, step, page):
    sent = form(browser.get(page), **{"step_set-0-text": "mine", "title": "mine"})
    change(step, text="theirs")
    response = browser.post(page, sent)
    assert response.status_code == 409
    assert "Text saw mine theirs" in text(response)
    assert (now(step).text, now(step.ticket).title) == ("theirs", "old")
    chosen = {"step_set-0-dlock_version_text": "mine"}
    assert browser.post(page, form(response, **chosen)).status_code == 302
    assert (now(step).text, now(step.ticket).title) == ("mine", "mine")


def test_row_below_that_the_user_left_alone_keeps_the_change(browser, step, page):
    sent = form(browser.get(page), title="mine")
    change(step, text="theirs")
    assert browser.post(page, sent).status_code == 302
    assert (now(step).text, now(step.ticket).title) == ("theirs", "mine")
    assert LogEntry.objects.get().get_change_message() == "Changed Title."


def test_row_below_that_was_changed_is_not_deleted_unasked(browser, step, page):
    sent = form(browser.get(page), **{"step_set-0-DELETE": "on"})
    change(step, text="theirs")
    response = browser.post(page, sent)
    assert response.status_code == 409
    assert "Text saw theirs" in text(response)
    assert "Delete No Yes No" in text(response)
    assert browser.post(page, form(response, **{"step_set-0-dlock_version_DELETE": "mine"})).status_code == 302
    assert not Step.objects.exists()


def test_row_below_that_its_formset_reads_again_after_a_change_is_not_deleted(browser, step, page, register):
    class Looks(BaseInlineFormSet):
        def delete_existing(self, obj, commit=True):
            change(obj, text="theirs")
            obj.refresh_from_db()
            super().delete_existing(obj, commit)

    class Rows(VersionedTabularInline):
        model, formset, extra = Step, Looks, 0

    register(Ticket, type("Own", (VersionedModelAdmin,), {"inlines": [Rows]}))
    with pytest.raises(StaleObject, match="cannot delete Step"):
        browser.post(page, form(browser.get(page), **{"step_set-0-DELETE": "on"}))
    assert Step.objects.exists()


def test_mistakes_in_a_row_that_is_to_be_deleted_are_nobody_s_business(browser, step, page):
    sent = form(browser.get(page), **{"step_set-0-DELETE": "on", "step_set-0-text": ""})
    change(step, text="theirs")
    response = browser.post(page, sent)
    assert "Delete No Yes No" in text(response)
    assert browser.post(page, form(response, **{"step_set-0-dlock_version_DELETE": "mine"})).status_code == 302
    assert not Step.objects.exists()


def test_row_below_can_be_kept_as_it_is_now(browser, step, page):
    sent = form(browser.get(page), **{"step_set-0-DELETE": "on"})
    change(step, text="theirs")
    response = browser.post(page, form(browser.post(page, sent), **{"step_set-0-dlock_version_DELETE": "theirs"}))
    assert response.status_code == 302
    assert now(step).text == "theirs"


def test_row_below_with_a_forged_version_is_neither_saved_nor_deleted(browser, step, page):
    for extra in ({"step_set-0-text": "mine"}, {"step_set-0-DELETE": "on"}):
        response = browser.post(page, form(browser.get(page), **{"step_set-0-dlock_version": "1"}, **extra))
        assert "Load the page again" in text(response)
    assert now(step).version == 1


def test_row_below_that_is_gone_is_told(browser, step, page):
    sent = form(browser.get(page), **{"step_set-0-text": "mine"})
    Step.objects.all().delete()
    response = browser.post(page, sent)
    assert "was deleted by someone else" in text(response)
    assert not Step.objects.exists()


def test_rows_below_are_added_and_deleted_as_ever(browser, step, page):
    more = {"step_set-TOTAL_FORMS": "2", "step_set-1-text": "glue", "step_set-1-ticket": step.ticket_id}
    sent = form(browser.get(page), **{"step_set-0-DELETE": "on"}, **more)
    assert browser.post(page, sent).status_code == 302
    assert [each.text for each in Step.objects.all()] == ["glue"]


def test_object_and_rows_below_can_be_asked_about_together(browser, step, page):
    sent = form(browser.get(page), **{"step_set-0-text": "mine", "title": "mine"})
    change(step, text="theirs")
    change(step.ticket, title="theirs")
    chosen = {"step_set-0-dlock_version_text": "theirs", "dlock_version_title": "mine"}
    response = browser.post(page, form(browser.post(page, sent), **chosen))
    assert response.status_code == 302
    assert (now(step).text, now(step.ticket).title) == ("theirs", "mine")


# other ways to the page


def test_save_as_new_needs_no_version_and_copies_what_stands_in_the_form(browser, step, page):
    sent = form(browser.get(page), title="copy", _saveasnew="1")
    change(step.ticket, title="theirs")
    assert browser.post(page, sent).status_code == 302
    assert {ticket.title for ticket in Ticket.objects.all()} == {"theirs", "copy"}
    assert Step.objects.count() == 2


def test_reader_sees_the_page_and_cannot_save(browser, ticket):
    page = f"/readers/testapp/ticket/{ticket.pk}/change/"
    response = browser.get(page)
    assert response.status_code == 200
    assert "dlock_version" not in response.content.decode()
    assert browser.post(page, {"title": "mine"}).status_code == 403


# forms of your own


class PlainForm(ModelForm):
    class Meta:
        model = Ticket
        fields = ["title"]


class OwnFormAdmin(VersionedModelAdmin):
    def get_form(self, request, obj=None, **options):
        return PlainForm


class FormOnTheLeftAdmin(type("Left", (), {"get_form": OwnFormAdmin.get_form}), VersionedModelAdmin):
    pass


class OwnRows(VersionedTabularInline):
    model = Step

    def get_formset(self, request, obj=None, **options):
        return inlineformset_factory(Ticket, Step, fields=["text"], extra=0)


class OwnListAdmin(VersionedModelAdmin):
    list_display = ["id", "title"]
    list_editable = ["title"]

    def get_changelist_formset(self, request, **options):
        return modelformset_factory(Draft, fields=["title"], extra=0)


@pytest.fixture
def register(monkeypatch):
    """Give the admin of a model another class: its URLs are those of the instance."""
    return lambda model, kind: monkeypatch.setattr(site._registry[model], "__class__", kind)


@pytest.mark.parametrize("kind", [OwnFormAdmin, FormOnTheLeftAdmin])
def test_form_that_an_admin_chooses_itself_is_guarded(browser, ticket, page, register, kind):
    register(Ticket, kind)
    sent = form(browser.get(page), title="mine")
    change(ticket, title="theirs")
    response = browser.post(page, sent)
    assert (response.status_code, now(ticket).title) == (409, "theirs")
    assert browser.post(page, form(response, dlock_version_title="mine")).status_code == 302
    assert now(ticket).title == "mine"


def test_formset_that_an_inline_makes_itself_is_guarded(browser, step, page, register):
    register(Ticket, type("Own", (VersionedModelAdmin,), {"inlines": [OwnRows]}))
    sent = form(browser.get(page), **{"step_set-0-text": "mine"})
    change(step, text="theirs")
    assert (browser.post(page, sent).status_code, now(step).text) == (409, "theirs")


def test_formset_that_a_list_makes_itself_is_guarded(browser, register):
    register(Draft, OwnListAdmin)
    draft = Draft.objects.create(title="old")
    page = "/admin/testapp/draft/"
    sent = form(browser.get(page), **{"form-0-title": "mine", "_save": "1"})
    change(draft, title="theirs")
    assert (browser.post(page, sent).status_code, now(draft).title) == (409, "theirs")


def test_versioned_form_of_an_admin_compares_what_the_page_shows_next_to_it(browser, step, register):
    register(Step, type("Own", (VersionedModelAdmin,), {"form": VersionedModelForm, "readonly_fields": ["text"]}))
    page = f"/admin/testapp/step/{step.pk}/change/"
    sent = form(browser.get(page), is_done="on")
    change(step, text="glue")
    assert "Text saw glue" in text(browser.post(page, sent))


def test_form_that_an_admin_has_adapted_stays_as_it_is(browser, ticket, page, register):
    class Adapted(VersionedModelAdmin):
        def get_form(self, request, obj=None, **options):
            made = super().get_form(request, obj, **options)
            made.base_fields["title"].label = "Name"
            return made

    register(Ticket, Adapted)
    assert "Name:" in text(browser.get(page))


@pytest.mark.parametrize("inline", [admin.TabularInline, admin.StackedInline, GenericTabularInline])
def test_mixin_to_the_right_of_the_inline_that_it_guards_is_refused(inline):
    with pytest.raises(TypeError, match=re.escape(f"class Rows(VersionedInlineMixin, {inline.__name__})")):
        type("Rows", (inline, VersionedInlineMixin), {"model": Step})


def test_unguarded_actions_that_are_one_text_are_refused():
    class Own(VersionedModelAdmin):
        unguarded_actions = "export_all"  # contains "export", the name of another action

    with pytest.raises(ImproperlyConfigured, match="unguarded_actions"):
        Own(Ticket, site)


def test_model_without_a_version_is_refused():
    with pytest.raises(ImproperlyConfigured, match="VersionedMixin"):
        VersionedModelAdmin(Tag, site)
