"""The functions of the fence on PostgreSQL do what its statements do, which are sent where there are no functions."""

import contextlib
from importlib import import_module

import pytest
from django.core.management import call_command
from django.db import DatabaseError, connections
from django.db.transaction import atomic, set_rollback
from django.test.utils import CaptureQueriesContext

from django_dlock import lock
from django_dlock.errors import StaleToken
from django_dlock.fencing import FencePort
from dlock_core.transactions import fencing
from dlock_core.transactions.fence_sql import POSTGRESQL, functions_in
from dlock_core.transactions.fencing import FenceEntry
from tests.django_dlock.sessions import rows, second_session
from tests.testapp.models import Counter

pytestmark = pytest.mark.usefixtures("store")

NOW = 2_000_000_000_000_000
US = "a" * 32
ROW, FLOOR = "order:42", ""
FUNCTIONS = functions_in("public")


@pytest.fixture(autouse=True)
def database(use_database):
    use_database("postgresql")


@contextlib.contextmanager
def undone(alias):
    """Open a transaction that is rolled back."""
    with atomic(alias):
        yield
        set_rollback(True, using=alias)


def sent(work):
    """Return the statements that are sent while it works."""
    with CaptureQueriesContext(connections["postgresql"]) as captured:
        work()
    return [each["sql"] for each in captured]


def fenced():
    with lock("order", 42, using="postgresql"), atomic("postgresql"):
        Counter.objects.using("postgresql").update(value=1)


def leased():
    with lock("order", 42, using="postgresql", fence="lease"), atomic("postgresql"):
        Counter.objects.using("postgresql").update(value=1)


def calls(statements):
    return [
        name for name in ("dlock_admit", "dlock_confirm") if any(f"SELECT public.{name}(" in sql for sql in statements)
    ]


def test_locks_call_them():
    assert calls(sent(fenced)) == ["dlock_admit"]
    assert calls(sent(leased)) == ["dlock_admit", "dlock_confirm"]


def test_server_is_asked_for_them_once_for_each_of_its_connections():
    connections["postgresql"].close()
    assert sum("has_function_privilege" in sql for sql in sent(fenced)) == 1
    assert not any("has_function_privilege" in sql for sql in sent(leased))


def test_inside_a_transaction_the_server_is_not_asked_because_the_question_would_take_its_snapshot():
    connections["postgresql"].close()

    def ask_inside():
        with atomic("postgresql"), lock("order", 42, using="postgresql"):
            Counter.objects.using("postgresql").update(value=1)

    statements = sent(ask_inside)
    assert not calls(statements)
    assert any("INSERT INTO dlock_fence" in sql for sql in statements)


def test_before_their_migration_the_statements_are_sent():
    call_command("migrate", "django_dlock", "0004", database="postgresql", verbosity=0)
    connections["postgresql"].close()
    try:
        assert not calls(sent(fenced) + sent(leased))
        assert rows(connections["postgresql"], "SELECT 1 FROM dlock_fence WHERE name = 'order:42' AND token > 0")
    finally:
        call_command("migrate", "django_dlock", database="postgresql", verbosity=0)
        connections["postgresql"].close()
    assert calls(sent(fenced)) == ["dlock_admit"]


def test_role_that_may_not_call_them_sends_the_statements():
    def of_everybody(change):
        for name in ("dlock_admit", "dlock_confirm"):
            rows(connections["postgresql"], f"{change.format(name)} public")

    rows(connections["postgresql"], "CREATE ROLE clerk")
    try:
        of_everybody("REVOKE EXECUTE ON FUNCTION {} FROM")
        rows(connections["postgresql"], "GRANT ALL ON ALL TABLES IN SCHEMA public TO clerk")
        connections["postgresql"].close()
        rows(connections["postgresql"], "SET ROLE clerk")
        assert not calls(sent(fenced) + sent(leased))
    finally:
        rows(connections["postgresql"], "RESET ROLE")
        of_everybody("GRANT EXECUTE ON FUNCTION {} TO")
        rows(connections["postgresql"], "DROP OWNED BY clerk")
        rows(connections["postgresql"], "DROP ROLE clerk")
        connections["postgresql"].close()


def test_each_tenant_has_its_own_fence_on_one_connection():
    """The functions are looked up once, but the table by each transaction's search path, even when a plan is kept."""

    def tokens(schema):
        return dict(rows(connections["postgresql"], f"SELECT name, token FROM {schema}.dlock_fence WHERE name <> ''"))

    fenced()
    before = tokens("public")
    for schema in ("one", "two"):
        rows(connections["postgresql"], f"CREATE SCHEMA {schema}")
        rows(connections["postgresql"], f"CREATE TABLE {schema}.dlock_fence (LIKE public.dlock_fence INCLUDING ALL)")
    try:
        for schema in ("one", "two") * 8:
            rows(connections["postgresql"], f"SET search_path = {schema}")
            with lock("order", 42, using="postgresql") as lease, atomic("postgresql"):
                rows(connections["postgresql"], "UPDATE public.testapp_counter SET value = 1")
            assert tokens(schema) == {"order:42": lease.token}
            with lock("order", 43, using="postgresql", fence="lease") as lease, atomic("postgresql"):
                rows(connections["postgresql"], "UPDATE public.testapp_counter SET value = 1")
            assert tokens(schema)["order:43"] == lease.token
            rows(connections["postgresql"], f"DELETE FROM {schema}.dlock_fence")
        assert tokens("public") == before
    finally:
        rows(connections["postgresql"], "SET search_path = public")
        rows(connections["postgresql"], "DROP SCHEMA one CASCADE")
        rows(connections["postgresql"], "DROP SCHEMA two CASCADE")


@pytest.fixture
def tenant():
    """Put an empty schema `ten` before `public` in the search path of this session."""
    rows(connections["postgresql"], "CREATE SCHEMA ten")
    rows(connections["postgresql"], "SET search_path = ten, public")
    yield
    connections["postgresql"].close()
    with second_session("postgresql") as other:
        rows(other, "DROP SCHEMA IF EXISTS ten CASCADE")


def elsewhere(*statements):
    with second_session("postgresql") as other:
        for each in statements:
            rows(other, each)


NEW_FENCE = "CREATE TABLE ten.dlock_fence (LIKE public.dlock_fence INCLUDING ALL)"


@pytest.mark.usefixtures("tenant")
@pytest.mark.parametrize("fence", ["transaction", "lease"])
def test_table_that_comes_earlier_in_the_search_path_is_used_from_the_next_statement_on(fence):
    """So it is with a plain statement; but PostgreSQL keeps the functions' plans, as the path itself is unchanged."""

    def token_in_tenant():
        with lock("order", 42, using="postgresql", fence=fence) as lease, atomic("postgresql"):
            rows(connections["postgresql"], "UPDATE testapp_counter SET value = 1")
        return lease.token

    for _ in range(8):
        token_in_tenant()
    elsewhere(NEW_FENCE)
    token = token_in_tenant()
    ask = "SELECT name, token FROM ten.dlock_fence"
    assert rows(connections["postgresql"], ask) == [("order:42", token)]
    with pytest.raises(StaleToken), lock("order", 42, using="postgresql", fence=fence):
        with atomic("postgresql"):
            rows(connections["postgresql"], "UPDATE testapp_counter SET value = 1")
        elsewhere("UPDATE ten.dlock_fence SET token = token + 1000, holder = 'a newer one' WHERE name = 'order:42'")
        with atomic("postgresql"):
            rows(connections["postgresql"], "UPDATE testapp_counter SET value = 2")
    elsewhere("DROP TABLE ten.dlock_fence")
    assert token_in_tenant() > token


@pytest.mark.usefixtures("tenant")
def test_table_that_comes_within_the_transaction_is_used_by_its_admit():
    """What the session has cached about missing tables is older than its lock on the table of the kept plan."""
    for _ in range(8):
        fenced()
    port, params = (
        FencePort(connections["postgresql"], None),
        fencing.params(FenceEntry("order:44", NOW, US, limit=1.5)),
    )
    with atomic("postgresql"):
        rows(connections["postgresql"], "SELECT to_regclass('dlock_fence')")
        elsewhere(NEW_FENCE)
        port.execute(FUNCTIONS.admit[0], params)
    assert rows(connections["postgresql"], "SELECT name FROM ten.dlock_fence") == [("order:44",)]


@pytest.mark.parametrize("schema", ["ten", '"T e.n"'])
def test_functions_whose_schema_is_renamed_work_on_the_table_that_the_search_path_has(schema, tenant):
    rows(connections["postgresql"], f"ALTER SCHEMA ten RENAME TO {schema}" if schema != "ten" else "SELECT 1")
    rows(connections["postgresql"], f"SET search_path = {schema}, public")
    elsewhere(NEW_FENCE.replace("ten.", f"{schema}."))
    for operation in import_module("django_dlock.migrations.0005_functions").Migration.operations:
        with connections["postgresql"].schema_editor() as editor:
            operation.database_forwards("django_dlock", editor, None, None)
    with second_session("postgresql") as fresh:
        rows(fresh, f"SET search_path = {schema}, public")
        port, dialect = FencePort(fresh, None), functions_in(schema)
        for token in (NOW, NOW + 1):
            port.execute(dialect.admit[0], fencing.params(FenceEntry("order:42", token, US, limit=1.5)))
        assert rows(fresh, f"SELECT token FROM {schema}.dlock_fence") == [(NOW + 1,)]
        elsewhere(f"ALTER SCHEMA {schema} RENAME TO eleven", f"CREATE SCHEMA {schema}")
        rows(fresh, "SET search_path = eleven, public")
        try:
            entry = FenceEntry("order:42", NOW + 2, US, limit=1.5)
            _, answer = port.execute(functions_in("eleven").admit[0], fencing.params(entry))
            assert answer == (1,)
            assert rows(fresh, "SELECT token FROM eleven.dlock_fence") == [(NOW + 2,)]
        finally:
            rows(fresh, "DROP SCHEMA eleven CASCADE")
            rows(fresh, f"DROP SCHEMA {schema} CASCADE")


@pytest.mark.usefixtures("tenant")
@pytest.mark.parametrize(
    "loss",
    [
        ("DROP SCHEMA ten CASCADE",),
        ("ALTER FUNCTION ten.dlock_admit RENAME TO former_admit",),
        ("DROP FUNCTION ten.dlock_admit",),
        ("REVOKE EXECUTE ON FUNCTION ten.dlock_admit FROM public",),
        ("REVOKE USAGE ON SCHEMA ten FROM clerk",),
    ],
    ids=lambda loss: loss[0],
)
def test_session_that_loses_the_functions_heals_with_the_next_transaction(loss):
    for operation in import_module("django_dlock.migrations.0005_functions").Migration.operations:
        with connections["postgresql"].schema_editor() as editor:
            operation.database_forwards("django_dlock", editor, None, None)
    elsewhere(
        "CREATE ROLE clerk",
        "GRANT USAGE ON SCHEMA ten TO clerk",
        "GRANT ALL ON ALL TABLES IN SCHEMA public TO clerk",
    )
    try:
        connections["postgresql"].close()
        rows(connections["postgresql"], "SET search_path = ten, public")
        rows(connections["postgresql"], "SET ROLE clerk")
        assert any("SELECT ten.dlock_admit(" in sql for sql in sent(fenced))
        elsewhere(*loss)
        with pytest.raises(DatabaseError, match=r"dlock_admit|ten"):
            fenced()
        assert any("INSERT INTO dlock_fence" in sql for sql in sent(fenced)) or calls(sent(fenced))
    finally:
        connections["postgresql"].close()
        elsewhere("DROP OWNED BY clerk", "DROP ROLE clerk")


def test_migration_that_was_faked_is_undone():
    call_command("migrate", "django_dlock", "0004", database="postgresql", verbosity=0)
    call_command("migrate", "django_dlock", "0005", database="postgresql", verbosity=0, fake=True)
    try:
        call_command("migrate", "django_dlock", "0004", database="postgresql", verbosity=0)
    finally:
        call_command("migrate", "django_dlock", database="postgresql", verbosity=0)
        connections["postgresql"].close()


@pytest.mark.parametrize("step", ["admit", "confirm"])
@pytest.mark.parametrize(
    "state",
    [
        {},
        {ROW: (NOW - 1, "b" * 32, 0)},
        {ROW: (NOW, US, 0)},
        {ROW: (NOW, "b" * 32, 0)},
        {ROW: (NOW + 1, "b" * 32, 0)},
        {ROW: (NOW, US, NOW)},
        {ROW: (NOW - 2, "b" * 32, NOW - 1)},
        {ROW: (0, "", NOW + 1)},
        {FLOOR: (NOW, "", 0)},
        {FLOOR: (NOW - 1, "", 0)},
        {FLOOR: (NOW, "", 0), ROW: (NOW - 1, "b" * 32, 0)},
    ],
    ids=lambda state: "; ".join(f"{name or 'floor'} {row[0] - NOW:+}/{row[2] - NOW:+}" for name, row in state.items()),
)
@pytest.mark.parametrize("token", [NOW, 7])
def test_they_do_what_the_statements_do(step, state, token):
    def outcome(dialect):
        connection = connections["postgresql"]
        with undone("postgresql"):
            rows(connection, "DELETE FROM dlock_fence")
            for name, row in state.items():
                rows(
                    connection,
                    "INSERT INTO dlock_fence (name, token, holder, s_token) VALUES (%s, %s, %s, %s)",
                    name,
                    *row,
                )
            statement = dialect.confirm if step == "confirm" else dialect.admit[0]
            entry = FenceEntry("order:42", token, US, limit=1.5)
            answer = fencing.is_yes(*FencePort(connection, None).execute(statement, fencing.params(entry)))
            found = rows(connection, "SELECT name, token, holder, s_token FROM dlock_fence ORDER BY name")
            ((limit, mark),) = rows(
                connection, "SELECT current_setting('lock_timeout'), current_setting('application_name')"
            )
        return answer, found, limit, mark if answer else "what is refused is rolled back"

    assert outcome(FUNCTIONS) == outcome(POSTGRESQL)


def test_their_wait_for_a_row_is_limited():
    port, params = (
        FencePort(connections["postgresql"], None),
        fencing.params(FenceEntry("order:42", NOW, US, limit=0.05)),
    )
    port.execute(FUNCTIONS.admit[0], params)
    with second_session("postgresql") as other:
        other.set_autocommit(False)
        rows(other, "UPDATE dlock_fence SET token = token WHERE name = 'order:42'")
        for statement in (FUNCTIONS.admit[0], FUNCTIONS.confirm):
            with pytest.raises(DatabaseError, match="lock timeout"):
                port.execute(statement, params)
        other.rollback()


def test_their_plans_do_not_read_the_whole_table_when_it_has_grown():
    """The planner prefers to read all of a table with one row. Such a plan is kept, and would later read a million."""
    port, params = (
        FencePort(connections["postgresql"], None),
        fencing.params(FenceEntry("order:42", NOW, US, limit=1.5)),
    )
    port.execute(FUNCTIONS.admit[0], params)
    with connections["postgresql"].cursor() as cursor:
        cursor.execute("ANALYZE dlock_fence")
    with atomic("postgresql"):
        for statement in (FUNCTIONS.admit[0], FUNCTIONS.confirm):
            port.execute(statement, params)
        scans = rows(
            connections["postgresql"],
            "SELECT seq_scan, idx_scan > 0 FROM pg_stat_xact_user_tables WHERE relname = 'dlock_fence'",
        )
    assert scans == [(0, True)]
