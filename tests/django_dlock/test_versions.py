"""VersionField and VersionedMixin keep their promises."""

import io
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core import serializers
from django.core.management import call_command
from django.db import DatabaseError, IntegrityError, connections, models, transaction
from django.db.migrations.state import ModelState, ProjectState
from django.db.migrations.writer import MigrationWriter
from django.db.models import F
from django.db.models.signals import post_save
from django.db.transaction import atomic
from django.test.utils import CaptureQueriesContext, isolate_apps
from django.utils.functional import SimpleLazyObject

from django_dlock.errors import NotSupported, StaleObject
from django_dlock.versions import LockManager, VersionedMixin, VersionField
from dlock_core import errors as core
from dlock_core.sql import versions
from tests import processes
from tests.testapp.models import (
    Account,
    Article,
    ArticleProxy,
    Careful,
    Code,
    Counter,
    Draft,
    Member,
    Person,
    Place,
    Shop,
    Wallet,
)

pytestmark = pytest.mark.usefixtures("versions_from_1")


@pytest.fixture
def article(database: str) -> Article:
    return Article.objects.using(database).create(title="old")


def read(instance: models.Model) -> Any:
    """Return the row as the database has it, in a new instance."""
    return type(instance)._default_manager.using(instance._state.db).get(pk=instance.pk)


def version(instance: models.Model) -> int:
    """Return the version that the database has."""
    return read(instance).version


@pytest.fixture
def statements(database: str) -> Iterator[Callable[[], list[str]]]:
    with CaptureQueriesContext(connections[database]) as context:
        yield lambda: [query["sql"].split()[0] for query in context.captured_queries]


# one UPDATE


def test_new_row_has_the_first_version(article):
    assert article.version == version(article) == 1


def test_each_save_counts_one_up(article):
    for number in (2, 3, 4):
        article.save_with_version()
        assert article.version == version(article) == number


def test_success_is_one_statement(article, statements):
    before = len(statements())
    article.save_with_version()
    assert statements()[before:] == ["UPDATE"]


def test_success_is_one_statement_inside_a_transaction(article, statements, database):
    with atomic(database):
        before = len(statements())
        article.save_with_version()
        assert statements()[before:] == ["UPDATE"]


def test_conflict_is_two_statements(article, statements):
    read(article).save()
    before = len(statements())
    with pytest.raises(StaleObject):
        article.save_with_version()
    assert statements()[before:] == ["UPDATE", "SELECT"]


def test_second_of_two_savers_is_refused_and_told_what_was_found(article):
    other = read(article)
    other.title = "theirs"
    other.save_with_version()
    article.title = "ours"
    with pytest.raises(StaleObject, match="read it again and retry") as caught:
        article.save_with_version()
    error = caught.value
    assert (error.instance, error.expected, error.found, error.action) == (article, 1, 2, "save")
    assert isinstance(error, DatabaseError)
    assert isinstance(error, core.StaleObject)
    assert read(article).title == "theirs"


def test_plain_save_checks_and_counts_too(article):
    read(article).save()
    with pytest.raises(StaleObject):
        article.save()


def test_second_save_after_a_conflict_conflicts_again(article):
    read(article).save()
    for _ in range(3):
        with pytest.raises(StaleObject):
            article.save_with_version()
    assert article.version == 1


def test_reading_again_cures_a_conflict(article):
    read(article).save()
    with pytest.raises(StaleObject):
        article.save_with_version()
    article.refresh_from_db()
    article.save_with_version()
    assert article.version == version(article) == 3


def test_reading_only_other_fields_again_does_not_cure_it(article):
    read(article).save()
    article.refresh_from_db(fields=["title"])
    with pytest.raises(StaleObject):
        article.save_with_version()


async def test_async_twins_save_and_delete(django_db_blocker, use_database):
    await sync_to_async(use_database)("default")
    article = await Article.objects.acreate(title="old")
    other = await Article.objects.aget(pk=article.pk)
    await other.asave_with_version()
    with pytest.raises(StaleObject):
        await article.asave_with_version()
    with pytest.raises(StaleObject):
        await article.adelete_with_version()
    await other.adelete_with_version()
    assert not await Article.objects.aexists()


def test_handlers_of_post_save_see_the_new_version(article):
    seen = []

    def note(instance: Article, **_: object) -> None:
        seen.append(instance.version)

    post_save.connect(note, Article)
    try:
        article.save_with_version()
    finally:
        post_save.disconnect(note, Article)
    assert seen == [2]


# update_fields


def test_update_fields_counts_although_version_is_not_named(article, statements):
    before = len(statements())
    article.save_with_version(update_fields=["title"])
    assert statements()[before:] == ["UPDATE"]
    assert article.version == version(article) == 2


def test_update_fields_is_checked(article):
    read(article).save(update_fields=["reads"])
    with pytest.raises(StaleObject):
        article.save_with_version(update_fields=["title"])


def test_update_fields_may_name_the_version(article):
    article.save_with_version(update_fields=["title", "version"])
    assert article.version == version(article) == 2


def test_empty_update_fields_write_nothing_and_count_nothing(article):
    article.save_with_version(update_fields=[])
    assert article.version == version(article) == 1


def test_force_update_is_checked(article):
    read(article).save()
    with pytest.raises(StaleObject):
        article.save_with_version(force_update=True)


# rows that are gone, rows that are new


def test_row_deleted_meanwhile_is_never_inserted_again(article, database):
    read(article).delete()
    with pytest.raises(StaleObject, match="the row is gone") as caught:
        article.save_with_version()
    assert caught.value.found is None
    assert not Article.objects.using(database).exists()


def test_stale_delete_is_refused(article):
    read(article).save()
    for delete in (article.delete, article.delete_with_version):
        with pytest.raises(StaleObject) as caught:
            delete()
        assert (caught.value.action, caught.value.expected, caught.value.found) == ("delete", 1, 2)
    assert version(article) == 2


def test_fresh_delete_deletes_and_says_so(article, database):
    assert article.delete_with_version() == (1, {"testapp.Article": 1})
    assert not Article.objects.using(database).exists()


def test_second_delete_of_a_row_is_refused(article):
    other = read(article)
    other.delete()
    with pytest.raises(StaleObject, match="gone"):
        article.delete()


def test_delete_of_an_instance_that_was_never_saved_is_django_s_error():
    with pytest.raises(ValueError, match="can't be deleted because its id attribute is set to None"):
        Article().delete()


def test_refused_delete_leaves_the_transaction_usable(article, database):
    read(article).save()
    with atomic(database):
        with pytest.raises(StaleObject):
            article.delete()
        Counter.objects.using(database).create(name="after")
    assert Counter.objects.using(database).exists()


def test_failed_delete_takes_its_version_back(article, database):
    class Sorry(Exception):
        pass

    def refuse(**_: object) -> None:
        raise Sorry

    models.signals.pre_delete.connect(refuse, Article)
    try:
        with atomic(database):
            with pytest.raises(Sorry):
                article.delete()
            article.save_with_version()
    finally:
        models.signals.pre_delete.disconnect(refuse, Article)
    assert article.version == version(article) == 2


def test_primary_key_of_the_author_s_choice_is_inserted_at_once(database, statements):
    before = len(statements())
    Code(code="a").save_with_version(using=database)
    assert statements()[before:] == ["INSERT"]


def test_new_instance_never_overwrites_a_row_with_its_key(database):
    Code.objects.using(database).create(code="a", title="first")
    with pytest.raises(IntegrityError):
        Code(code="a", title="second").save_with_version(using=database)
    assert Code.objects.using(database).get().title == "first"


def test_copy_without_a_key_is_a_new_row(article, database):
    article.pk = None
    article.save_with_version()
    assert Article.objects.using(database).count() == 2


def test_get_or_create_and_update_or_create_count(database):
    rows = Code.objects.using(database)
    rows.update_or_create(code="a", defaults={"title": "one"})
    rows.update_or_create(code="a", defaults={"title": "two"})
    code, _ = rows.get_or_create(code="a")
    assert (code.title, code.version) == ("two", 2)


# rollback


class Sorry(Exception):
    """Raised by user code."""


def test_version_in_memory_is_the_database_s_after_a_rollback(article, database):
    with pytest.raises(Sorry), atomic(database):
        article.save_with_version()
        article.save_with_version(update_fields=["title"])
        assert article.version == 3
        raise Sorry
    assert article.version == version(article) == 1
    article.save_with_version()
    assert article.version == version(article) == 2


def test_version_in_memory_is_the_database_s_after_a_savepoint_is_rolled_back(article, database):
    with atomic(database):
        article.save_with_version()
        with pytest.raises(Sorry), atomic(database):
            article.save_with_version()
            with atomic(database):
                article.save_with_version()
            raise Sorry
        assert article.version == 2
        article.save_with_version()
    assert article.version == version(article) == 3


def test_row_whose_insert_was_rolled_back_is_inserted_by_the_next_save(database):
    article = Article(title="new")
    with pytest.raises(Sorry), atomic(database):
        article.save_with_version(using=database)
        article.save_with_version()
        raise Sorry
    article.save_with_version(using=database)
    assert article.version == version(article) == 1


def test_version_after_a_rolled_back_bulk_update_is_the_database_s(article, database):
    with pytest.raises(Sorry), atomic(database):
        Article.objects.using(database).bulk_update([article], ["title"])
        assert article.version == 2
        raise Sorry
    assert article.version == version(article) == 1


# a conflict inside a transaction


def test_conflict_leaves_the_transaction_usable(article, database):
    read(article).save()
    with atomic(database):
        Counter.objects.using(database).create(name="before")
        with pytest.raises(StaleObject):
            article.save_with_version()
        Counter.objects.using(database).create(name="after")
    assert {counter.name for counter in Counter.objects.using(database).all()} == {"before", "after"}


def test_conflict_in_plain_save_dooms_the_transaction_as_django_s_errors_do(article, database):
    read(article).save()
    with atomic(database):
        with pytest.raises(StaleObject):
            article.save()
        with pytest.raises(transaction.TransactionManagementError):
            Counter.objects.using(database).exists()
        transaction.set_rollback(True, using=database)


def test_conflict_does_not_save_a_transaction_that_was_doomed_before(article, database):
    read(article).save()
    with atomic(database):
        transaction.set_rollback(True, using=database)
        with pytest.raises((StaleObject, transaction.TransactionManagementError)):
            article.save_with_version()
        assert transaction.get_rollback(database)


def test_conflict_found_after_a_parent_table_was_written_undoes_that(database):
    member = Member.objects.using(database).create(name="old", grade=1)
    read(member).save()
    with atomic(database):
        member.name = "half written"
        with pytest.raises(StaleObject):
            member.save_with_version()
        Counter.objects.using(database).create(name="after")
    assert Person.objects.using(database).get().name == "old"
    assert Counter.objects.using(database).exists()


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_conflict_under_a_snapshot_tells_the_committed_version(article, database):
    """At MariaDB's REPEATABLE READ, a plain SELECT would return the version that the UPDATE did not find."""
    with connections[database].cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    with atomic(database):
        assert version(article) == 1
        other = connections[database].copy()
        other.inc_thread_sharing()
        with other.cursor() as cursor:
            cursor.execute("UPDATE testapp_article SET version = 2")
        other.close()
        with pytest.raises(StaleObject) as caught:
            article.save_with_version()
    assert caught.value.found == 2


# querysets


def test_update_of_a_queryset_counts(article, database):
    assert Article.objects.using(database).filter(title="old").update(reads=5) == 1
    assert version(article) == 2
    with pytest.raises(StaleObject):
        article.save_with_version()


def test_what_django_writes_by_itself_counts_too(article, database):
    counter, mine = Counter.objects.using(database).create(name="a"), read(article)
    counter.article_set.add(article)
    assert version(article) == 2
    counter.article_set.clear()
    assert version(article) == 3
    counter.article_set.add(article)
    counter.delete()
    assert read(article).counter_id is None
    assert version(article) == 5
    with pytest.raises(StaleObject):
        mine.save_with_version()


def test_base_manager_of_an_inheriting_model_counts_too(database):
    place = Place.objects.using(database).create(name="a")
    Shop._base_manager.using(database).create(name="b", owner="c")
    Shop._base_manager.using(database).update(owner="d")
    assert [place.version for place in Place.objects.using(database).order_by("pk")] == [1, 2]
    assert place.version == 1


def test_base_manager_that_a_model_names_is_kept_and_a_field_alone_needs_none():
    with isolate_apps("tests.testapp"):

        class Named(VersionedMixin):
            named = LockManager()

            class Meta:
                app_label = "testapp"
                base_manager_name = "named"

        class WithinMigration(models.Model):
            version = VersionField()

            class Meta:
                app_label = "testapp"

    assert Named._base_manager.name == "named"
    assert type(WithinMigration._base_manager) is models.Manager


@pytest.mark.parametrize("given", [7, None, F("version"), F("version") + 0, F("version") - 1, F("reads") + 1])
def test_update_that_sets_the_version_without_counting_is_refused(article, database, statements, given):
    before = len(statements())
    with pytest.raises(NotSupported, match=r"leave it out, or set it to F\('version'\) \+ 1"):
        Article.objects.using(database).update(title="theirs", version=given)
    assert len(statements()) == before


def test_update_may_count_the_version_itself(article, database):
    Article.objects.using(database).update(version=F("version") + 2)
    Article.objects.using(database).update(version=3 + F("version"))
    assert version(article) == 6


@pytest.mark.parametrize(("model", "name"), [(ArticleProxy, "version"), (Draft, "revision"), (Shop, "version")])
def test_update_knows_the_version_under_its_own_name_and_of_a_parent(database, model, name):
    rows = model.objects.using(database)
    row = rows.create()
    with pytest.raises(NotSupported, match=f"cannot set '{name}'"):
        rows.update(**{name: 1})
    rows.update(**{name: F(name) + 1})
    assert getattr(read(row), name) == 2


def test_bulk_update_checks_and_counts_every_row_with_one_statement(database, statements):
    articles = [Article.objects.using(database).create(title=title) for title in "abc"]
    articles[1].save()
    for each in articles:
        each.reads = 9
    before = len(statements())
    assert Article.objects.using(database).bulk_update(articles, ["reads"]) == 3
    assert [word for word in statements()[before:] if word not in ("BEGIN", "COMMIT")] == ["UPDATE"]
    assert [each.version for each in articles] == [version(each) for each in articles] == [2, 3, 2]
    assert {each.reads for each in Article.objects.using(database).all()} == {9}


@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_bulk_update_with_one_stale_object_writes_none(database, batch_size):
    articles = [Article.objects.using(database).create(title=title) for title in "abc"]
    read(articles[2]).save()
    with atomic(database):
        with pytest.raises(StaleObject) as caught:
            Article.objects.using(database).bulk_update(articles, ["title"], batch_size)
        assert Article.objects.using(database).count() == 3
    assert (caught.value.instance, caught.value.expected, caught.value.found) == (articles[2], 1, 2)
    assert [version(each) for each in articles] == [1, 1, 2]
    assert [each.version for each in articles] == [1, 1, 1]


def test_bulk_update_of_a_lazy_object_writes_the_one_inside(article, database):
    lazy = SimpleLazyObject(lambda: article)
    lazy.title = "new"
    assert Article.objects.using(database).bulk_update([lazy, article], ["title"]) == 1
    assert (article.title, article.version) == ("new", read(article).version)


def test_bulk_update_of_a_deleted_row_is_refused(article, database):
    read(article).delete()
    with pytest.raises(StaleObject, match="gone"):
        Article.objects.using(database).bulk_update([article], ["title"])


def test_bulk_update_of_many_rows_with_many_versions(database):
    rows = Article.objects.using(database)
    rows.bulk_create([Article(title=str(number)) for number in range(1500)])
    for number in range(1, 50):
        rows.filter(title__in=[str(each) for each in range(number, 1500, 50)]).update(version=F("version") + number)
    articles = list(rows.all())
    assert rows.bulk_update(articles, ["title", "reads"]) == 1500
    assert rows.filter(version=2).count() == 30


def test_bulk_update_leaves_the_version_to_itself(article, database):
    with pytest.raises(ValueError, match="leave it out"):
        Article.objects.using(database).bulk_update([article], ["version"])


@pytest.mark.parametrize("objs", [[], [Article()]])
def test_bulk_update_of_nothing_or_of_what_is_not_saved_is_django_s_answer(database, objs):
    rows = Article.objects.using(database)
    if objs:
        with pytest.raises(ValueError, match="must have a primary key set"):
            rows.bulk_update(objs, ["title"])
    else:
        assert rows.bulk_update(objs, ["title"]) == 0


def test_insert_that_turns_into_an_update_is_refused(database):
    with pytest.raises(NotSupported, match="cannot increment versions"):
        Code.objects.using(database).bulk_create(
            [Code(code="a")], update_conflicts=True, update_fields=["title"], unique_fields=["code"]
        )


def test_bulk_create_begins_with_the_first_version(database):
    Code.objects.using(database).bulk_create([Code(code="a"), Code(code="b")])
    assert [code.version for code in Code.objects.using(database).all()] == [1, 1]


def test_other_software_may_insert_without_a_version(database):
    with connections[database].cursor() as cursor:
        cursor.execute("INSERT INTO testapp_code (code, title) VALUES ('a', '')")
    code = Code.objects.using(database).get()
    assert abs(code.version - time.time_ns() // 1000) < 60 * 10**6
    code.save_with_version()
    assert code.version == version(code)


# kinds of models and fields


def test_field_may_have_another_name(database):
    draft = Draft.objects.using(database).create(title="a")
    read(draft).save()
    with pytest.raises(StaleObject):
        draft.save_with_version()
    Draft.objects.using(database).update(title="b")
    assert read(draft).revision == 3
    assert not hasattr(draft, "version") or draft.version is None


def test_proxy_is_checked(article, database):
    proxy = ArticleProxy.objects.using(database).get()
    article.save()
    with pytest.raises(StaleObject):
        proxy.save_with_version()
    with pytest.raises(StaleObject):
        proxy.delete()
    assert ArticleProxy.objects.using(database).update(reads=1) == 1
    assert version(article) == 3


def test_version_inherited_from_another_table_counts_when_only_the_child_is_written(database):
    shop = Shop.objects.using(database).create(name="corner", owner="a")
    other = read(shop)
    shop.owner = "b"
    shop.save_with_version(update_fields=["owner"])
    assert Place.objects.using(database).get().version == 2
    for fields in (["owner"], ["name"], None):
        with pytest.raises(StaleObject):
            other.save_with_version(update_fields=fields)
    assert read(shop).owner == "b"


def test_version_inherited_from_another_table_guards_deletes_and_bulk_writes(database):
    shop = Shop.objects.using(database).create(name="corner", owner="a")
    other = read(shop)
    assert Shop.objects.using(database).update(owner="b") == 1
    assert shop.version + 1 == version(shop)
    with pytest.raises(StaleObject):
        other.delete()
    with pytest.raises(StaleObject):
        Shop.objects.using(database).bulk_update([other], ["owner"])
    shop.refresh_from_db()
    Shop.objects.using(database).bulk_update([shop], ["owner"])
    assert shop.version == version(shop) == 3
    shop.delete()
    assert not Place.objects.using(database).exists()


def test_version_next_to_a_parent_without_one(database):
    member = Member.objects.using(database).create(name="a", grade=1)
    other = read(member)
    member.name = "b"
    member.save_with_version(update_fields=["name"])
    assert member.version == version(member) == 2
    with pytest.raises(StaleObject):
        other.save_with_version(update_fields=["grade"])
    with pytest.raises(StaleObject):
        other.delete()
    read(member).delete()
    assert not Person.objects.using(database).exists()


def test_row_that_is_looked_for_before_it_is_saved(database):
    careful = Careful.objects.using(database).create(title="a")
    other = read(careful)
    careful.save_with_version()
    with pytest.raises(StaleObject):
        other.save_with_version()
    read(careful).delete()
    with pytest.raises(StaleObject, match="gone"):
        careful.save_with_version()
    assert not Careful.objects.using(database).exists()


def test_expressions_are_computed_by_the_database_and_counted(article):
    other = read(article)
    article.reads = F("reads") + 10
    article.save_with_version()
    assert (read(article).reads, version(article)) == (10, 2)
    other.reads = F("reads") + 10
    with pytest.raises(StaleObject):
        other.save_with_version()


def test_deferred_fields_do_not_matter(article, database):
    part = Article.objects.using(database).only("title", "version").get()
    read(article).save()
    part.title = "new"
    with pytest.raises(StaleObject):
        part.save_with_version()


def test_deferred_version_is_refused_because_reading_it_now_would_make_the_check_void(article, database):
    part = Article.objects.using(database).defer("version").get()
    read(article).save()
    for write in (part.save_with_version, part.delete):
        with pytest.raises(ValueError, match="'version' was deferred"):
            write()
    assert version(article) == 2


@pytest.mark.parametrize(
    ("number", "advice"), [(None, "refresh_from_db"), ("1", r"int\(text\)"), (F("version") + 1, "is a number")]
)
def test_version_that_is_no_number_is_refused_and_the_error_says_what_to_do(article, number, advice):
    article.version = number
    with pytest.raises(ValueError, match=f"nothing can be checked: .*{advice}"):
        article.save_with_version()
    assert version(article) == 1


async def test_expected_version_that_a_payload_did_not_bring_is_refused_before_any_i_o():
    payload: dict[str, Any] = {"title": "new"}
    for instance in (Article(), Article(pk=1, version=1)):
        for write in (instance.asave_with_version, instance.adelete_with_version):
            with pytest.raises(TypeError, match="refuse a request that brings no version"):
                await write(expected=payload.get("version"))


def test_other_database_gets_a_copy_and_never_loses_a_row(article, database, use_database):
    other = use_database("other")
    article.save_with_version(using=other)
    assert Article.objects.using(other).get().version == 1
    again = Article.objects.using(database).get()
    Article.objects.using(other).update(title="theirs")
    with pytest.raises(IntegrityError):
        again.save_with_version(using=other)
    assert Article.objects.using(other).get().title == "theirs"


def test_two_mixins_in_either_order_both_count_and_lock(database):
    for model in (Account, Wallet):
        row = model.objects.using(database).create()
        model.objects.using(database).update(balance=1)
        assert version(row) == 2
        with atomic(database):
            assert model.objects.using(database).lock_row(row.pk).version == 2


# fixtures, migrations


def test_fixtures_load_over_rows_of_any_version(article, database, tmp_path):
    saved = io.StringIO()
    call_command("dumpdata", "testapp.article", database=database, stdout=saved)
    article.title = "newer"
    article.save_with_version()
    fixture = tmp_path / "articles.json"
    fixture.write_text(saved.getvalue())
    call_command("loaddata", str(fixture), database=database, verbosity=0)
    assert (read(article).title, version(article)) == ("old", 1)


def test_fixtures_load_into_an_empty_table_with_their_version(article, database):
    article.save_with_version()
    text = serializers.serialize("json", [article])
    article.delete()
    for row in serializers.deserialize("json", text, using=database):
        row.save(using=database)
    assert Article.objects.using(database).get().version == 2


def test_model_of_a_migration_counts_without_the_mixin(article, database):
    state = ProjectState()
    for model in (Counter, Article):
        state.add_model(ModelState.from_model(model))
    old = state.apps.get_model("testapp", "Article")
    row = old.objects.using(database).get()
    row.title = "migrated"
    row.save()
    assert (read(article).title, version(article)) == ("migrated", 2)
    with pytest.raises(StaleObject):
        article.save_with_version()


def model_of_a_migration(model):
    """Return a model as `apps.get_model()` returns it to a function of RunPython."""
    state = ProjectState()
    for each in {Counter, *model._meta.get_parent_list(), model}:
        state.add_model(ModelState.from_model(each))
    return state.apps.get_model("testapp", model.__name__)


@pytest.mark.parametrize(
    ("loaded", "saved"),
    [([], ["title"]), ([], ["title", "version"]), (["pk", "title"], None), (["pk", "title"], ["title"])],
)
def test_save_of_some_fields_in_a_migration_counts_once(article, database, loaded, saved):
    row = model_of_a_migration(Article).objects.using(database).only(*loaded).get()
    row.title = "migrated"
    row.save(update_fields=saved)
    assert (read(article).title, version(article)) == ("migrated", 2)
    with pytest.raises(StaleObject):
        article.save_with_version()


@pytest.mark.parametrize(("model", "own"), [(Shop, "owner"), (Member, "grade")])
@pytest.mark.parametrize("saved", [["name"], ["own"], None])
def test_save_in_a_migration_of_a_row_in_two_tables_counts_once(database, model, own, saved):
    row = model.objects.using(database).create()
    old = model_of_a_migration(model).objects.using(database).get()
    old.save(update_fields=[own] if saved == ["own"] else saved)
    assert version(row) == 2


def test_bulk_create_over_rows_in_a_migration_gives_them_a_new_version(article, database, monkeypatch):
    old = model_of_a_migration(Article)
    rows = [old(pk=article.pk, title="migrated"), old(title="new")]
    keys = {} if connections[database].vendor == "mysql" else {"unique_fields": ["id"]}
    monkeypatch.setattr(versions, "time", SimpleNamespace(time_ns=lambda: 7000))
    old.objects.using(database).bulk_create(rows, update_conflicts=True, update_fields=["title"], **keys)
    assert (read(article).title, version(article)) == ("migrated", 7)
    with pytest.raises(StaleObject):
        article.save_with_version()


def test_updates_of_a_migration_count_and_check_nothing(article, database):
    counter = Counter.objects.using(database).create(name="a")
    state = ProjectState()
    for model in (Counter, Article):
        state.add_model(ModelState.from_model(model))
    old = state.apps.get_model("testapp", "Article").objects.using(database)
    old.filter(pk=article.pk).update(title="migrated", counter=counter.pk)
    state.apps.get_model("testapp", "Counter").objects.using(database).get().article_set.update(reads=5)
    part = old.only("title").get()
    part.title = "again"
    old.bulk_update([part], ["title"])
    state.apps.get_model("testapp", "Counter").objects.using(database).get().delete()
    found = read(article)
    assert (found.title, found.reads, found.counter, found.version) == ("again", 5, None, 5)
    with pytest.raises(StaleObject):
        article.save_with_version()


@pytest.mark.parametrize("given", [7, F("version"), F("version") + 1])
def test_update_in_a_migration_that_sets_the_version_counts_it(article, database, given):
    model_of_a_migration(Article).objects.using(database).update(title="migrated", version=given)
    assert (read(article).title, version(article)) == ("migrated", 2)


@pytest.mark.parametrize("fields", [["title", "version"], ["version"]])
def test_bulk_update_in_a_migration_that_names_the_version_counts_it(article, database, fields):
    old = model_of_a_migration(Article).objects.using(database)
    old.bulk_update(list(old.all()), fields)
    assert version(article) == 2
    with pytest.raises(StaleObject):
        article.save_with_version()


def test_manager_that_a_model_brings_into_its_migrations_is_kept(article, database):
    state = ModelState.from_model(Article)
    state.managers = [("objects", Mine()), ("others", models.Manager())]
    project = ProjectState()
    for each in (ModelState.from_model(Counter), state):
        project.add_model(each)
    old = project.apps.get_model("testapp", "Article")
    assert (type(old.objects), type(old._default_manager)) == (Mine, Mine)
    old.others.using(database).update(title="migrated")
    assert version(article) == 2


class Mine(models.Manager[Any]):
    use_in_migrations = True


def test_field_is_written_into_migrations_without_its_fixed_options():
    text, imports = MigrationWriter.serialize(VersionField())
    assert text == "django_dlock.models.VersionField()"
    assert imports == {"import django_dlock.models"}


def test_field_is_not_in_forms():
    assert not Article._meta.get_field("version").editable


# many writers


def save_with_version(article: Article) -> None:
    article.reads += 1
    article.save_with_version()


def save_without(article: Article) -> None:
    models.QuerySet(Article, using=article._state.db).filter(pk=article.pk).update(reads=article.reads + 1)


SAVERS = {"with version": save_with_version, "without": save_without}


def increment(link: processes.Link, database: str, pk: int, times: int, save: str, meet: bool) -> None:
    """Count up `times` times, starting over after a conflict; `meet`: every process reads before any of them writes."""
    for _ in range(times):
        while True:
            article = Article.objects.using(database).get(pk=pk)
            if meet:
                link.say("read")
                link.hear()
                meet = False
            try:
                SAVERS[save](article)
                break
            except StaleObject:
                continue


def test_no_update_of_several_processes_is_lost(article, database):
    processes.run(increment, [(database, article.pk, 50, "with version", False)] * 4)
    assert (read(article).reads, version(article)) == (200, 201)


@pytest.mark.parametrize(("save", "expected"), [("with version", 2), ("without", 1)])
def test_two_who_read_before_either_wrote_lose_an_update_only_without_a_version(article, database, save, expected):
    call = (increment, database, article.pk, 1, save, True)
    with processes.worker(*call) as one, processes.worker(*call) as other:
        for each in (one, other):
            assert each.hear() == "read"
        for each in (one, other):
            each.say("write")
        for each in (one, other):
            each.result()
    assert read(article).reads == expected
