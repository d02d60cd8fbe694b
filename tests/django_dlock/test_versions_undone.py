"""The version in memory is never that of work that was not committed, however the transaction has ended."""

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError, IntegrityError, OperationalError, connections, models, transaction
from django.db.transaction import atomic
from django.http import HttpResponse
from django.test import RequestFactory
from django.test.utils import isolate_apps

from django_dlock.errors import StaleObject
from django_dlock.preconditions import conditional, etag_of
from django_dlock.versions import VersionedMixin, VersionedQuerySet
from dlock_core.transactions.tie import Outcome
from tests.django_dlock.sessions import kill_session
from tests.django_dlock.tracking import on_end
from tests.interrupts import OURS, SoftLimit, each_line
from tests.mysql_server import mariadb_only
from tests.testapp.models import Article, Code, Counter, Job, Place, Shop

pytestmark = pytest.mark.usefixtures("versions_from_1")

DJANGOS = ("django/db/transaction.py", "django/db/backends/base/base.py")


class Sorry(Exception):
    """Raised by user code."""


def save(article: Article) -> None:
    article.title = "mine"
    article.save()


def save_with_version(article: Article) -> None:
    article.title = "mine"
    article.save_with_version()


def bulk_update(article: Article) -> None:
    article.title = "mine"
    Article.objects.bulk_update([article], ["title"])


def delete(article: Article) -> None:
    article.delete()


def in_a_transaction(write: Callable[[Any], object], row: Any, using: str = "default") -> None:
    with suppress(Sorry), atomic(using):
        write(row)
        raise Sorry


def in_a_savepoint(write: Callable[[Any], object], row: Any, using: str = "default") -> None:
    with atomic(using), suppress(Sorry), atomic(using):
        write(row)
        raise Sorry


def in_a_released_savepoint(write: Callable[[Any], object], row: Any, using: str = "default") -> None:
    with suppress(Sorry), atomic(using):
        with atomic(using):
            write(row)
        raise Sorry


def committed(write: Callable[[Article], None], article: Article) -> None:
    with atomic():
        write(article)


def in_a_savepoint_by_hand(write: Callable[[Article], None], article: Article) -> None:
    with atomic(), connections["default"].cursor() as cursor:
        cursor.execute("SAVEPOINT by_hand")
        write(article)
        with suppress(SoftLimit):
            cursor.execute("ROLLBACK TO SAVEPOINT by_hand")


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("database", ["default"], indirect=True)
@pytest.mark.parametrize(
    ("around", "write"),
    [
        *((in_a_transaction, each) for each in (save, save_with_version, bulk_update, delete)),
        *((each, save) for each in (in_a_savepoint, in_a_released_savepoint, in_a_savepoint_by_hand, committed)),
    ],
)
@pytest.mark.usefixtures("quiet")
def test_version_in_memory_is_not_ahead_of_the_row_after_an_interrupt_at_any_line(database, around, write):
    tried: list[Article] = []

    def work() -> None:
        around(write, tried[-1])

    def new() -> None:
        tried.append(Article.objects.create(title="old"))

    new()
    lines = 0
    for line, _, _ in each_line(work, (*OURS, *DJANGOS)):
        lines += 1
        article = tried[-1]
        connections["default"].close()
        del connections["default"]  # The interrupt may have come in a block that Django has not left.
        row = Article.objects.filter(pk=article.pk).first()
        assert row is None or article.version <= row.version, line
        new()
    assert lines > 50


@pytest.mark.parametrize("is_committed", [True, False])
def test_version_that_sqlite_has_committed_with_a_savepoint_stays_after_the_rollback(use_database, is_committed):
    """Without autocommit, the RELEASE of a savepoint that comes first is a COMMIT."""
    use_database("default")
    article = Article.objects.create(title="old")
    transaction.set_autocommit(False)
    try:
        with suppress(Sorry), atomic():
            save(article)
            if not is_committed:
                raise Sorry
        transaction.rollback()
    finally:
        transaction.set_autocommit(True)
    assert article.version == Article.objects.get().version == (2 if is_committed else 1)


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("write", [save, delete])
def test_version_in_memory_is_the_former_one_if_the_answer_to_commit_is_missing(database, write):
    article = Article.objects.using(database).create(title="old")
    with pytest.raises(OperationalError), atomic(database):
        on_end(lambda _: None, using=database, before_commit=lambda: kill_session(database))
        write(article)
    row = Article.objects.using(database).get()
    assert (row.title, row.version, article.version) == ("old", 1, 1)


REFUSE_COMMIT = """
CREATE FUNCTION refuse_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE integrity_constraint_violation; END $$;
CREATE CONSTRAINT TRIGGER refuse_commit AFTER INSERT ON testapp_counter DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION refuse_commit();
"""


@pytest.fixture
def refuses_commit(database) -> Iterator[None]:
    """Let PostgreSQL refuse the COMMIT of what has inserted a counter."""
    with connections[database].cursor() as cursor:
        cursor.execute(REFUSE_COMMIT)
    yield
    with connections[database].cursor() as cursor:
        cursor.execute("DROP FUNCTION refuse_commit() CASCADE")


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.usefixtures("refuses_commit")
def test_commit_by_hand_that_is_refused_is_the_end_of_its_transaction(database):
    """`atomic()` rolls back then, `commit()` does not; but the database has begun nothing new."""
    article, heard = Article.objects.using(database).create(title="old"), list[object]()
    transaction.set_autocommit(False, using=database)
    try:
        on_end(heard.append, using=database)
        article.save()
        Counter.objects.using(database).create(name="refused")
        with pytest.raises(IntegrityError):
            transaction.commit(using=database)
        assert (heard, article.version) == ([Outcome.ROLLED_BACK], 1)
        article.title = "again"
        article.save()
        transaction.commit(using=database)
    finally:
        transaction.set_autocommit(True, using=database)
    assert Article.objects.using(database).get().version == article.version == 2


@pytest.mark.parametrize(
    ("database", "sql"),
    [
        *[(alias, "ROLLBACK") for alias in ("default", "postgresql", "mariadb")],
        ("postgresql", "/* all of it */ ABORT"),
        pytest.param("mariadb", "SET STATEMENT max_statement_time=10 FOR ROLLBACK", marks=mariadb_only),
    ],
    indirect=["database"],
)
def test_version_in_memory_is_the_rows_after_a_rollback_by_a_statement(database, sql):
    article = Article.objects.using(database).create(title="old")
    transaction.set_autocommit(False, using=database)
    try:
        article.save()
        with connections[database].cursor() as cursor:
            cursor.execute(sql)
        transaction.commit(using=database)
    finally:
        connections[database].close()
    assert article.version == Article.objects.using(database).get().version == 1


@mariadb_only
@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
@pytest.mark.parametrize(
    "sql", ["EXECUTE IMMEDIATE 'SELECT 1'", "SET STATEMENT max_statement_time=9 FOR SELECT 1", "FLUSH STATUS"]
)
def test_version_in_memory_is_the_rows_after_a_statement_that_might_have_rolled_back(database, sql):
    article = Article.objects.using(database).create(title="old")
    with atomic(database):
        article.save()
        with connections[database].cursor() as cursor:
            cursor.execute(sql)
            cursor.fetchall()
        article.save()
    assert article.version == Article.objects.using(database).get().version == 3


def interrupted(*_: object) -> None:
    """Stands for a signal handler that raises before a statement is sent."""
    raise SoftLimit


def ask_for_savepoint_in_vain(database: str) -> None:
    with suppress(SoftLimit), connections[database].execute_wrapper(interrupted), connections[database].cursor() as own:
        own.execute("SAVEPOINT reused")


def make_no_savepoint(database: str) -> None:
    with suppress(DatabaseError), connections[database].cursor() as cursor:  # SQLite refuses it.
        cursor.executemany("SAVEPOINT reused", [])


def release_two_savepoints(database: str) -> None:
    with connections[database].cursor() as cursor:
        cursor.execute("SAVEPOINT reused")
        cursor.execute("SAVEPOINT reused")
        with suppress(DatabaseError):
            cursor.executemany("RELEASE SAVEPOINT reused", [(), ()])


@pytest.mark.parametrize("unclear", [ask_for_savepoint_in_vain, make_no_savepoint, release_two_savepoints])
def test_rollback_to_a_savepoint_whose_name_is_used_again_restores_what_the_database_does(database, unclear):
    article = Article.objects.using(database).create(title="old")
    with atomic(database), connections[database].cursor() as cursor:
        cursor.execute("SAVEPOINT reused")
        article.save()
        unclear(database)
        with suppress(DatabaseError):  # MariaDB has one savepoint of a name, and may have none now.
            cursor.execute("ROLLBACK TO SAVEPOINT reused")
    assert article.version <= Article.objects.using(database).get().version


def test_refused_rollback_to_a_savepoint_restores_nothing_that_the_database_keeps(database):
    article = Article.objects.using(database).create(title="old")
    with atomic(database):
        article.save()
        with suppress(DatabaseError):
            transaction.savepoint_rollback("never_made", using=database)
    assert article.version == Article.objects.using(database).get().version
    article.save()


def test_row_whose_bulk_create_was_rolled_back_is_inserted_by_the_next_save(database):
    code = Code(code="a")
    with suppress(Sorry), atomic(database):
        Code.objects.using(database).bulk_create([code])
        raise Sorry
    code.save(using=database)
    assert Code.objects.using(database).exists()


def test_clone_and_deleted_row_whose_key_has_a_default_are_inserted(database):
    job = Job.objects.using(database).create()
    job.delete()
    job.save(using=database)
    job.pk = None
    job.save(using=database)
    assert Job.objects.using(database).count() == 2


def test_parent_link_of_an_instance_to_which_a_version_was_assigned_is_compared(database):
    shop = Shop.objects.using(database).create(name="old")
    Place.objects.using(database).update(name="theirs")
    shop.version = Place.objects.using(database).get().version
    with pytest.raises(StaleObject):
        shop.place_ptr.save()
    assert Place.objects.using(database).get().name == "theirs"


def test_block_of_a_model_s_own_save_is_rolled_back_by_a_conflict_that_leaves_the_transaction_usable(
    database, monkeypatch
):
    def audited(self, **options):
        with atomic(options["using"], savepoint=False):
            Counter.objects.using(options["using"]).create(name="audit")
            VersionedMixin.save(self, **options)

    article = Article.objects.using(database).create(title="old")
    Article.objects.using(database).update(title="theirs")
    monkeypatch.setattr(Article, "save", audited)
    with atomic(database), suppress(StaleObject):
        article.save_with_version(using=database)
    assert not Counter.objects.using(database).exists()


@pytest.mark.parametrize("end", [transaction.savepoint_commit, transaction.savepoint_rollback])
@pytest.mark.parametrize("database", ["default"], indirect=True)
def test_end_of_a_savepoint_that_django_has_not_made_ends_no_transaction(database, end):
    """As on SQLite with autocommit off."""
    heard: list[object] = []
    transaction.set_autocommit(False, using=database)
    try:
        on_end(heard.append, using=database)
        article = Article.objects.using(database).create(title="old")
        article.save()
        end(connections[database].savepoint(), using=database)
        assert (heard, article.version) == ([], 2)
        transaction.commit(using=database)
    finally:
        transaction.rollback(using=database)
        transaction.set_autocommit(True, using=database)
    assert len(heard) == 1


def test_instance_of_an_assigned_version_that_was_created_in_bulk_can_be_saved(database):
    article = Article.objects.using(database).create(title="old")
    article.save()
    article.version = 7
    new = Article(title="new", version=article.version)
    Article.objects.using(database).bulk_create([new])
    new.save(using=database)
    assert new.version == Article.objects.using(database).get(pk=new.pk).version


@pytest.fixture
def without_autocommit(database) -> Iterator[None]:
    connections[database].set_autocommit(False)
    yield
    transaction.rollback(using=database)
    transaction.set_autocommit(True, using=database)


def rows_of(shop: Shop) -> VersionedQuerySet[Shop]:
    return Shop.objects.using(shop._state.db).filter(pk=shop.pk)


WRITES: list[Callable[[Shop], object]] = [
    lambda shop: shop.save(),
    lambda shop: shop.save_with_version(),
    lambda shop: shop.delete(),
    lambda shop: shop.delete_with_version(),
    lambda shop: rows_of(shop).bulk_update([shop], ["name"]),
    lambda shop: rows_of(shop).update(name="mine", owner="mine"),
    lambda shop: rows_of(shop).filter(version=shop.version).delete(),
]
NAMES = ["save", "save_with_version", "delete", "delete_with_version", "bulk_update", "update", "delete of rows"]


@pytest.mark.parametrize("write", WRITES, ids=NAMES)
def test_write_without_autocommit_is_undone_by_a_rollback_of_the_caller(database, request, write):
    shop = Shop.objects.using(database).create(name="old")
    request.getfixturevalue("without_autocommit")
    shop.name = "mine"
    write(shop)
    transaction.rollback(using=database)
    row = Shop.objects.using(database).get()
    assert (row.name, row.version, shop.version) == ("old", 1, 1)


@pytest.mark.parametrize("write", WRITES[1:5], ids=NAMES[1:5])
def test_refused_write_without_autocommit_leaves_the_transaction_to_the_caller(database, request, write):
    shop = Shop.objects.using(database).create(name="old")
    Shop.objects.using(database).update(name="theirs")
    request.getfixturevalue("without_autocommit")
    with pytest.raises(StaleObject):
        write(shop)
    Counter.objects.using(database).create(name="lost")
    transaction.rollback(using=database)
    Counter.objects.using(database).create(name="kept")
    transaction.commit(using=database)
    assert [each.name for each in Counter.objects.using(database).all()] == ["kept"]


def test_work_of_a_conditional_view_without_autocommit_is_undone_by_a_rollback_of_the_caller(database, request):
    article = Article.objects.using(database).create(title="old")
    request.getfixturevalue("without_autocommit")

    @conditional(Article, using=database)
    def view(_, pk):
        Article.objects.using(database).filter(pk=pk).update(title="mine")
        return HttpResponse("changed")

    answer = view(RequestFactory().put("/", headers={"If-Match": etag_of(article)}), pk=article.pk)
    transaction.rollback(using=database)
    assert (answer.content, Article.objects.using(database).get().title) == (b"changed", "old")


def bulk_create(rows: VersionedQuerySet[Article], *objs: Article) -> None:
    rows.bulk_create(objs)


def abulk_create(rows: VersionedQuerySet[Article], *objs: Article) -> None:
    async_to_sync(rows.abulk_create)(objs)


def bulk_create_of_an_iterator(rows: VersionedQuerySet[Article], *objs: Article) -> None:
    rows.bulk_create(iter(objs))


@pytest.mark.parametrize("create", [bulk_create, abulk_create, bulk_create_of_an_iterator])
def test_rows_of_a_bulk_create_that_has_failed_can_be_inserted_by_the_next_save(database, create):
    new, clone = Article(pk=900_000), Article.objects.using(database).create()
    clone.pk = None
    with pytest.raises(IntegrityError):  # Rows with a key are inserted first; the title of another one is NULL.
        create(Article.objects.using(database), new, clone, Article(title=None))
    for each in (new, clone):
        each.save(using=database)
        each.save(using=database)
    assert Article.objects.using(database).count() == 3


def test_row_that_a_bulk_create_could_not_insert_again_is_saved_with_the_version_that_was_read(database):
    article, code = Article.objects.using(database).create(title="old"), Code(code="a")
    code.save(using=database)
    for each in (article, code):
        each.save()
        with pytest.raises(IntegrityError):
            type(each).objects.using(database).bulk_create([each])
        each.title = "new"
        each.save()
        assert type(each).objects.using(database).get().title == "new"


def test_clone_whose_key_has_a_default_is_inserted_after_a_bulk_create_that_has_failed(database):
    clone = Job.objects.using(database).create()
    clone.pk = None
    with pytest.raises(IntegrityError):
        Job.objects.using(database).bulk_create([clone, Job(title=None)], batch_size=1)
    clone.save()
    assert Job.objects.using(database).count() == 2


class OfTests:
    app_label = "testapp"


@pytest.mark.parametrize(
    ("name", "values", "keys"),
    [
        ("Tool", {}, ["thing_ptr_id", "id"]),
        ("Saw", {}, ["tool_ptr_id", "thing_ptr_id", "id"]),
        ("Part", {"tool": 1}, ["number"]),
    ],
)
@isolate_apps("tests.testapp")
def test_clone_is_inserted_if_the_key_of_a_parent_or_a_part_of_the_key_has_a_default(database, name, values, keys):
    class Thing(VersionedMixin):
        Meta = OfTests
        id = models.UUIDField(primary_key=True, default=uuid.uuid4)

    class Tool(Thing):
        Meta = OfTests
        title = models.CharField(max_length=9, default="")

    class Saw(Tool):
        Meta = OfTests
        teeth = models.IntegerField(default=0)

    class Part(VersionedMixin):
        Meta = OfTests
        pk = models.CompositePrimaryKey("tool", "number")
        tool = models.IntegerField()
        number = models.UUIDField(default=uuid.uuid4)

    kinds = [Thing, Tool, Saw, Part]
    rows = next(kind for kind in kinds if kind.__name__ == name).objects.using(database)
    with connections[database].schema_editor() as editor:
        for kind in kinds:
            editor.create_model(kind)
    try:
        row, clone = rows.create(**values), rows.get()
        for key in keys:
            setattr(clone, key, None)
        for _ in range(2):
            clone.save()
        assert rows.count() == 2
        rows.get(pk=row.pk).delete()
        with pytest.raises(StaleObject):  # Its key is set, so it is that of a row that was read.
            row.save()
    finally:
        with connections[database].schema_editor() as editor:
            for kind in reversed(kinds):
                editor.delete_model(kind)


@pytest.mark.parametrize("database", ["default", "postgresql"], indirect=True)
@isolate_apps("tests.testapp")
def test_clone_is_inserted_whose_key_is_made_up_by_the_database(database):
    class Item(VersionedMixin):
        Meta = OfTests
        id = models.IntegerField(primary_key=True, db_default=7)

    with connections[database].schema_editor() as editor:
        editor.create_model(Item)
    try:
        clone = Item.objects.using(database).create(pk=1)
        clone.pk = None
        clone.save()
        assert Item.objects.using(database).count() == 2
    finally:
        with connections[database].schema_editor() as editor:
            editor.delete_model(Item)


@pytest.mark.parametrize("around", [in_a_transaction, in_a_savepoint, in_a_released_savepoint])
@pytest.mark.parametrize("write", [WRITES[0], WRITES[1], WRITES[4]], ids=[NAMES[0], NAMES[1], NAMES[4]])
def test_parent_that_was_made_of_a_child_in_a_transaction_that_was_rolled_back_overwrites_nothing(
    database, around, write
):
    def write_and_touch(shop):
        shop.name = "mine"
        write(shop)
        assert shop.place_ptr.version == 2

    shop = Shop.objects.using(database).create(name="old")
    around(write_and_touch, shop, database)
    Place.objects.using(database).update(name="theirs")
    with pytest.raises(StaleObject):
        shop.place_ptr.save()
    assert Place.objects.using(database).get().name == "theirs"


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_parent_that_was_made_of_a_child_is_made_anew_if_the_answer_to_commit_is_missing(database):
    shop = Shop.objects.using(database).create(name="old")
    with pytest.raises(OperationalError), atomic(database):
        on_end(lambda _: None, using=database, before_commit=lambda: kill_session(database))
        shop.save()
        assert shop.place_ptr.version == 2
    assert shop.place_ptr.version == 1
