"""VersionedModelForm and the views and formsets around it keep their promises."""

import re
from functools import partial

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import models, transaction
from django.db.models.signals import pre_save
from django.forms import CharField, ModelForm, inlineformset_factory, modelform_factory, modelformset_factory
from django.test.utils import isolate_apps
from django.utils.functional import SimpleLazyObject
from django.views.generic import DeleteView, FormView, UpdateView, View
from django.views.generic.detail import SingleObjectMixin
from django.views.generic.edit import ModelFormMixin

from django_dlock.admin import VersionedModelAdmin
from django_dlock.errors import StaleObject
from django_dlock.forms import BaseVersionedInlineFormSet, BaseVersionedModelFormSet, VersionedModelForm
from django_dlock.forms.views import VersionedEditMixin
from django_dlock.models import VersionField
from tests.django_dlock.admin_fixtures import change
from tests.django_dlock.admin_urls import DeleteTicket, EditPlain, EditTicket, TicketForm, site
from tests.django_dlock.pages import form, sent_by
from tests.testapp.models import Step, Tag, Ticket

pytestmark = pytest.mark.usefixtures("versions_from_1")


def text(response):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode()))


def read(ticket):
    return Ticket.objects.get(pk=ticket.pk)


def answer(form, **changes):
    """Return what a browser would send for an unbound form."""
    return {bound.html_name: bound.value() or "" for bound in form} | changes


# the form alone


def test_form_of_a_new_object_has_no_version(admin_pages):
    form = TicketForm({"title": "new", "state": "open"})
    assert "dlock_version" not in form.fields
    assert form.save().version == 1


def test_stale_form_is_invalid_and_says_why(ticket):
    sent = answer(TicketForm(instance=ticket), title="mine")
    change(ticket, title="theirs")
    form = TicketForm(sent, instance=read(ticket))
    assert not form.is_valid()
    assert form.has_error("__all__", "stale")
    [difference] = form.conflict.differences
    assert (difference.was, difference.mine, difference.now, difference.choice) == ("old", "mine", "theirs", None)


def test_valid_form_raises_when_the_row_changes_before_it_is_saved(ticket):
    form = TicketForm(answer(TicketForm(instance=ticket), title="mine"), instance=read(ticket))
    assert form.is_valid()
    change(ticket, title="theirs")
    with pytest.raises(StaleObject):
        form.save()


class ReadsAgain(TicketForm):
    def clean(self):
        change(self.instance, title="theirs")
        self.instance.refresh_from_db()
        return super().clean()


@pytest.mark.parametrize("is_in_clean", [False, True])
def test_form_whose_instance_was_read_again_after_a_change_is_stale(ticket, is_in_clean):
    sent, instance = answer(TicketForm(instance=ticket), title="mine"), read(ticket)
    form = (ReadsAgain if is_in_clean else TicketForm)(sent, instance=instance)
    if not is_in_clean:
        change(ticket, title="theirs")
        instance.refresh_from_db()
    assert not form.is_valid()
    assert form.has_error("__all__", "stale")
    [difference] = form.conflict.differences
    assert (difference.was, difference.mine, difference.now) == ("old", "mine", "theirs")


def test_valid_form_raises_when_its_instance_was_read_again_after_a_change(ticket):
    form = TicketForm(answer(TicketForm(instance=ticket), title="mine"), instance=read(ticket))
    assert form.is_valid()
    change(ticket, title="theirs")
    form.instance.refresh_from_db()
    with pytest.raises(StaleObject):
        form.save()
    assert read(ticket).title == "theirs"


def test_form_may_be_saved_again_and_after_a_save_of_its_instance(ticket):
    form = TicketForm(answer(TicketForm(instance=ticket), title="mine"), instance=read(ticket))
    assert form.is_valid()
    form.instance.save()
    form.save().refresh_from_db()
    form.save()
    assert read(ticket).title == "mine"


def save_as_a_model_does_that_reads_itself_again(instance):
    Ticket.save(instance)
    change(instance, state="closed")
    instance.refresh_from_db()


@pytest.mark.parametrize("saves", [1, 2, 3])
def test_form_may_be_saved_again_although_its_instance_was_read_again_after_a_save(ticket, saves, monkeypatch):
    form = TicketForm(answer(TicketForm(instance=ticket), title="mine"), instance=read(ticket))
    assert form.is_valid()
    monkeypatch.setattr(form.instance, "save", lambda: save_as_a_model_does_that_reads_itself_again(form.instance))
    for _ in range(saves):
        form.instance.save()
    assert form.save() is form.save()
    assert (read(ticket).title, read(ticket).state) == ("mine", "closed")


def test_two_forms_of_one_instance_that_is_read_again_after_a_save_may_both_be_saved(ticket):
    title, state = (modelform_factory(Ticket, form=VersionedModelForm, fields=[name]) for name in ("title", "state"))
    sent, instance = answer(title(instance=ticket), title="mine") | {"state": "closed"}, read(ticket)
    forms = [title(sent, instance=instance), state(sent, instance=instance)]
    assert all(each.is_valid() for each in forms)
    for each in forms:
        each.save()
        change(ticket, notes="counted")
        instance.refresh_from_db()
    assert (read(ticket).title, read(ticket).state) == ("mine", "closed")


def test_form_is_stale_whose_instance_was_read_again_before_its_own_write(ticket):
    sent, instance = answer(TicketForm(instance=ticket), title="mine"), read(ticket)
    forms = [TicketForm(sent, instance=instance) for _ in range(2)]
    assert forms[0].is_valid()
    change(ticket, title="theirs")
    instance.refresh_from_db()
    instance.save()
    with pytest.raises(StaleObject):
        forms[0].save()
    assert forms[1].has_error("__all__", "stale")
    assert read(ticket).title == "theirs"


def test_form_is_stale_whose_instance_was_saved_only_before_the_form_was_checked(ticket):
    form = TicketForm(answer(TicketForm(instance=ticket), title="mine"), instance=read(ticket))
    form.instance.save()
    assert form.is_valid()
    change(ticket, title="theirs")
    form.instance.refresh_from_db()
    with pytest.raises(StaleObject):
        form.save()


def test_form_is_stale_whose_instance_was_saved_and_read_again_before_the_form_is_checked(ticket):
    form = TicketForm(answer(TicketForm(instance=ticket), title="mine"), instance=read(ticket))
    form.instance.save()
    change(ticket, title="theirs")
    form.instance.refresh_from_db()
    assert form.has_error("__all__", "stale")


def test_form_is_stale_whose_save_was_rolled_back_before_its_instance_was_read_again(ticket):
    form = TicketForm(answer(TicketForm(instance=ticket), title="mine"), instance=read(ticket))
    assert form.is_valid()
    with transaction.atomic():
        form.save()
        transaction.set_rollback(True)
    change(ticket, title="theirs")
    form.instance.refresh_from_db()
    with pytest.raises(StaleObject):
        form.save()
    assert read(ticket).title == "theirs"


@pytest.mark.parametrize("pk", [None, 1_000_000])
@pytest.mark.parametrize("is_saved_by_the_form", [False, True])
def test_form_whose_instance_has_become_another_row_may_be_saved_again(ticket, pk, is_saved_by_the_form):
    ticket = change(ticket, state="open")  # A copy begins at another version.
    form = TicketForm(answer(TicketForm(instance=ticket), title="mine"), instance=read(ticket))
    copied = form.save(commit=False)
    copied.pk, copied._state.adding = pk, True
    (form if is_saved_by_the_form else copied).save()
    copied.state = "closed"
    form.save()
    assert sorted(Ticket.objects.values_list("title", "state")) == [("mine", "closed"), ("old", ticket.state)]


def test_version_is_no_change_of_the_form(ticket):
    form = TicketForm(answer(TicketForm(instance=ticket)), instance=read(ticket))
    assert form.is_valid()
    assert form.changed_data == []


def test_form_with_a_prefix_is_guarded(ticket):
    sent = answer(TicketForm(instance=ticket, prefix="a"), **{"a-title": "mine"})
    assert TicketForm(sent, instance=read(ticket), prefix="a").is_valid()
    change(ticket, title="theirs")
    assert not TicketForm(sent, instance=read(ticket), prefix="a").is_valid()


def test_initial_values_of_the_view_are_not_taken_for_the_row_s(ticket):
    sent = answer(TicketForm(instance=ticket, initial={"title": "proposed"}))
    assert sent["title"] == "proposed"
    change(ticket, title="theirs")
    form = TicketForm(sent, instance=read(ticket), initial={"title": "proposed"})
    [difference] = form.conflict.differences if not form.is_valid() else []
    assert (difference.was, difference.mine, difference.now) == ("old", "proposed", "theirs")
    sent |= {"dlock_version": form.conflict.version, "dlock_version_title": "theirs"}
    assert TicketForm(sent, instance=read(ticket), initial={"title": "proposed"}).save().title == "theirs"


def test_long_values_are_compared_without_travelling(ticket):
    form_class = modelform_factory(Ticket, form=VersionedModelForm, fields=["title", "notes"])
    change(ticket, notes="long" * 1000)
    unbound = form_class(instance=read(ticket))
    assert len(unbound.signed_version()) < 500
    sent = answer(unbound, title="mine")
    change(ticket, notes="short")
    form = form_class(sent, instance=read(ticket))
    assert not form.is_valid()
    notes = next(each for each in form.conflict.differences if each.name == "notes")
    assert (notes.was, notes.choice) == (None, "theirs")


def test_form_needs_a_model_with_a_version(admin_pages):
    with pytest.raises(ImproperlyConfigured, match="VersionedMixin"):
        modelform_factory(Tag, form=VersionedModelForm, fields=["name"])()


@isolate_apps("tests.testapp")
def test_form_and_admin_refuse_a_version_that_no_save_checks():
    class Counted(models.Model):
        version = VersionField()

        class Meta:
            app_label = "testapp"

    with pytest.raises(ImproperlyConfigured, match="VersionedMixin"):
        modelform_factory(Counted, form=VersionedModelForm, fields=[])()
    with pytest.raises(ImproperlyConfigured, match="VersionedMixin"):
        VersionedModelAdmin(Counted, site)


class Shortened(TicketForm):
    """A form that shows its user some of its fields only."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for name in [name for name in self.fields if name != "title"]:
            del self.fields[name]


class Undeclared(TicketForm):
    dlock_version = None


@pytest.mark.parametrize("form_class", [Shortened, Undeclared])
def test_form_that_has_lost_its_version_refuses_to_change_an_object(ticket, form_class):
    sent = answer(form_class(instance=ticket), title="mine")
    with pytest.raises(ImproperlyConfigured, match="keep 'dlock_version'"):
        form_class(sent, instance=read(ticket)).is_valid()
    assert form_class(sent).save().title == "mine", "a new object has no version to lose"


def test_form_whose_object_was_exchanged_refuses_to_change_another(ticket):
    sent = answer(TicketForm(instance=ticket), title="mine")
    for given in (TicketForm(sent), TicketForm(sent, instance=read(ticket))):
        given.instance = read(ticket)
        with pytest.raises(ImproperlyConfigured, match="pass instance="):
            given.is_valid()


def test_view_whose_form_has_lost_its_version_refuses_to_change_an_object(ticket, rf):
    class Edit(EditTicket):
        def get_form(self, form_class=None):
            form = super().get_form(form_class)
            del form.fields["dlock_version"]
            return form

    with pytest.raises(ImproperlyConfigured, match="keep 'dlock_version'"):
        Edit.as_view()(rf.post("/", {"title": "mine", "state": "open"}), pk=ticket.pk)
    assert read(ticket).title == "old"


def test_conflict_renders_in_place_of_the_form_whatever_the_template_asks_for(ticket):
    sent = answer(TicketForm(instance=ticket), title="<mine>")
    change(ticket, title="theirs")
    form = TicketForm(sent, instance=read(ticket))
    assert not form.is_valid()
    for html in (str(form), form.as_p(), form.as_div(), form.as_table(), f"{form}"):
        assert 'name="dlock_version_title" value="theirs"' in html
        assert "&lt;mine&gt;" in html


# views


def test_update_view_asks_and_saves(browser, ticket):
    page = f"/edit/{ticket.pk}/"
    sent = form(browser.get(page), title="mine")
    change(ticket, title="theirs", state="closed")
    response = browser.post(page, sent)
    assert "Title old mine theirs" in text(response)
    assert browser.post(page, form(response, dlock_version_title="mine")).status_code == 302
    assert (read(ticket).title, read(ticket).state) == ("mine", "closed")


def test_update_view_with_plain_fields_is_guarded(browser, ticket):
    page = f"/plain/{ticket.pk}/"
    sent = form(browser.get(page), title="mine")
    change(ticket, title="theirs")
    assert "Title old mine theirs" in text(browser.post(page, sent))
    assert read(ticket).title == "theirs"


def test_secret_values_are_neither_sent_along_nor_shown(browser, ticket):
    page = f"/secret/{ticket.pk}/"
    sent = form(browser.get(page), title="mine")
    change(ticket, title="theirs")
    response = browser.post(page, sent)
    assert "theirs" not in response.content.decode().replace('value="theirs"', "").split("</h1>")[1]
    assert "Title not known ••• •••" in text(response)


def test_view_finds_a_change_between_the_check_and_the_write(on_postgresql, browser, ticket, party):
    page = f"/plain/{ticket.pk}/"
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
    assert "Title old mine theirs" in text(response)
    assert read(ticket).title == "theirs"


@pytest.mark.parametrize("last", [StaleObject(None, expected=1), ValueError()])
def test_view_that_fails_once_more_after_a_conflict_has_written_nothing(admin_pages, ticket, rf, last):
    runs, errors = [], [StaleObject(ticket, expected=1), last]

    class Edit(EditPlain):
        def form_valid(self, form):
            super().form_valid(form)
            runs.append(read(ticket).title)
            raise errors[len(runs) - 1]

    sent = form(Edit.as_view()(rf.get("/"), pk=ticket.pk), title="mine")
    with pytest.raises(type(last)):
        Edit.as_view()(rf.post("/", sent), pk=ticket.pk)
    assert runs == ["mine", "mine"]
    assert read(ticket).title == "old"


def test_delete_view_asks_again_after_a_change(browser, ticket):
    page = f"/delete/{ticket.pk}/"
    sent = form(browser.get(page))
    change(ticket, title="theirs")
    response = browser.post(page, sent)
    assert "was changed by someone else" in text(response)
    assert Ticket.objects.exists()
    assert browser.post(page, form(response)).status_code == 302
    assert not Ticket.objects.exists()


class LooksBeforeItDeletes(DeleteTicket):
    """It reads its object again, and deletes it if its newest state allows that."""

    def form_valid(self, form):
        self.before_it_looks()
        self.look()
        return super().form_valid(form)

    def before_it_looks(self):
        change(self.object, title="theirs")

    def look(self):
        self.object.refresh_from_db()


class ReadsItAnew(LooksBeforeItDeletes):
    def look(self):
        self.object = read(self.object)


class SavesItFirst(LooksBeforeItDeletes):
    def before_it_looks(self):
        self.object.state = "closed"
        self.object.save()


class SavesItAndCounts(SavesItFirst):
    def before_it_looks(self):
        super().before_it_looks()
        change(self.object, notes="counted")


class SavesItAndReadsItAnew(SavesItFirst, ReadsItAnew):
    pass


class SeesNoChange(LooksBeforeItDeletes):
    def before_it_looks(self):
        pass


class SeesNoChangeAnew(SeesNoChange, ReadsItAnew):
    pass


@pytest.mark.parametrize("view", [LooksBeforeItDeletes, ReadsItAnew])
def test_delete_view_that_reads_its_object_again_after_a_change_deletes_nothing(admin_pages, ticket, rf, view):
    sent = form(view.as_view()(rf.get("/"), pk=ticket.pk))
    with pytest.raises(StaleObject, match="cannot delete Ticket"):
        view.as_view()(rf.post("/", sent), pk=ticket.pk)
    assert Ticket.objects.exists()


@pytest.mark.parametrize(
    "view", [SavesItFirst, SavesItAndCounts, SavesItAndReadsItAnew, SeesNoChange, SeesNoChangeAnew]
)
def test_delete_view_deletes_what_only_its_own_writes_have_changed(admin_pages, ticket, rf, view):
    sent = form(view.as_view()(rf.get("/"), pk=ticket.pk))
    assert view.as_view()(rf.post("/", sent), pk=ticket.pk).status_code == 302
    assert not Ticket.objects.exists()


def test_delete_view_that_locks_its_object_asks_after_a_change_before_the_lock(on_postgresql, ticket, party, rf):
    other, changes = party(), [partial(change, ticket, title="theirs")]

    class Locks(LooksBeforeItDeletes):
        def before_it_looks(self):
            if changes:
                other.now(changes.pop())

        def look(self):
            self.object.refresh_from_db(from_queryset=Ticket.objects.select_for_update())

    page = Locks.as_view()
    response = page(rf.post("/", form(page(rf.get("/"), pk=ticket.pk))), pk=ticket.pk)
    assert "was changed by someone else" in text(response)
    assert read(ticket).title == "theirs"


def test_delete_view_needs_the_version(browser, ticket):
    assert "Load the page again" in text(browser.post(f"/delete/{ticket.pk}/"))
    assert Ticket.objects.exists()


def test_view_with_a_late_replica_overwrites_nothing(browser, ticket, late_replica):
    page = f"/plain/{ticket.pk}/"
    Ticket.objects.using("default").update(title="theirs")
    response = browser.post(page, form(browser.get(page), title="mine"))
    assert "Title old mine theirs" in text(response)
    assert browser.post(page, form(response, dlock_version_title="mine")).status_code == 302
    assert Ticket.objects.using("default").get().title == "mine"


def test_method_delete_is_refused(browser, ticket):
    assert browser.delete(f"/delete/{ticket.pk}/").status_code == 405
    assert Ticket.objects.exists()


@pytest.mark.parametrize("left", [UpdateView, DeleteView, ModelFormMixin, SingleObjectMixin])
def test_mixin_to_the_right_of_the_view_that_it_guards_is_refused(left):
    advice = re.escape(f"class Edit(VersionedEditMixin, {left.__name__})")
    with pytest.raises(TypeError, match=advice):
        type("Edit", (left, VersionedEditMixin), {})


def test_form_view_without_an_object_is_refused_when_it_is_defined():
    with pytest.raises(TypeError, match=r"Edit edits no object .* UpdateView or DeleteView"):
        type("Edit", (VersionedEditMixin, FormView), {})


def test_class_between_the_mixin_and_the_view_is_no_matter():
    class Own(View):
        pass

    class OwnUpdate(UpdateView):
        pass

    class Guarded(VersionedEditMixin, UpdateView):
        pass

    class First(Own, VersionedEditMixin, UpdateView):
        pass

    class Second(OwnUpdate, Guarded):
        pass

    assert issubclass(First, VersionedEditMixin)
    assert issubclass(Second, VersionedEditMixin)


class PlainForm(ModelForm):
    """A form without a version, whose author has changed a field of it after defining it."""

    class Meta:
        model = Ticket
        fields = ["title", "notes"]


PlainForm.base_fields["notes"].label = "Remarks"
del PlainForm.base_fields["title"]
PlainForm.base_fields["title"] = CharField(max_length=3, label="Name")


class OwnFormClass(EditPlain):
    def get_form_class(self):
        return PlainForm


class FormClassOnTheLeft(type("Left", (), {"get_form_class": lambda self: PlainForm}), EditPlain):
    pass


class FormOfOwnFormClass(OwnFormClass):
    def get_form(self, form_class=None):
        return self.get_form_class()(**self.get_form_kwargs())


@pytest.mark.parametrize("view", [OwnFormClass, FormClassOnTheLeft, FormOfOwnFormClass])
def test_form_class_that_a_view_chooses_itself_is_guarded_and_keeps_its_fields(admin_pages, ticket, rf, view):
    shown = view.as_view()(rf.get("/"), pk=ticket.pk)
    assert re.findall(r"(\w+):", text(shown)) == ["Remarks", "Name"]
    sent = form(shown, title="my")
    change(ticket, title="theirs")
    assert "Name old my theirs" in text(view.as_view()(rf.post("/", sent), pk=ticket.pk))
    assert read(ticket).title == "theirs"


class FindsItself:
    success_url = "/done/"

    def get_object(self, queryset=None):
        return Ticket.objects.get(pk=self.kwargs["pk"])

    render_to_response = EditPlain.render_to_response


class OwnObject(FindsItself, VersionedEditMixin, UpdateView):
    pass


class LazyObject(OwnObject):
    """It edits what `request.user` is: an object that is read when it is first used."""

    def get_object(self, queryset=None):
        return SimpleLazyObject(super().get_object)


@pytest.mark.parametrize("view", [OwnObject, LazyObject])
@pytest.mark.parametrize("options", [{"form_class": TicketForm}, {"form_class": PlainForm}, {"fields": ["title"]}])
def test_view_that_finds_its_object_itself_needs_no_model(admin_pages, ticket, rf, options, view):
    view = view.as_view(**options)
    sent = form(view(rf.get("/"), pk=ticket.pk), title="my")
    assert view(rf.post("/", sent), pk=ticket.pk).status_code == 302
    assert read(ticket).title == "my"
    assert "was changed by someone else" in text(view(rf.post("/", sent | {"title": "me"}), pk=ticket.pk))


class OwnObjectToDelete(FindsItself, VersionedEditMixin, DeleteView):
    pass


class LazyObjectToDelete(OwnObjectToDelete):
    def get_object(self, queryset=None):
        return SimpleLazyObject(super().get_object)


@pytest.mark.parametrize("view", [OwnObjectToDelete, LazyObjectToDelete])
def test_view_that_finds_its_object_itself_deletes_only_what_was_seen_without_a_model(admin_pages, ticket, rf, view):
    view = view.as_view()
    sent = form(view(rf.get("/"), pk=ticket.pk))
    change(ticket, title="theirs")
    assert "was changed by someone else" in text(view(rf.post("/", sent), pk=ticket.pk))
    sent = form(view(rf.get("/"), pk=ticket.pk))
    assert view(rf.post("/", sent), pk=ticket.pk).status_code == 302
    assert not Ticket.objects.filter(pk=ticket.pk).exists()


def test_view_without_a_model_says_what_it_is_missing(ticket, rf):
    class Nameless(VersionedEditMixin, UpdateView):
        fields = ("title",)

    for request in (rf.get("/"), rf.post("/")):
        with pytest.raises(ImproperlyConfigured, match=r"Define Nameless\.model"):
            Nameless.as_view()(request, pk=ticket.pk)


class OwnForm(EditPlain):
    def get_form(self, form_class=None):
        return PlainForm(**self.get_form_kwargs())


class FormOfAnotherClass(EditPlain):
    def get_form(self, form_class=None):
        return super().get_form(PlainForm)


@pytest.mark.parametrize("view", [OwnForm, FormOfAnotherClass])
def test_form_without_a_version_that_a_view_makes_is_refused_before_it_is_shown_or_saved(ticket, rf, view):
    for request in (rf.get("/"), rf.post("/", {"title": "my"})):
        with pytest.raises(ImproperlyConfigured, match=r"get_form\(\) of .*: derive PlainForm from VersionedModelForm"):
            view.as_view()(request, pk=ticket.pk)
    assert read(ticket).title == "old"


# formsets

Tickets = modelformset_factory(
    Ticket, form=VersionedModelForm, formset=BaseVersionedModelFormSet, fields=["title"], extra=0, can_delete=True
)
Steps = inlineformset_factory(
    Ticket, Step, form=VersionedModelForm, formset=BaseVersionedInlineFormSet, fields=["text"], extra=0
)


def test_formset_guards_each_row(ticket):
    sent = sent_by(Tickets(), **{"form-0-title": "mine"})
    assert Tickets(sent).is_valid()
    change(ticket, title="theirs")
    formset = Tickets(sent)
    assert not formset.is_valid()
    assert formset.forms[0].conflict.title == "Ticket: theirs"


def test_formset_does_not_delete_a_row_that_was_changed(ticket):
    sent = sent_by(Tickets(), **{"form-0-DELETE": "on"})
    change(ticket, title="theirs")
    assert not Tickets(sent).is_valid()
    assert Tickets(sent).deleted_forms == []


class LooksBeforeItsRowsAreDeleted(Tickets):
    def clean(self):
        super().clean()
        for each in self.initial_forms:
            each.instance.refresh_from_db()


class LooksBeforeItDeletesARow(Tickets):
    def delete_existing(self, obj, commit=True):
        obj.refresh_from_db()
        super().delete_existing(obj, commit)


class ReadsARowAnew(Tickets):
    def delete_existing(self, obj, commit=True):
        super().delete_existing(read(obj), commit)


@pytest.mark.parametrize("formset_class", [LooksBeforeItsRowsAreDeleted, LooksBeforeItDeletesARow, ReadsARowAnew])
@pytest.mark.parametrize("is_changed", [False, True])
def test_formset_that_reads_a_row_again_deletes_it_unless_others_have_changed_it(ticket, formset_class, is_changed):
    formset = formset_class(sent_by(Tickets(), **{"form-0-DELETE": "on"}))
    assert [each.instance for each in formset.initial_forms] == [ticket]
    if is_changed:
        change(ticket, title="theirs")
    assert formset.is_valid()
    if is_changed:
        with pytest.raises(StaleObject, match="cannot delete Ticket"):
            formset.save()
    else:
        formset.save()
    assert Ticket.objects.exists() is is_changed


def test_formset_deletes_a_row_that_was_saved_and_then_read_again(ticket):
    formset = Tickets(sent_by(Tickets(), **{"form-0-DELETE": "on"}))
    assert formset.is_valid()
    formset.forms[0].instance.save()
    change(ticket, notes="counted")
    formset.forms[0].instance.refresh_from_db()
    formset.save()
    assert not Ticket.objects.exists()


@pytest.mark.parametrize("delete", ["on", ""])
def test_formset_of_django_refuses_a_row_that_was_changed(ticket, delete):
    plain = inlineformset_factory(Ticket, Step, form=VersionedModelForm, fields=["text"], extra=0)
    step = Step.objects.create(ticket=ticket, text="saw")
    sent = sent_by(plain(instance=ticket), **{"step_set-0-text": "mine", "step_set-0-DELETE": delete})
    assert plain(sent, instance=read(ticket)).is_valid()
    change(step, text="theirs")
    formset = plain(sent, instance=read(ticket))
    assert not formset.is_valid()
    assert formset.deleted_forms == [] if delete else formset.forms[0].conflict


def test_formset_needs_forms_with_a_version(ticket):
    for formset in (
        modelformset_factory(Ticket, formset=BaseVersionedModelFormSet, fields=["title"])(),
        inlineformset_factory(Ticket, Step, formset=BaseVersionedInlineFormSet, fields=["text"])(instance=ticket),
    ):
        with pytest.raises(ImproperlyConfigured, match="pass form=VersionedModelForm"):
            formset.forms  # noqa: B018 - makes them


def test_inline_formset_leaves_alone_what_its_user_left_alone(ticket):
    step = Step.objects.create(ticket=ticket, text="saw")
    sent = sent_by(Steps(instance=ticket))
    change(step, text="theirs")
    formset = Steps(sent, instance=read(ticket))
    assert formset.is_valid()
    formset.save()
    assert Step.objects.get().text == "theirs"
