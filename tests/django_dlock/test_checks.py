"""Each mistake raises the id of its system check, and a project without mistakes gets no messages."""

from __future__ import annotations

import importlib.util

import pytest
from django.contrib import admin
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import connection, connections, models
from django.db.utils import ConnectionHandler
from django.test import override_settings
from django.test.utils import isolate_apps

from django_dlock.admin import VersionedModelAdmin, VersionedTabularInline
from django_dlock.checks import databases
from django_dlock.checks import models as model_checks
from django_dlock.checks import settings as setting_checks
from django_dlock.conf import stores
from django_dlock.middleware import LockMiddleware
from django_dlock.models import RowLockMixin, VersionedMixin, VersionField
from django_dlock.versions import LockManager
from tests.testapp.models import Article, Counter, Draft, Note, Step

OURS = "django_dlock.middleware.LockMiddleware"
SECURITY = "django.middleware.security.SecurityMiddleware"
COMMON = "django.middleware.common.CommonMiddleware"
MEMORY = {"default": {"BACKEND": "memory://"}}


class OwnLockMiddleware(LockMiddleware):
    pass


def needs_missing_client():
    import no_such_client_library  # noqa: F401


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("DLOCK_URL", raising=False)
    stores.reset()


def ids(messages):
    assert all(message.hint for message in messages), "every message says what to do"
    return [message.id for message in messages]


def store_ids(**entry):
    with override_settings(DLOCK={"default": entry}):
        return ids(setting_checks.check_stores())


# DLOCK


def test_a_good_setting_is_silent():
    assert store_ids(BACKEND="memory://", TTL=30, WAIT=None) == []


def test_without_stores_there_is_nothing_to_check():
    assert setting_checks.check_stores() == []


@pytest.mark.parametrize("setting", ["redis://localhost", {"default": "redis://localhost"}, {"default": {"TTl": 3}}])
def test_e001_a_malformed_setting(setting):
    with override_settings(DLOCK=setting):
        assert ids(setting_checks.check_stores()) == ["dlock.E001"]


@pytest.mark.parametrize(
    "entry",
    [{}, {"BACKEND": "nosuch://host"}, {"BACKEND": 7}, {"BACKEND": "memory://", "OPTIONS": 7}],
)
def test_e002_a_backend_that_cannot_be_made(entry):
    assert store_ids(**entry) == ["dlock.E002"]


def test_e003_a_missing_client_library():
    assert store_ids(BACKEND=f"{__name__}.needs_missing_client") == ["dlock.E003"]


def test_e004_a_wrong_ttl():
    assert store_ids(BACKEND="memory://", TTL=0) == ["dlock.E004"]


def test_e005_a_wrong_wait():
    assert store_ids(BACKEND="memory://", WAIT=-1) == ["dlock.E005"]


@pytest.mark.parametrize(("ttl", "found"), [(0.5, ["dlock.W004"]), (1, [])])
def test_w004_a_ttl_below_a_second(ttl, found):
    assert store_ids(BACKEND="memory://", TTL=ttl) == found


def test_every_store_is_checked():
    setting = {"a": {"BACKEND": "memory://", "TTL": 0}, "b": {"BACKEND": "memory://"}, "c": {"BACKEND": "nosuch://"}}
    with override_settings(DLOCK=setting):
        messages = setting_checks.check_stores()

    assert ids(messages) == ["dlock.E004", "dlock.E002"]
    assert messages[0].msg.startswith("DLOCK['a']['TTL']")


def test_a_password_is_in_no_message():
    with override_settings(DLOCK={"default": {"BACKEND": "redis://:hunter2@host:port"}}):
        (message,) = setting_checks.check_stores()

    assert "hunter2" not in str(message)


def test_the_environment_is_checked_as_well(monkeypatch):
    monkeypatch.setenv("DLOCK_URL", "nosuch://host")

    assert ids(setting_checks.check_stores()) == ["dlock.E002"]


@pytest.mark.parametrize(("url", "found"), [("memory://", ["dlock.W011"]), ("redis://localhost", [])])
def test_w011_a_deployed_store_inside_one_process(url, found):
    with override_settings(DLOCK={"default": {"BACKEND": url}}):
        assert ids(setting_checks.check_shared_store()) == found


def test_a_malformed_setting_is_told_once():
    with override_settings(DLOCK=7):
        assert setting_checks.check_shared_store() == []


# MIDDLEWARE


@pytest.mark.parametrize(
    ("stores_set", "middleware", "found"),
    [
        (MEMORY, [SECURITY, OURS, COMMON], []),
        (MEMORY, [SECURITY, f"{__name__}.OwnLockMiddleware"], []),
        (MEMORY, [SECURITY, COMMON, "no.such.Middleware"], ["dlock.W001"]),
        (None, [SECURITY, COMMON], []),
        (MEMORY, [OURS, SECURITY, COMMON], ["dlock.W002"]),
        (MEMORY, [SECURITY, OURS, COMMON, OURS], ["dlock.W002"]),
        (None, [SECURITY, OURS], ["dlock.W003"]),
    ],
)
def test_w001_to_w003_the_middleware_is_there_once_in_its_place_and_of_use(stores_set, middleware, found):
    with override_settings(DLOCK=stores_set, MIDDLEWARE=middleware):
        assert ids(setting_checks.check_middleware()) == found


# The admin


def test_w013_a_versioned_model_is_in_the_admin_with_its_guard():
    site = admin.AdminSite()
    site.register(Article)
    site.register(Counter)
    site.register(Draft, VersionedModelAdmin)
    try:
        assert [(message.id, message.obj) for message in model_checks.check_admin()] == [("dlock.W013", Article)]
    finally:
        site.unregister([Article, Counter, Draft])


def test_w013_an_inline_of_a_versioned_model_has_its_guard():
    class Plain(admin.TabularInline):
        model = Step

    class Guarded(VersionedTabularInline):
        model = Step

    class Unversioned(admin.TabularInline):
        model = Note

    class Incomplete(admin.TabularInline):
        pass

    class Parent(admin.ModelAdmin):
        inlines = (Plain, Guarded, Unversioned, Incomplete)

    site = admin.AdminSite()
    site.register(Counter, Parent)
    try:
        (message,) = model_checks.check_admin()
    finally:
        site.unregister(Counter)
    assert (ids([message]), message.obj) == (["dlock.W013"], Step)
    assert message.msg.startswith("Plain ")


# Models


@pytest.fixture
def installed(monkeypatch):
    """Make the models defined in a test the only ones installed."""
    with isolate_apps("tests.testapp") as isolated:
        monkeypatch.setattr(model_checks, "apps", isolated)
        yield isolated


def test_a_good_versioned_model_is_silent(installed):
    class Good(VersionedMixin):
        class Meta:
            app_label = "testapp"

    class Child(Good):
        class Meta:
            app_label = "testapp"

    assert installed.get_models() == [Good, Child]
    assert model_checks.check_models() == []


def test_e006_a_versioned_model_without_a_version(installed):
    class NoField(VersionedMixin):
        version = None

        class Meta:
            app_label = "testapp"

    (message,) = model_checks.check_models()
    assert ids([message]) == ["dlock.E006"]
    assert message.obj is NoField


def test_e007_a_versioned_model_with_two_versions(installed):
    class Two(VersionedMixin):
        revision = VersionField()

        class Meta:
            app_label = "testapp"

    assert ids(model_checks.check_models()) == ["dlock.E007"]


def test_w016_a_version_that_no_save_checks(installed):
    class Abstract(models.Model):
        version = VersionField()

        class Meta:
            app_label = "testapp"
            abstract = True

    class Counted(Abstract):
        class Meta:
            app_label = "testapp"

    class Proxy(Counted):
        class Meta:
            app_label = "testapp"
            proxy = True

    class Child(Counted):
        class Meta:
            app_label = "testapp"

    class Checked(VersionedMixin, Abstract):
        class Meta:
            app_label = "testapp"

    (message,) = model_checks.check_models()
    assert (ids([message]), message.obj) == (["dlock.W016"], Counted)
    assert model_checks.check_models(app_configs=[]) == []


class Visible(models.Manager):
    def get_queryset(self):
        return super().get_queryset().filter(hidden=False)


def test_w008_a_base_manager_that_hides_rows(installed):
    class Hiding(VersionedMixin):
        hidden = models.BooleanField(default=False)
        objects = LockManager()
        visible = Visible()

        class Meta:
            app_label = "testapp"
            base_manager_name = "visible"

    assert "dlock.W008" in ids(model_checks.check_models())


def test_w009_a_manager_that_writes_past_the_version(installed):
    class Bypassing(VersionedMixin):
        plain = models.Manager()

        class Meta:
            app_label = "testapp"

    (message,) = model_checks.check_models()
    assert ids([message]) == ["dlock.W009"]
    assert "'plain'" in message.msg


@pytest.mark.parametrize(
    ("on_delete", "base_manager", "found"),
    [
        (models.SET_NULL, "plain", ["dlock.W009", "dlock.W012"]),
        (models.SET_DEFAULT, "plain", ["dlock.W009", "dlock.W012"]),
        (models.SET_NULL, "objects", ["dlock.W009"]),
        (models.SET_NULL, None, ["dlock.W009"]),
        (models.SET(1), "plain", ["dlock.W009", "dlock.W012"]),
        (models.SET(1), "objects", ["dlock.W009"]),
        (models.SET_DEFAULT, "objects", ["dlock.W009", "dlock.W012"]),
        (models.SET(int), "objects", ["dlock.W009", "dlock.W012"]),
        (models.CASCADE, "plain", ["dlock.W009"]),
        (models.PROTECT, "plain", ["dlock.W009"]),
        (models.RESTRICT, "plain", ["dlock.W009"]),
        (models.DO_NOTHING, "plain", ["dlock.W009"]),
    ],
)
def test_w012_a_foreign_key_that_django_clears_past_the_version(installed, on_delete, base_manager, found):
    class Customer(models.Model):
        class Meta:
            app_label = "testapp"

    class Order(VersionedMixin):
        customer = models.ForeignKey(Customer, on_delete, null=True, default=None)
        objects = LockManager()
        plain = models.Manager()

        class Meta:
            app_label = "testapp"
            base_manager_name = base_manager

    assert ids(model_checks.check_models()) == found


@pytest.mark.parametrize(
    ("name", "found"), [("DB_SET_NULL", ["dlock.W012"]), ("DB_SET_DEFAULT", ["dlock.W012"]), ("DB_CASCADE", [])]
)
def test_w012_a_foreign_key_that_the_database_clears_itself(installed, name, found):
    on_delete = getattr(models, name, None)
    if on_delete is None:
        pytest.skip("needs Django 6.1")

    class Customer(models.Model):
        class Meta:
            app_label = "testapp"

    class Order(VersionedMixin):
        customer = models.ForeignKey(Customer, on_delete, null=True, db_default=None)

        class Meta:
            app_label = "testapp"

    messages = model_checks.check_models()
    assert ids(messages) == found
    assert all("Use SET_NULL" in message.hint for message in messages)


def test_w014_a_parent_s_table_that_is_written_past_the_version(installed):
    class Customer(models.Model):
        class Meta:
            app_label = "testapp"

    class Patient(VersionedMixin, Customer):
        class Meta:
            app_label = "testapp"

    class Child(Patient):
        class Meta:
            app_label = "testapp"

    class Proxy(Patient):
        class Meta:
            app_label = "testapp"
            proxy = True

    (message,) = model_checks.check_models()
    assert (ids([message]), message.obj) == (["dlock.W014"], Patient)
    assert "saved as a Customer" in message.msg


def test_models_of_other_apps_are_left_to_their_own_check(installed):
    class NoField(VersionedMixin):
        version = None

        class Meta:
            app_label = "testapp"

    assert model_checks.check_models(app_configs=[]) == []


# DATABASES


@pytest.fixture
def rows(installed):
    """A project with row locks."""

    class Locked(RowLockMixin):
        class Meta:
            app_label = "testapp"

    return Locked


@pytest.fixture
def use(monkeypatch):
    """Check this database instead; nothing is connected."""

    def use(engine, **options):
        settings = {"ENGINE": f"django.db.backends.{engine}", "NAME": "x", "OPTIONS": options}
        monkeypatch.setattr(databases, "connections", ConnectionHandler({"default": settings}))
        return ids(databases.check_transactions())

    return use


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, ["dlock.W005"]),
        ({"transaction_mode": None}, ["dlock.W005"]),
        ({"transaction_mode": "deferred"}, ["dlock.W005"]),
        ({"transaction_mode": "immediate"}, []),
        ({"transaction_mode": "EXCLUSIVE"}, []),
    ],
)
def test_w005_sqlite_transactions_that_start_without_the_lock(use, options, found):
    assert use("sqlite3", **options) == found


@pytest.mark.usefixtures("rows")
@pytest.mark.skipif(not importlib.util.find_spec("MySQLdb"), reason="pip install mysqlclient")
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, []),
        ({"isolation_level": "Read Committed"}, []),
        ({"isolation_level": "repeatable read"}, ["dlock.W006"]),
        ({"isolation_level": "serializable"}, ["dlock.W006"]),
        ({"isolation_level": None}, ["dlock.W006"]),
    ],
)
def test_w006_mysql_with_snapshots(use, options, found):
    assert use("mysql", **options) == found


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("level", "found"),
    [
        (None, []),
        ("READ_COMMITTED", []),
        ("REPEATABLE_READ", ["dlock.W007"]),
        ("SERIALIZABLE", ["dlock.W007"]),
    ],
)
def test_w007_postgresql_with_snapshots(use, level, found):
    psycopg_any = pytest.importorskip("django.db.backends.postgresql.psycopg_any")

    assert use("postgresql", **({"isolation_level": psycopg_any.IsolationLevel[level]} if level else {})) == found


@pytest.mark.usefixtures("installed")
def test_a_project_that_uses_nothing_of_ours_is_left_alone(use):
    assert use("sqlite3") == []


@pytest.mark.usefixtures("installed")
def test_stores_alone_do_not_need_immediate_transactions_in_sqlite(use):
    with override_settings(DLOCK=MEMORY):
        assert use("sqlite3") == []


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("setting", "atomic", "found"), [(MEMORY, True, ["dlock.I001"]), (MEMORY, False, []), (None, True, [])]
)
def test_i001_leases_inside_the_transaction_of_a_request(monkeypatch, setting, atomic, found):
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": "x", "ATOMIC_REQUESTS": atomic}
    monkeypatch.setattr(databases, "connections", ConnectionHandler({"default": database}))
    with override_settings(DLOCK=setting):
        assert ids(databases.check_atomic_requests()) == found


def test_w010_the_fence_table_is_looked_for_only_where_asked(database, monkeypatch):
    monkeypatch.setattr(databases, "FENCE_TABLE", "dlock_fence_that_nobody_made")

    assert databases.check_fence_table(databases=None) == []
    assert ids(databases.check_fence_table(databases=[database])) == ["dlock.W010"]


def test_w010_is_found_by_a_check_of_that_database(database, monkeypatch):
    monkeypatch.setattr(databases, "FENCE_TABLE", "dlock_fence_that_nobody_made")

    assert "dlock.W010" in [message.id for message in run_checks(tags=["database"], databases=[database])]


def test_w010_is_silent_after_migrate(database):
    assert databases.check_fence_table(databases=[database]) == []


def test_w010_is_silent_for_a_database_that_is_empty_or_not_meant_for_it(monkeypatch, database):
    monkeypatch.setattr(databases, "FENCE_TABLE", "dlock_fence_that_nobody_made")
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.NoLocksHere"]):
        assert databases.check_fence_table(databases=[database]) == []

    monkeypatch.setattr(connection.introspection.__class__, "table_names", lambda self: [])
    assert databases.check_fence_table(databases=["default"]) == []


class NoLocksHere:
    def allow_migrate(self, db, app_label, **hints):
        return False if app_label == "django_dlock" else None


# All together


@pytest.mark.usefixtures("installed")
def test_the_checks_are_registered_under_our_tag():
    with override_settings(DLOCK={"default": {"BACKEND": "memory://", "TTL": 0}}, MIDDLEWARE=[SECURITY, OURS]):
        assert ids(run_checks(tags=["dlock"])) == ["dlock.E004"]


@pytest.mark.usefixtures("installed")
def test_every_check_is_registered(monkeypatch):
    run, checks = set(), set()
    for module in (databases, model_checks, setting_checks):
        for name in (name for name in vars(module) if name.startswith("check_")):
            checks.add(name)
            monkeypatch.setattr(module, name, lambda *_, name=name: run.add(name) or [])

    run_checks(tags=["dlock", "database"], databases=[], include_deployment_checks=True)

    assert run == checks


@pytest.mark.usefixtures("installed")
def test_manage_check_runs_them(capsys):
    with override_settings(DLOCK=MEMORY, MIDDLEWARE=[SECURITY, OURS]):
        call_command("check", tags=["dlock"])

    assert "no issues" in capsys.readouterr().out


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_w015_a_fence_without_transactions_is_found_and_the_migration_cures_it(database):
    with connections[database].cursor() as cursor:
        cursor.execute("ALTER TABLE dlock_fence ENGINE = MyISAM")
    assert "dlock.W015" in ids(databases.check_fence_table(databases=[database]))
    migration = importlib.import_module("django_dlock.migrations.0006_engine")
    with connections[database].schema_editor() as editor:
        migration.to_innodb(None, editor)
    assert databases.check_fence_table(databases=[database]) == []
