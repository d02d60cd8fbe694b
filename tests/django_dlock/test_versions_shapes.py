"""Versions are checked even where the shape of a model, a manager or a router could defeat the check."""

import copy
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import django
import pytest
from django.contrib.postgres.fields import ArrayField
from django.db import IntegrityError, NotSupportedError, OperationalError, connections, models
from django.db.models.signals import pre_delete
from django.db.transaction import atomic, set_rollback
from django.test import override_settings
from django.test.utils import CaptureQueriesContext, isolate_apps

from django_dlock.comparisons import lock_versions
from django_dlock.errors import NotSupported, StaleObject
from django_dlock.preconditions import etag_of
from django_dlock.versions import VersionedMixin
from tests.django_dlock.parties import Party, unlocked, until_blocked
from tests.django_dlock.sessions import rows as fetched
from tests.django_dlock.sessions import second_session
from tests.garbage import collect_garbage
from tests.mysql_server import MYSQLD
from tests.testapp.models import (
    Account,
    ActiveJobs,
    Article,
    ArticleProxy,
    Code,
    Counter,
    Job,
    Member,
    Person,
    Place,
    Shop,
    Team,
    Track,
)

needs_peers = pytest.mark.skipif(django.VERSION < (6, 1), reason="Django 6.1 added fetch modes")


def read(instance: models.Model) -> Any:
    """Return the row as the database has it, in a new instance."""
    return type(instance)._default_manager.using(instance._state.db).get(pk=instance.pk)


# rows that are created again


def test_row_made_anew_under_the_same_key_is_not_taken_for_the_old_one(database):
    rows = Code.objects.using(database)
    for write in (lambda old: old.save(), lambda old: old.delete(), lambda old: rows.bulk_update([old], ["title"])):
        old = rows.create(code="a", title="old")
        tag = etag_of(old)
        read(old).delete()
        new = rows.create(code="a", title="new")
        with pytest.raises(StaleObject):
            write(old)
        assert (read(new).title, etag_of(read(new)) == tag) == ("new", False)
        new.delete()


def test_row_that_other_software_makes_anew_is_not_taken_for_the_old_one(database):
    old = Code.objects.using(database).create(code="a", title="old")
    read(old).delete()
    with connections[database].cursor() as cursor:
        cursor.execute("INSERT INTO testapp_code (code, title) VALUES ('a', 'new')")
    with pytest.raises(StaleObject):
        old.save()
    assert abs(read(old).version - old.version) < 3600 * 10**6


def test_version_is_exact_in_javascript(database):
    assert Code.objects.using(database).create(code="a").version < 2**53


def test_clone_begins_with_a_version_of_its_own(database):
    article = Article.objects.using(database).create(title="a")
    clone = read(article)
    clone.pk, clone._state.adding = None, True
    clone.save()
    assert clone.version == read(clone).version > article.version


def test_update_that_was_never_read_is_refused(database):
    code = Code.objects.using(database).create(code="a", title="first")
    with pytest.raises(StaleObject):
        Code(code="a", title="second").save(using=database, force_update=True)
    Code(code="a", title="third", version=code.version).save(using=database, force_update=True)
    assert read(code).title == "third"


# the version that is expected


@pytest.mark.parametrize("ahead", [-1, 1])
def test_version_that_is_assigned_is_the_one_that_is_expected(database, ahead):
    article = Article.objects.using(database).create(title="first")
    shown = article.version + ahead
    if ahead == 1:  # as with a late replica: the page was newer than what is read now
        read(article).save()
    article.title, article.version = "second", shown
    for write in (article.save, article.save_with_version, article.delete):
        with pytest.raises(StaleObject) as caught:
            write()
        assert caught.value.expected == shown
    assert read(article).title == "first"


def test_version_that_is_assigned_as_it_was_read_is_right(database):
    article = Article.objects.using(database).create(title="first")
    article.version = int(str(article.version))
    article.save_with_version()
    article.version = article.version
    article.save_with_version()
    assert article.version == read(article).version


def test_reading_again_forgets_what_was_assigned(database):
    article = Article.objects.using(database).create(title="first")
    article.version -= 1
    article.refresh_from_db()
    article.save_with_version()


def test_expected_version_is_compared_first(database):
    article = Article.objects.using(database).create(title="first")
    seen = article.version
    with CaptureQueriesContext(connections[database]) as queries:
        for write in (article.save_with_version, article.delete_with_version):
            with pytest.raises(StaleObject) as caught:
                write(expected=seen - 1)
            assert (caught.value.expected, caught.value.found) == (seen - 1, seen)
    assert not queries
    article.save_with_version(expected=seen)
    article.delete_with_version(expected=seen + 1)
    assert not Article.objects.using(database).exists()


@pytest.mark.parametrize("expected", ["1", 1.0, True])
def test_expected_version_that_is_no_number_is_refused_before_any_i_o(database, expected):
    article = Article.objects.using(database).create()
    with CaptureQueriesContext(connections[database]) as queries:
        for write in (article.save_with_version, article.delete_with_version):
            with pytest.raises(TypeError, match="expected is a number"):
                write(expected=expected)
    assert not queries


FORCED = {Code: {"code": "a"}, Shop: {}, Member: {}, ArticleProxy: {}}


def not_read(row: Any, **values: Any) -> Any:
    """Return an instance of a row that was never read, as of a payload."""
    return type(row)(**{each.attname: getattr(row, each.attname) for each in row._meta.concrete_fields} | values)


@pytest.mark.parametrize("model", FORCED)
def test_forced_update_of_what_was_never_read_is_checked_with_the_version_that_it_names(database, model):
    row = model.objects.using(database).create(**FORCED[model])
    name = "title" if hasattr(row, "title") else "name"
    not_read(row, **{name: "forced"}).save(using=database, force_update=True)
    assert (getattr(read(row), name), read(row).version) == ("forced", row.version + 1)
    for stale in (not_read(row), not_read(row, version=row.version + 5)):
        with pytest.raises(StaleObject) as caught:
            stale.save(using=database, force_update=True)
        assert (caught.value.found, stale._state.adding) == (row.version + 1, True)
    read(row).delete()
    with pytest.raises(StaleObject, match="gone"):
        not_read(row).save(using=database, force_update=True)
    assert not model.objects.using(database).exists()
    assert not Person.objects.using(database).exists()


@pytest.mark.parametrize("model", FORCED)
def test_forced_update_that_is_rolled_back_can_be_made_again(database, model):
    row = model.objects.using(database).create(**FORCED[model])
    again = not_read(row)
    with atomic(database):
        again.save(using=database, force_update=True)
        set_rollback(True, using=database)
    again.save(using=database, force_update=True)
    assert again.version == read(row).version == row.version + 1


@pytest.mark.parametrize("model", FORCED)
def test_expected_version_of_what_was_never_read_is_compared_with_the_version_that_it_names(database, model):
    row = model.objects.using(database).create(**FORCED[model])
    for write in ("save_with_version", "delete_with_version"):
        options: Any = {"using": database} | ({"force_update": True} if write == "save_with_version" else {})
        version = read(row).version
        with pytest.raises(StaleObject) as caught:
            getattr(not_read(row, version=version), write)(expected=version + 1, **options)
        assert (caught.value.expected, caught.value.found) == (version + 1, version)
        getattr(not_read(row, version=version), write)(expected=version, **options)
    assert not model.objects.using(database).exists()


def test_row_that_is_expected_by_an_instance_that_was_not_read_is_refused_before_any_i_o():
    with pytest.raises(StaleObject, match="this instance was not read") as caught:
        Code(code="a", version=3).save_with_version(expected=3)
    assert (caught.value.expected, caught.value.found) == (3, None)


# versions that are read late


def late_by_touching(article: Any) -> None:
    assert article.version


def late_by_refresh(article: Any) -> None:
    article.refresh_from_db(fields=["version"])


def late_by_assigning_what_was_read_late(article: Any) -> None:
    article.version = article.version


def late_by_assigning_to_what_was_read_late(article: Any) -> None:
    article.version = int(article.version)


def late_by_assigning_what_another_instance_has(article: Any) -> None:
    article.version = read(article).version


@pytest.mark.parametrize(
    "touch",
    [
        late_by_touching,
        late_by_refresh,
        late_by_assigning_what_was_read_late,
        late_by_assigning_to_what_was_read_late,
        late_by_assigning_what_another_instance_has,
    ],
)
def test_version_read_later_than_its_row_checks_nothing_and_is_refused(database, touch):
    article = Article.objects.using(database).create(title="a")
    part = Article.objects.using(database).only("title").get()
    other = read(article)
    other.title += " + theirs"
    other.save()
    touch(part)
    assert part.version == other.version
    part.title += " + mine"
    for twin in (part, copy.copy(part), pickle.loads(pickle.dumps(part))):
        writes = (twin.save, twin.save_with_version, twin.delete)
        for write in (*writes, lambda twin=twin: Article.objects.using(database).bulk_update([twin], ["title"])):
            with pytest.raises(ValueError, match="later"):
                write()
        with pytest.raises(ValueError, match="later"):
            etag_of(twin)
    assert read(article).title == "a + theirs"


@needs_peers
def test_version_read_along_with_that_of_another_instance_is_late(database):
    rows = Article.objects.using(database)
    rows.bulk_create([Article(title="a"), Article(title="b")])
    first, second = rows.fetch_mode(models.FETCH_PEERS).only("title").order_by("title")
    other = read(second)
    other.title = "theirs"
    other.save()
    assert first.version
    assert vars(second)["version"] == other.version
    with pytest.raises(ValueError, match="later"):
        second.save()
    assert read(second).title == "theirs"


def test_whole_row_read_again_cures_a_late_version(database):
    Article.objects.using(database).create(title="a")
    part = Article.objects.using(database).only("title").get()
    assert part.version
    part.refresh_from_db()
    part.save_with_version()


class TitlesLater(models.Manager[Any]):
    def get_queryset(self) -> Any:
        return super().get_queryset().defer("title")


def refresh_with_a_queryset_that_defers(article: Any) -> None:
    article.refresh_from_db(from_queryset=Article.objects.using(article._state.db).defer("title"))


def refresh_with_a_queryset_of_some_fields(article: Any) -> None:
    article.refresh_from_db(None, None, Article.objects.using(article._state.db).only("reads", "version"))


def refresh_while_the_base_manager_defers(article: Any) -> None:
    article.refresh_from_db()


def refresh_of_fields_that_the_base_manager_defers(article: Any) -> None:
    article.refresh_from_db(fields=iter(["title", "reads", "edited", "counter_id", "version"]))


@pytest.mark.parametrize(
    "refresh",
    [
        refresh_with_a_queryset_that_defers,
        refresh_with_a_queryset_of_some_fields,
        refresh_while_the_base_manager_defers,
        refresh_of_fields_that_the_base_manager_defers,
    ],
)
def test_refresh_that_leaves_a_field_out_makes_the_version_late(database, monkeypatch, refresh):
    article = Article.objects.using(database).create(title="a")
    other = read(article)
    other.title = "theirs"
    other.save()
    if "base_manager" in refresh.__name__:
        manager = TitlesLater()
        manager.model = Article
        monkeypatch.setattr(Article._meta, "base_manager", manager)
    refresh(article)
    monkeypatch.undo()
    assert (article.title, article.version) == ("a", other.version)
    with pytest.raises(ValueError, match="later"):
        article.save()
    article.refresh_from_db()
    article.save()
    assert read(article).title == "theirs"


def test_refresh_of_all_fields_that_an_instance_has_leaves_no_late_version(database):
    Article.objects.using(database).create(title="a")
    part = Article.objects.using(database).only("title", "version").get()
    read(part).save()
    part.refresh_from_db(from_queryset=Article.objects.using(database).only("title"))
    part.save()


def test_version_read_late_beside_nothing_but_the_key_is_not_late(database):
    Article.objects.using(database).create(title="a")
    part = Article.objects.using(database).only("pk").get()
    assert part.version
    part.title = "b"
    part.save_with_version(update_fields=["title"])


def test_version_assigned_beside_nothing_but_the_key_is_the_one_that_is_expected(database):
    article = Article.objects.using(database).create(title="a")
    part = Article.objects.using(database).only("pk").get()
    part.version, part.title = article.version, "b"
    part.save()
    assert read(article).title == "b"


# bulk_update


@pytest.fixture
def shapes(database: str) -> Iterator[Callable[[str], tuple[Any, Any]]]:
    """Return a function that makes two rows, in the order of their keys, and the manager that writes them."""

    def make(shape: str) -> tuple[Any, Any]:
        if shape == "multi-table":
            return Shop.objects.using(database), [Shop.objects.using(database).create(name=name) for name in "ab"]
        if shape == "version in the child":
            rows = Member.objects.using(database)
            return rows, [rows.create(name=name, grade=1) for name in "ab"]
        team = Team.objects.using(database).create(name="one")
        jobs = [Job.objects.using(database).create(title=name, team=team) for name in "ab"]
        return team.job_set if shape == "related" else Job.active.using(database), jobs

    return make


FIELD = {"multi-table": "name", "version in the child": "name"}


@pytest.mark.parametrize("shape", ["multi-table", "version in the child", "manager that joins", "related"])
def test_bulk_update_loses_no_change_that_is_made_while_it_waits(database, shapes, party: Callable[[], Party], shape):
    if database == "default":
        pytest.skip("SQLite has one writer at a time")
    rows, objs = shapes(shape)
    name = FIELD.get(shape, "title")
    other, mine = party(), party()
    theirs = read(objs[1])
    setattr(theirs, name, "theirs")
    other.begin(database)
    other.now(theirs.save)
    for obj in objs:
        setattr(obj, name, "mine")
    writing = mine.do(rows.bulk_update, objs, [name])
    until_blocked(database)
    other.commit()
    with pytest.raises(StaleObject) as caught:
        writing.result(60)
    assert caught.value.instance is objs[1]
    assert [getattr(read(obj), name) for obj in objs] == ["a", "theirs"]


@pytest.mark.parametrize("shape", ["multi-table", "version in the child", "manager that joins"])
def test_bulk_update_takes_its_rows_in_the_order_of_their_keys(database, shapes, shape):
    if database == "default":
        pytest.skip("SQLite has no row locks")
    rows, objs = shapes(shape)
    with CaptureQueriesContext(connections[database]) as queries:
        assert rows.bulk_update(objs, [FIELD.get(shape, "title")]) == 2
    first = next(query["sql"] for query in queries if "BEGIN" not in query["sql"])
    assert " UPDATE" in first
    assert "ORDER BY" in first
    assert " JOIN " not in first


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("write", ["save", "bulk_update", "bulk_update over a join"])
def test_conflict_locks_no_rows_of_other_tables(database, monkeypatch, party, write):
    monkeypatch.setattr(Article._meta, "ordering", ["counter__name"])
    counter = Counter.objects.using(database).create(name="c")
    article = Article.objects.using(database).create(counter=counter)
    rows = Article.objects.using(database)
    rows.filter(pk=article.pk).update(title="theirs")
    with atomic(database):
        with pytest.raises(StaleObject) as caught:
            if write == "save":
                article.save_with_version()
            else:
                rows.filter(**{"counter__name": "c"} if "join" in write else {}).bulk_update([article], ["title"])
        assert caught.value.found == article.version + 1
        assert party().now(unlocked, Counter, database) == {counter.pk}


@pytest.mark.parametrize("shape", ["multi-table", "version in the child", "manager that joins", "related"])
def test_bulk_update_checks_and_counts_in_every_shape(database, shapes, shape):
    rows, objs = shapes(shape)
    name = FIELD.get(shape, "title")
    before = [obj.version for obj in objs]
    rows.bulk_update(objs, [name], batch_size=1)
    assert [obj.version for obj in objs] == [number + 1 for number in before] == [read(obj).version for obj in objs]
    read(objs[0]).save()
    objs[0].refresh_from_db()
    read(objs[1]).save()
    with atomic(database):
        with pytest.raises(StaleObject) as caught:
            rows.bulk_update(objs, [name])
        assert caught.value.instance is objs[1]
        Counter.objects.using(database).create(name="usable")
    assert read(objs[0]).version == objs[0].version


@pytest.mark.parametrize("size", [-1, 0])
def test_bulk_update_refuses_a_batch_of_no_size(database, size):
    article = Article.objects.using(database).create()
    with pytest.raises(ValueError, match="positive"):
        Article.objects.using(database).bulk_update([article], ["title"], size)


def test_bulk_update_writes_the_same_object_once_and_refuses_two_of_a_row(database):
    rows = Article.objects.using(database)
    article = rows.create()
    assert rows.bulk_update([article, article], ["title"]) == 1
    assert article.version == read(article).version
    with pytest.raises(ValueError, match="twice"):
        rows.bulk_update([article, read(article)], ["title"])


def test_order_set_by_keys_counts_as_an_update_and_by_rows_is_checked(database):
    team = Team.objects.using(database).create()
    first, second = (Track.objects.using(database).create(team=team) for _ in "ab")
    mine = read(first)
    team.set_track_order([second.pk, first.pk], using=database)
    assert list(Track.objects.using(database).values_list("pk", flat=True)) == [second.pk, first.pk]
    assert [read(each).version for each in (first, second)] == [first.version + 1, second.version + 1]
    with pytest.raises(StaleObject):
        mine.save()
    with pytest.raises(StaleObject):
        Track.objects.using(database).bulk_update([mine], ["_order"])
    with pytest.raises(StaleObject):
        Track.objects.using(database).bulk_update([Track(pk=mine.pk, title="b")], ["title", "_order"])


@pytest.mark.parametrize("model", [Shop, Member])
def test_update_of_several_tables_changes_and_counts_or_does_neither(database, model):
    """Django sends one UPDATE for each table, and outside a transaction commits each separately."""
    row = model.objects.using(database).create(**{"name": "a"} | ({"grade": 1} if model is Member else {}))
    other = {"owner": "b"} if model is Shop else {"grade": 2}
    failures = 0

    def fail(execute: Any, sql: str, *rest: Any) -> Any:
        if updates and sql.startswith("UPDATE"):
            raise RuntimeError
        updates.extend([sql] if sql.startswith("UPDATE") else [])
        return execute(sql, *rest)

    for values in ({"name": "b"}, other, {"name": "b", **other}):
        updates: list[str] = []
        with connections[database].execute_wrapper(fail):
            try:
                model.objects.using(database).update(**values)
            except RuntimeError:
                failures += 1
                assert read(row).version == row.version
                assert model.objects.using(database).filter(pk=row.pk, **values).count() == 0
        row.refresh_from_db()
    assert failures == 2  # one of the three changes needs one UPDATE only


# versions that the condition of a queryset compares


def with_a_joined_condition(rows: Any, article: Any) -> Any:
    return rows.filter(pk=article.pk, version=article.version, counter__name="a")


def without_a_joined_condition(rows: Any, article: Any) -> Any:
    return rows.filter(pk=article.pk, version=article.version).exclude(counter__name="b")


def with_exists(rows: Any, article: Any) -> Any:
    counters = Counter.objects.filter(pk=models.OuterRef("counter_id"))
    return rows.filter(models.Exists(counters), pk=article.pk, version=article.version)


def with_a_subquery_that_compares(rows: Any, article: Any) -> Any:
    return rows.filter(pk__in=rows.filter(pk=article.pk, version=article.version))


def with_an_annotation(rows: Any, article: Any) -> Any:
    return rows.annotate(seen=models.F("version")).filter(pk=article.pk, seen=article.version, counter__name="a")


def with_groups(rows: Any, article: Any) -> Any:
    return rows.annotate(n=models.Count("counter__name")).filter(pk=article.pk, version=article.version, n=1)


def with_select_related(rows: Any, article: Any) -> Any:
    return rows.select_related("counter").filter(pk=article.pk, version=article.version)


def with_an_order_by_a_join(rows: Any, article: Any) -> Any:
    return rows.filter(pk=article.pk, version=article.version).order_by("counter__name")


def with_distinct(rows: Any, article: Any) -> Any:
    return rows.filter(pk=article.pk, version=article.version, counter__name="a").distinct()


def with_its_key(rows: Any, row: Any) -> Any:
    return rows.filter(pk=row.pk, version=row.version)


COMPARED: dict[str, tuple[Any, str, str, Callable[[Any, Any], Any]]] = {
    "one table": (Article, "objects", "title", with_its_key),
    "joined condition": (Article, "objects", "title", with_a_joined_condition),
    "joined exclude": (Article, "objects", "title", without_a_joined_condition),
    "Exists": (Article, "objects", "title", with_exists),
    "pk__in=queryset": (Article, "objects", "title", with_a_subquery_that_compares),
    "annotation": (Article, "objects", "title", with_an_annotation),
    "groups": (Article, "objects", "title", with_groups),
    "select_related": (Article, "objects", "title", with_select_related),
    "order by a join": (Article, "objects", "title", with_an_order_by_a_join),
    "distinct": (Article, "objects", "title", with_distinct),
    "manager that joins": (Job, "active", "title", with_its_key),
    "multi-table": (Shop, "objects", "owner", with_its_key),
    "multi-table, field of the parent": (Shop, "objects", "name", with_its_key),
    "multi-table, subquery": (Shop, "objects", "owner", with_a_subquery_that_compares),
    "version in the child": (Member, "objects", "grade", with_its_key),
    "version in the child, field of the parent": (Member, "objects", "name", with_its_key),
}


LEVELS = [("postgresql", "read committed"), ("mariadb", "read committed"), ("mariadb", "repeatable read")]

Race = Callable[[str, Callable[[Any], Any]], tuple[str, Any]]


@pytest.fixture(params=LEVELS, ids=" ".join)
def race(request: pytest.FixtureRequest, isolated: Any, party: Callable[[], Party]) -> Race:
    """Return a function that compares a version while another transaction has written the row, and then commits.

    It returns the row's value and what the write returned.
    """
    database, level = request.param
    alias = isolated(database, level)

    def race(shape: str, write: Callable[[Any], Any]) -> tuple[str, Any]:
        model, manager, name, compare = COMPARED[shape]
        row = model.objects.using(database).create(**parents(model, database))
        other, mine = party(), party()
        mine.begin(alias)
        mine.now(Counter.objects.using(alias).count)  # Its snapshot, if it keeps one, is older than the other's write.
        other.begin(database)
        other.now(lambda: model.objects.using(database).update(**{name: 1}))
        writing = mine.do(lambda: write(compare(getattr(model, manager).using(alias), row)))
        until_blocked(database)
        other.commit()
        written = writing.result(60)
        mine.commit()
        return str(model.objects.using(database).values_list(name, flat=True).first()), written

    return race


def parents(model: Any, alias: str) -> dict[str, Any]:
    if model is Article:
        return {"counter": Counter.objects.using(alias).get_or_create(name="a")[0]}
    return {"team": Team.objects.using(alias).create()} if model is Job else {}


@pytest.mark.parametrize("shape", COMPARED)
def test_update_that_compares_a_version_writes_no_row_that_moves_on_while_it_waits(race, shape):
    assert race(shape, lambda rows: rows.update(**{COMPARED[shape][2]: 2})) == ("1", 0)


@pytest.mark.parametrize("shape", COMPARED)
def test_delete_that_compares_a_version_deletes_no_row_that_moves_on_while_it_waits(race, shape):
    assert race(shape, lambda rows: rows.delete()[0]) == ("1", 0)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_condition_over_a_join_that_many_rows_match_takes_no_more_parameters_on_postgresql(database):
    """PostgreSQL takes 65,535 of them if they are bound by the server."""
    team = Team.objects.using(database).create()
    parameters: list[list[int]] = []

    def counted(execute: Any, sql: str, params: Any, *how: Any) -> Any:
        parameters[-1].append(len(params or ()))
        return execute(sql, params, *how)

    for number in (2, 30):
        jobs = Job.objects.using(database).bulk_create([Job(team=team) for _ in range(number)])
        parameters.append([])
        with connections[database].execute_wrapper(counted):
            assert Job.active.using(database).filter(version__gt=0).update(title="new") == number
            assert Job.active.using(database).filter(version__gt=0).delete()[0] == number
        assert not Job.objects.using(database).filter(pk__in=[job.pk for job in jobs])
    assert parameters[0] == parameters[1]


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("lock", ["select_for_update", "select_for_share"])
def test_lock_clause_of_a_queryset_that_compares_a_version_is_dropped_as_by_django(database, lock):
    shop = Shop.objects.using(database).create()
    locked = getattr(Shop.objects.using(database), lock)(of=("self",))
    assert locked.filter(pk=shop.pk, version=shop.version).update(owner="a") == 1
    assert locked.filter(pk=shop.pk, version=shop.version + 1).delete()[0]


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_keys_of_any_text_are_locked(database):
    keys = ["", "a,b", '{"', "NULL", "%s", "'", "\\", "ü"]
    codes = Code.objects.using(database).bulk_create([Code(code=key) for key in keys])
    with atomic(database):
        locked = lock_versions([*keys, "other"], Code._dlock_version, database)
    assert locked == {code.code: code.version for code in codes}


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    ("model", "definition"),
    [
        (Article, "bigserial"),
        (Article, "BIGINT GENERATED BY DEFAULT AS IDENTITY"),
        (Code, 'varchar(10) COLLATE "C"'),
        (Code, "varchar(10) COLLATE ucs_basic"),
    ],
)
def test_rows_are_locked_by_keys_whose_columns_are_defined_by_more_than_a_type(
    database, monkeypatch, model, definition
):
    rows = [model.objects.using(database).create(pk=key) for key in (1, 2)]
    for name in ("db_type", "rel_db_type"):
        monkeypatch.setattr(model._meta.pk, name, lambda _: definition)
    with atomic(database):
        assert len(lock_versions([row.pk for row in rows], model._dlock_version, database)) == 2


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    ("field", "keys"),
    [(lambda **how: ArrayField(models.IntegerField(), **how), ([1, 2], [3])), (models.JSONField, ({"a": [1]}, [2]))],
    ids=["arrays", "JSON"],
)
@isolate_apps("tests.testapp")
def test_rows_whose_keys_are_not_hashable_are_compared_like_others(database, field, keys):
    class Odd(VersionedMixin):
        key = field(primary_key=True)
        title = models.CharField(max_length=9)
        counter = models.ForeignKey(Counter, models.CASCADE, related_name="+")

        class Meta:
            app_label = "testapp"

    with connections[database].schema_editor() as editor:
        editor.create_model(Odd)
    try:
        counter = Counter.objects.using(database).create(name="c")
        odd, other = (Odd.objects.using(database).create(key=key, counter=counter) for key in keys)
        joined = Odd.objects.using(database).filter(counter__name="c")
        assert joined.filter(version=odd.version, key=keys[0]).update(title="new") == 1
        assert joined.filter(version=odd.version, key=keys[0]).update(title="mine") == 0
        for rows in (joined, Odd.objects.using(database)):
            with pytest.raises(StaleObject) as caught:
                rows.bulk_update([other, odd], ["title"])
            assert (caught.value.instance, caught.value.found) == (odd, odd.version + 1)
        with pytest.raises(StaleObject):
            odd.save()
        odd.refresh_from_db()
        odd.title = "newest"
        assert joined.bulk_update([other, odd], ["title"]) == 2
        assert read(odd).title == "newest"
        with atomic(database):
            assert lock_versions(keys, Odd._dlock_version, database)
    finally:
        with connections[database].schema_editor() as editor:
            editor.delete_model(Odd)


class MovesOn:
    """An execute wrapper of a SQLite connection: another session writes a row after its first SELECT, if it can."""

    def __init__(self, row: Any) -> None:
        self.row, self.has_moved = row, False

    def __call__(self, execute: Any, sql: str, *how: Any) -> Any:
        result = execute(sql, *how)
        if sql.startswith("SELECT") and not self.has_moved:
            table = self.row._dlock_version.model._meta
            write = f"UPDATE {table.db_table} SET version = version + 1 WHERE {table.pk.column} = %s"
            with second_session(self.row._state.db) as other, suppress(OperationalError):
                fetched(other, "PRAGMA busy_timeout = 0")
                fetched(other, write, self.row.pk)
                self.has_moved = True
        return result


@pytest.mark.parametrize("database", ["default"], indirect=True)
@pytest.mark.parametrize("mode", [None, "IMMEDIATE"])
@pytest.mark.parametrize("shape", COMPARED)
def test_sqlite_outside_a_transaction_writes_no_row_that_moves_on_after_django_has_read_it(
    database, monkeypatch, mode, shape
):
    connections[database].ensure_connection()
    monkeypatch.setattr(connections[database], "transaction_mode", mode)
    model, manager, name, compare = COMPARED[shape]
    for write in (lambda rows: rows.update(**{name: 2}), lambda rows: rows.delete()):
        row = model.objects.using(database).create(**parents(model, database))
        moves_on = MovesOn(row)
        # A DEFERRED transaction that has read the row cannot write once the row has moved on: "database is locked".
        with connections[database].execute_wrapper(moves_on), suppress(OperationalError):
            write(compare(getattr(model, manager).using(database), row))
        if moves_on.has_moved:
            assert read(row).version == row.version + 1


@pytest.mark.parametrize("race", LEVELS[:2], ids=" ".join, indirect=True)
def test_update_that_compares_a_version_writes_a_row_that_moves_on_and_still_matches(race):
    def at_any_version(rows: Any) -> Any:
        return Article.objects.using(rows.db).filter(counter__name="a", version__gt=0)

    assert race("joined condition", lambda rows: at_any_version(rows).update(title=2)) == ("2", 1)


@pytest.mark.parametrize("shape", COMPARED)
def test_version_that_did_not_move_on_is_compared_and_counted_in_every_shape(database, shape):
    if MYSQLD and database == "mariadb" and shape == "pk__in=queryset":
        pytest.skip("MySQL reads no table in a subquery that the statement writes")
    model, manager, name, compare = COMPARED[shape]
    row, _ = (model.objects.using(database).create(**parents(model, database)) for _ in "ab")
    rows = compare(getattr(model, manager).using(database), row)
    assert len(rows) == 1
    assert rows.update(**{name: 2}) == 1
    assert len(rows) == 0
    assert (str(getattr(read(row), name)), read(row).version) == ("2", row.version + 1)
    assert rows.update(**{name: 3}) == 0
    assert rows.delete()[0] == 0
    compare(getattr(model, manager).using(database), read(row)).delete()
    assert model.objects.using(database).count() == 1


def data_statements(queries: Any) -> list[str]:
    return [each["sql"] for each in queries if each["sql"].split()[0] in ("SELECT", "UPDATE", "DELETE")]


def test_save_and_delete_with_a_base_manager_that_joins_are_refused_before_any_i_o(database, monkeypatch):
    """They are guarded by the version, which would not be compared again after a wait for the row."""
    job = Job.objects.using(database).create(**parents(Job, database))
    manager = ActiveJobs()
    manager.model = Job
    monkeypatch.setattr(Job._meta, "base_manager", manager)
    with CaptureQueriesContext(connections[database]) as queries:
        for write in (job.save, job.save_with_version, job.delete):
            with pytest.raises(NotSupported, match="base manager of Job joins"):
                write()
    assert not data_statements(queries)


@pytest.mark.parametrize("shape", ["one table", "Exists", "select_related", "order by a join"])
def test_comparison_in_one_table_is_one_statement(database, shape):
    model, manager, name, compare = COMPARED[shape]
    row = model.objects.using(database).create(**parents(model, database))
    for write in (lambda rows: rows.update(**{name: 2}), lambda rows: rows.delete()):
        rows = compare(getattr(model, manager).using(database), read(row))
        with CaptureQueriesContext(connections[database]) as queries:
            write(rows)
        assert len(data_statements(queries)) == 1


def test_update_and_delete_that_django_refuses_are_refused_before_any_i_o(database):
    rows = Shop.objects.using(database).filter(version=3)
    with CaptureQueriesContext(connections[database]) as queries:
        for refused in (rows[:2], rows.union(rows)):
            for write in (refused.update, refused.delete):
                with pytest.raises((TypeError, NotSupportedError)):
                    write()
    assert not data_statements(queries)


# other databases


class ReadsElsewhere:
    """The router of Django's documentation: reads from a replica, writes to the primary."""

    primary = replica = ""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return self.replica

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return self.primary

    def allow_relation(self, *_: Any, **__: Any) -> bool:
        return True


@pytest.fixture
def replica(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An alias that reads are sent to; it shows what the primary has, like a replica that is not late."""
    alias = f"replica of {database}"
    monkeypatch.setitem(connections.settings, alias, connections.settings[database])
    monkeypatch.setattr(ReadsElsewhere, "primary", database)
    monkeypatch.setattr(ReadsElsewhere, "replica", alias)
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.ReadsElsewhere"]):
        yield alias
    connections[alias].close()
    del connections[alias]


@pytest.mark.parametrize("model", [Article, Shop, Member, Job])
def test_conflict_of_what_a_replica_gave_is_a_conflict(replica, database, model):
    row = model.objects.create()
    seen = model.objects.get()
    assert seen._state.db == replica
    row.save()
    writes = (seen.save_with_version, seen.delete)
    with atomic(database):
        for write in writes:
            with pytest.raises(StaleObject) as caught:
                write()
            assert caught.value.found == row.version
        assert model.objects.using(database).count() == 1
    with pytest.raises(StaleObject):
        seen.save()


@pytest.mark.parametrize("model", [Article, Shop, Member, Job])
def test_row_that_a_replica_still_gave_is_never_made_anew(replica, database, model):
    row = model.objects.create()
    seen = model.objects.get()
    row.delete()
    for write in (seen.save, seen.save_with_version, seen.delete):
        with pytest.raises(StaleObject, match="gone"):
            write()
    assert not model.objects.using(database).exists()
    assert not Person.objects.using(database).exists()
    assert not Place.objects.using(database).exists()


def test_what_a_replica_gave_is_saved_where_writes_go(replica, database):
    Article.objects.create(title="a")
    seen = Article.objects.get()
    seen.title = "b"
    seen.save_with_version()
    assert (seen._state.db, read(seen).title) == (database, "b")


def test_fields_that_were_deferred_are_not_read_from_a_replica_to_be_written(replica, database):
    Article.objects.create(title="a", reads=5)
    seen = Article.objects.only("title", "version").get()
    with CaptureQueriesContext(connections[replica]) as reads, CaptureQueriesContext(connections[database]) as writes:
        seen.save()
    assert not reads
    assert [query["sql"].split()[0] for query in writes] == ["UPDATE"]
    assert "reads" not in writes[0]["sql"]


def test_row_of_a_replica_is_locked_where_writes_go(replica, database):
    Account.objects.create(balance=1)
    seen = Account.objects.get()
    with atomic(database):
        seen.lock_row()
        assert seen._state.db == database


def test_copy_into_another_database_is_made_there(replica, database, use_database):
    use_database("other")
    Article.objects.create(title="a")
    copied = Article.objects.get()
    copied.save(using="other")
    assert Article.objects.using("other").get().title == "a"
    with pytest.raises(IntegrityError):
        Article.objects.get().save(using="other")


def test_copy_that_is_rolled_back_leaves_the_row_that_was_read(database, use_database):
    use_database("other")
    Article.objects.using(database).create(title="a")
    article = Article.objects.using(database).get()
    with pytest.raises(RuntimeError), atomic("other"):
        article.save(using="other")
        raise RuntimeError
    assert (article._state.adding, article._state.db) == (False, database)
    article.title = "b"
    article.save()
    assert read(article).title == "b"


def test_row_of_two_tables_that_is_gone_is_not_made_anew(database):
    member = Member.objects.using(database).create(name="a", grade=1)
    read(member).delete()
    for write in (member.save, member.save_with_version):
        with pytest.raises(StaleObject, match="gone"):
            write()
    assert not Person.objects.using(database).exists()


# rollbacks, signals


def test_handler_that_saves_what_is_being_deleted_is_not_in_conflict_with_it(database):
    article = Article.objects.using(database).create()

    def save(instance: Any, **_: object) -> None:
        instance.save()

    pre_delete.connect(save, Article)
    try:
        article.delete()
    finally:
        pre_delete.disconnect(save, Article)
    assert not Article.objects.using(database).exists()


def test_delete_that_is_rolled_back_leaves_the_version_of_the_row(database):
    article = Article.objects.using(database).create()
    key = article.pk
    with pytest.raises(RuntimeError), atomic(database):
        article.delete()
        raise RuntimeError
    article.pk = key
    article.save_with_version()


@pytest.mark.parametrize("model", [Article, Account])
def test_saves_of_a_long_transaction_keep_nothing_alive(use_database, model):
    use_database("default")

    def save(times: int) -> None:
        for _ in range(times):
            model().save()

    def growth() -> int:
        collect_garbage()
        tracemalloc.start()
        save(1000)
        collect_garbage()
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return grown

    with atomic():
        save(50)
        grown = min(growth() for _ in range(3))  # Other threads of this process may allocate memory, too.
    assert grown / 1000 < 100, f"{grown / 1000:.0f} bytes a save"


def test_instances_that_live_get_their_versions_back_in_any_nesting(database):
    articles = [Article.objects.using(database).create() for _ in range(3)]
    before = [article.version for article in articles]
    with pytest.raises(RuntimeError), atomic(database):
        articles[0].save()
        with pytest.raises(RuntimeError), atomic(database):
            articles[0].save()
            articles[1].save()
            with atomic(database):
                articles[1].save()
                articles[2].save()
            raise RuntimeError
        assert [article.version for article in articles] == [before[0] + 1, *before[1:]]
        articles[2].save()
        raise RuntimeError
    assert [article.version for article in articles] == before
    for article in articles:
        article.save()
