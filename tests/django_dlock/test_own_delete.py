"""A `delete()` of the model's own deletes no change that its caller has not seen, and whatever it changes itself."""

import copy
from contextlib import nullcontext

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, models, transaction
from django.forms import modelformset_factory
from django.template import Context, Template
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext, isolate_apps
from rest_framework.generics import DestroyAPIView

from django_dlock import lock
from django_dlock.errors import StaleObject
from django_dlock.forms import BaseVersionedModelFormSet, VersionedModelForm
from django_dlock.preconditions import etag_of
from django_dlock.rest import PreconditionMixin
from django_dlock.versions import LockManager, VersionedMixin
from tests.django_dlock.admin_fixtures import change
from tests.django_dlock.admin_urls import DeleteTicket
from tests.django_dlock.pages import form, sent_by
from tests.django_dlock.parties import unlocked
from tests.django_dlock.rest_views import send
from tests.testapp.models import Article, ArticleProxy, Counter, Tag, Ticket

pytestmark = pytest.mark.usefixtures("versions_from_1", "admin_pages")

Tickets = modelformset_factory(
    Ticket, form=VersionedModelForm, formset=BaseVersionedModelFormSet, fields=["title"], extra=0, can_delete=True
)
RF = RequestFactory()

# What a delete() of the model's own does


def read_again(ticket):
    ticket.refresh_from_db()
    VersionedMixin.delete(ticket)


def locked(ticket):
    return Ticket.objects.select_for_update().get(pk=ticket.pk)


def another_instance(ticket):
    with transaction.atomic():
        VersionedMixin.delete(locked(ticket))


def values_of_another_instance(ticket):
    with transaction.atomic():
        vars(ticket).update(vars(locked(ticket)))
        VersionedMixin.delete(ticket)


def by_query(ticket):
    Ticket.objects.filter(pk=ticket.pk).delete()


def softly(ticket):
    ticket.refresh_from_db()
    ticket.state = "closed"
    ticket.save()


def softly_after_a_save_of_its_own(ticket):
    ticket.refresh_from_db()
    ticket.notes = "deleted by anna"
    ticket.save()
    softly(ticket)


def softly_by_query(ticket):
    Ticket.objects.filter(pk=ticket.pk).update(state="closed")


def softly_another_instance(ticket):
    change(ticket, state="closed")


def after_a_query_of_its_own(ticket):
    Ticket.objects.filter(pk=ticket.pk).update(notes="one step less")
    read_again(ticket)


def archived(ticket):
    key = ticket.pk
    ticket.pk, ticket._state.adding, ticket.state = None, True, "closed"
    ticket.save()
    ticket.notes = f"was {key}"
    ticket.save()
    VersionedMixin.delete(Ticket.objects.get(pk=key))


def archived_copy(ticket):
    archived(copy.copy(ticket))


DELETIONS = [
    read_again,
    another_instance,
    values_of_another_instance,
    by_query,
    softly,
    softly_after_a_save_of_its_own,
    softly_by_query,
    softly_another_instance,
    after_a_query_of_its_own,
    archived,
    archived_copy,
]


@pytest.fixture(params=DELETIONS, ids=lambda each: each.__name__)
def deletion(request, monkeypatch):
    monkeypatch.setattr(Ticket, "delete", lambda self, **_: request.param(self))


# The ways to it; each one calls a function when it has read the ticket, and before dlock does anything


def by_method(ticket, before):
    before()
    ticket.delete_with_version()


def by_method_with_the_version_seen(ticket, before):
    before()
    ticket.delete_with_version(expected=ticket.version)


def by_async_method(ticket, before):
    before()
    async_to_sync(ticket.adelete_with_version)()


def by_formset(ticket, before):
    formset = Tickets(sent_by(Tickets(), **{"form-0-DELETE": "on"}))
    assert formset.is_valid()
    before()
    formset.save()


def by_view(ticket, before):
    class Delete(DeleteTicket):
        def form_valid(self, form):
            before()
            return super().form_valid(form)

    sent = form(Delete.as_view()(RF.get("/"), pk=ticket.pk))
    assert Delete.as_view()(RF.post("/", sent), pk=ticket.pk).status_code == 302


def by_rest_view(ticket, before):
    class Destroy(PreconditionMixin, DestroyAPIView):
        queryset = Ticket.objects.all()

        def perform_destroy(self, instance):
            before()
            super().perform_destroy(instance)

    assert send(Destroy.as_view(), "delete", ticket, {}, if_match=etag_of(ticket)).status_code == 204


WAYS = [by_method, by_method_with_the_version_seen, by_async_method, by_formset, by_view, by_rest_view]


@pytest.mark.usefixtures("deletion")
@pytest.mark.parametrize("way", WAYS)
def test_no_change_of_others_is_deleted(ticket, way):
    with pytest.raises(StaleObject):
        way(ticket, lambda: change(ticket, title="theirs"))
    assert Ticket.objects.get().state == "open"


@pytest.mark.usefixtures("deletion")
@pytest.mark.parametrize("way", WAYS)
def test_row_that_nobody_else_has_changed_is_deleted(ticket, way):
    way(ticket, lambda: None)
    assert not Ticket.objects.filter(state="open").exists()


@pytest.mark.parametrize("way", [each for each in WAYS if each is not by_view])
def test_own_delete_may_begin_its_own_transactions_and_take_its_own_locks(ticket, way, store, monkeypatch):
    def delete(self, **_):
        with lock("ticket", self.pk), transaction.atomic(durable=True):
            read_again(self)

    monkeypatch.setattr(Ticket, "delete", delete)
    way(ticket, lambda: None)
    assert not Ticket.objects.exists()


@pytest.mark.parametrize("way", [each for each in WAYS if each is not by_view])
def test_what_an_own_delete_that_refuses_has_written_is_kept(ticket, way, monkeypatch):
    def delete(self, **_):
        Tag.objects.create(name="somebody has tried")
        raise PermissionError

    monkeypatch.setattr(Ticket, "delete", delete)
    with pytest.raises(PermissionError):
        way(ticket, lambda: None)
    assert Tag.objects.exists()


def test_row_is_not_locked_while_its_own_delete_begins(on_postgresql, ticket, party, monkeypatch):
    other = party()

    def delete(self, **_):
        assert other.now(unlocked, Ticket, "postgresql") == {self.pk}
        read_again(self)

    monkeypatch.setattr(Ticket, "delete", delete)
    with transaction.atomic():
        ticket.delete_with_version()
    assert not Ticket.objects.exists()


@pytest.mark.parametrize("expected", [True, False])
def test_instance_made_of_a_key_and_a_version_is_compared(ticket, expected, monkeypatch):
    monkeypatch.setattr(Ticket, "delete", read_again)
    made = Ticket(pk=ticket.pk, version=ticket.version)
    change(ticket, title="theirs")
    with pytest.raises(StaleObject):
        made.delete_with_version(**({"expected": ticket.version} if expected else {}))
    assert Ticket.objects.exists()


@pytest.mark.usefixtures("deletion")
def test_row_that_is_gone_is_stale(ticket):
    Ticket.objects.all()._raw_delete("default")
    with pytest.raises(StaleObject):
        ticket.delete_with_version()
    assert not Ticket.objects.exists()


def test_unsaved_instance_is_left_to_the_own_delete(ticket, monkeypatch):
    monkeypatch.setattr(Ticket, "delete", lambda self, **_: (0, {}))
    assert Ticket().delete_with_version() == (0, {})


class Open(LockManager):
    def get_queryset(self):
        return super().get_queryset().filter(state="open")


@pytest.mark.parametrize("is_changed", [True, False])
def test_row_that_the_base_manager_hides_is_compared(ticket, is_changed, monkeypatch):
    manager = Open()
    manager.model = Ticket
    monkeypatch.setitem(vars(Ticket._meta), "base_manager", manager)
    monkeypatch.setattr(Ticket, "delete", by_query)
    Ticket.objects.filter(pk=ticket.pk).update(state="closed")
    if not is_changed:
        ticket = Ticket.objects.get()
    with pytest.raises(StaleObject) if is_changed else nullcontext():
        ticket.delete_with_version()
    assert Ticket.objects.exists() is is_changed


def read_again_there(self, using=None):
    self.refresh_from_db(using=using or self._state.db)
    VersionedMixin.delete(self, using)


@pytest.fixture
def there(use_database, monkeypatch):
    """The rows in another database, of which there is one whose model reads it again before it deletes it."""
    use_database("other")
    monkeypatch.setattr(Ticket, "delete", read_again_there)
    Ticket.objects.using("other").create(title="there")
    return Ticket.objects.using("other")


def test_formset_of_another_database_compares_its_rows_there(there):
    def formset():
        return Tickets(sent_by(Tickets(queryset=there.all()), **{"form-0-DELETE": "on"}), queryset=there.all())

    late = formset()
    assert late.is_valid()
    there.update(title="theirs")
    with pytest.raises(StaleObject):
        late.save()
    later = formset()
    assert later.is_valid()
    later.save()
    assert not there.exists()


def test_instance_is_compared_with_its_row_in_the_database_that_is_named(there, ticket):
    made = there.get()
    made._state.db = "default"  # The instance may have been read from anywhere.
    there.update(title="theirs")
    with pytest.raises(StaleObject):
        made.delete_with_version(using="other")
    assert there.exists()


def test_formset_deletes_rows_that_the_own_delete_of_others_has_written(ticket, monkeypatch):
    def delete(self, **_):
        self.refresh_from_db()
        Ticket.objects.filter(pk__gt=self.pk).update(notes="one place up")
        VersionedMixin.delete(self)

    Ticket.objects.create(title="second")
    monkeypatch.setattr(Ticket, "delete", delete)
    formset = Tickets(sent_by(Tickets(), **{"form-0-DELETE": "on", "form-1-DELETE": "on"}))
    assert formset.is_valid()
    formset.save()
    assert not Ticket.objects.exists()


def test_formset_deletes_none_of_its_rows_if_others_have_changed_one(ticket, monkeypatch):
    second = Ticket.objects.create(title="second")
    monkeypatch.setattr(Ticket, "delete", read_again)
    formset = Tickets(sent_by(Tickets(), **{"form-0-DELETE": "on", "form-1-DELETE": "on"}))
    assert formset.is_valid()
    change(second, title="theirs")
    with pytest.raises(StaleObject):
        formset.save()
    assert Ticket.objects.count() == 2


def test_formset_leaves_deletions_to_its_caller(ticket, monkeypatch):
    monkeypatch.setattr(Ticket, "delete", read_again)
    formset = Tickets(sent_by(Tickets(), **{"form-0-DELETE": "on"}))
    assert formset.is_valid()
    change(ticket, title="theirs")
    formset.save(commit=False)
    assert [each.pk for each in formset.deleted_objects] == [ticket.pk]
    assert Ticket.objects.exists()


def test_instance_may_be_deleted_again_after_a_conflict_and_a_refresh(ticket, monkeypatch):
    monkeypatch.setattr(Ticket, "delete", read_again)
    change(ticket, title="theirs")
    with transaction.atomic():
        with pytest.raises(StaleObject):
            ticket.delete_with_version()
        ticket.refresh_from_db()
        ticket.delete_with_version()
    assert not Ticket.objects.exists()


def test_formset_compares_only_the_rows_that_it_deletes(ticket, monkeypatch):
    second = Ticket.objects.create(title="second")
    monkeypatch.setattr(Ticket, "delete", read_again)
    formset = Tickets(sent_by(Tickets(), **{"form-0-DELETE": "on"}))
    assert formset.is_valid()
    change(second, title="theirs")
    formset.save()
    assert Ticket.objects.get().title == "theirs"


def test_formset_asks_for_its_deleted_forms_as_often_for_many_rows_as_for_one(ticket, monkeypatch):
    monkeypatch.setattr(Ticket, "delete", read_again)

    def times():
        formset = Tickets(sent_by(Tickets(), **{"form-0-DELETE": "on"}))
        asked = []
        monkeypatch.setattr(formset, "_should_delete_form", lambda form: form.prefix == "form-0")
        monkeypatch.setattr(formset, "is_valid", lambda: asked.append(formset) or True)
        formset.full_clean()
        formset.save()
        return asked.count(formset)

    Ticket.objects.create(title="second")
    few = times()
    for _ in range(10):
        Ticket.objects.create(title="another")
    assert times() == few


def test_model_without_an_own_delete_is_compared_only_by_the_statement_that_locks_its_row(ticket):
    with CaptureQueriesContext(connection) as sent:
        ticket.delete_with_version()
    assert not [each for each in sent if each["sql"].startswith("SELECT") and '"version"' in each["sql"]]


def test_request_without_a_tag_deletes_what_the_own_delete_has_read(ticket, monkeypatch):
    class LenientDestroy(PreconditionMixin, DestroyAPIView):
        queryset = Ticket.objects.all()
        if_match_required = ()

        def perform_destroy(self, instance):
            change(instance, title="theirs")
            super().perform_destroy(instance)

    monkeypatch.setattr(Ticket, "delete", read_again)
    assert send(LenientDestroy.as_view(), "delete", ticket, {}).status_code == 204
    assert not Ticket.objects.exists()


def by_query_where_it_was_read(self, **_):
    Ticket.objects.using(self._state.db).filter(pk=self.pk).delete()


SNAPSHOTS = [("mariadb", "read committed"), ("mariadb", "repeatable read"), ("mariadb", None)]


@pytest.fixture(params=SNAPSHOTS, ids=lambda each: " ".join(map(str, each)))
def with_snapshot(request, isolated, monkeypatch):
    """Return the rows in a transaction of MariaDB that has read one, which others have changed since then."""
    monkeypatch.setattr(Ticket, "delete", by_query_where_it_was_read)
    alias = isolated(*request.param)
    rows = Ticket.objects.using(alias)
    rows.create(title="mine")
    with transaction.atomic(using=alias):
        rows.get()
        Ticket.objects.using("mariadb").update(title="theirs")
        yield rows


def test_change_of_others_that_the_snapshot_of_a_transaction_does_not_show_is_not_deleted(with_snapshot):
    ticket = Ticket(pk=with_snapshot.get().pk, version=1)
    ticket._state.db = with_snapshot.db
    with pytest.raises(StaleObject):
        ticket.delete_with_version()
    assert with_snapshot.exists()


def test_change_that_the_snapshot_does_not_show_is_not_deleted_with_autocommit_off(isolated, monkeypatch):
    monkeypatch.setattr(Ticket, "delete", by_query_where_it_was_read)
    alias = isolated("mariadb", "repeatable read")
    Ticket.objects.using(alias).create(title="mine")
    transaction.set_autocommit(False, using=alias)
    try:
        ticket = Ticket.objects.using(alias).get()
        Ticket.objects.using("mariadb").update(title="theirs")
        with pytest.raises(StaleObject):
            ticket.delete_with_version()
    finally:
        transaction.rollback(using=alias)
        transaction.set_autocommit(True, using=alias)


def test_row_that_was_locked_is_deleted_whatever_the_snapshot_of_a_transaction_shows(with_snapshot):
    with_snapshot.select_for_update().get().delete_with_version()
    assert not with_snapshot.exists()


def test_formset_compares_the_rows_whose_own_class_has_a_delete(monkeypatch):
    """As with polymorphic models, of which a formset lists several."""

    def read_as_proxy(_, *row, **options):
        return models.Model.from_db.__func__(ArticleProxy, *row, **options)

    rows = modelformset_factory(
        Article, form=VersionedModelForm, formset=BaseVersionedModelFormSet, fields=["title"], extra=0, can_delete=True
    )
    Article.objects.create(title="mine", counter=Counter.objects.create(name="a"))
    monkeypatch.setattr(
        ArticleProxy, "delete", lambda self, **_: Article.objects.filter(pk=self.pk).delete(), raising=False
    )
    monkeypatch.setattr(Article, "from_db", classmethod(read_as_proxy))
    formset = rows(sent_by(rows(), **{"form-0-DELETE": "on"}))
    assert formset.is_valid()
    Article.objects.update(title="theirs")
    with pytest.raises(StaleObject):
        formset.save()
    assert Article.objects.get().title == "theirs"


def test_comparison_joins_no_table_of_an_ordering(ticket, monkeypatch):
    monkeypatch.setattr(Ticket, "delete", by_query)
    monkeypatch.setattr(Ticket._meta, "ordering", ["owner__name"])
    with CaptureQueriesContext(connection) as sent:
        ticket.delete_with_version()
    assert "JOIN" not in sent[0]["sql"]


@isolate_apps("tests.testapp")
@pytest.mark.parametrize("options", [{}, {"soft": True}, {"using": "default"}])
def test_next_class_gets_what_the_caller_gave_and_may_delete_softly(ticket, options):
    class SoftDeletion(models.Model):
        class Meta:
            abstract = True

        def delete(self, using=None, soft=True):
            assert soft
            self.state = "closed"
            self.save(using=using)

    class SoftTicket(Ticket, SoftDeletion):
        class Meta:
            app_label, proxy = "testapp", True

    soft = SoftTicket.objects.get()
    soft.delete(**options)
    assert Ticket.objects.get().state == "closed"
    change(ticket, title="theirs")
    with pytest.raises(StaleObject):
        soft.delete_with_version()


@isolate_apps("tests.testapp")
def test_positional_argument_of_another_class_names_no_database(ticket):
    class SoftDeletion(models.Model):
        class Meta:
            abstract = True

        def delete(self, reason=None):
            self.state = reason
            self.save()

    class SoftTicket(Ticket, SoftDeletion):
        class Meta:
            app_label, proxy = "testapp", True

    SoftTicket.objects.get().delete("spam")
    assert Ticket.objects.get().state == "spam"


@pytest.mark.parametrize("method", ["save", "asave", "delete", "adelete"])
def test_template_calls_no_method_that_writes(ticket, method):
    ticket.title = "changed"
    shown = Template("{{ ticket." + method + "_with_version }}").render(Context({"ticket": ticket}))
    assert (shown, Ticket.objects.get().title) == ("", "old")
