"""The fence's table in migrations: Alembic makes it from our metadata, and finds nothing to do afterwards."""

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata, produce_migrations, render_python_code
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import MetaData, create_engine, inspect, make_url
from sqlalchemy.dialects import mysql
from sqlalchemy.orm import Session

from sqla_dlock import fencing, lock
from tests import settings
from tests.mysql_server import DIALECT
from tests.sqla_dlock.models import Base

OPTIONS = {
    "compare_type": True,
    "compare_server_default": True,
    # without the tables of other test modules
    "include_object": lambda _, name, kind, *__: kind != "table" or name in {"dlock_fence", "counter"},
}


@pytest.fixture
def engine(engine):
    """A database without the fence's table."""
    fencing.metadata.drop_all(engine)
    yield engine
    fencing.metadata.create_all(engine)


def migrated_by(context, metadata):
    """Run the code that `alembic revision --autogenerate` would write, and return it."""
    script = produce_migrations(context, metadata)
    code = render_python_code(script.upgrade_ops)
    exec(f"def upgrade(op, sa, mysql, text=sa.text):\n    {code.strip()}", found := {"sa": sa})
    found["upgrade"](Operations(context), sa, mysql)
    return code


def test_migration_makes_the_table_and_autogenerate_finds_no_difference_afterwards(engine, store):
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts=OPTIONS)
        code = migrated_by(context, [Base.metadata, fencing.metadata])
        assert "dlock_fence" in code
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=OPTIONS)
        assert compare_metadata(context, [Base.metadata, fencing.metadata]) == []
    with Session(engine) as session, lock(session, "order", 42):
        session.connection()
        session.commit()


def test_own_metadata_may_take_the_table_in(engine):
    ours = MetaData()
    fencing.table.to_metadata(ours)
    ours.create_all(engine)
    assert inspect(engine).has_table("dlock_fence")
    assert compare_names(engine, ours) == []


@pytest.mark.parametrize("engine", ["postgresql", "mariadb", "pymysql", "sqlite"], indirect=True)
def test_table_of_a_django_migration_is_the_same(request, engine, make_engine):
    name = engine.dialect.name
    request.getfixturevalue({"sqlite": "default", DIALECT: "mariadb"}.get(name, name))
    databases = {"postgresql": "postgres", DIALECT: "dlock", "sqlite": str(settings.DATABASES["default"]["NAME"])}
    url = make_url(engine.url).set(database=databases[name])
    django = create_engine(url)
    try:
        assert compare_names(django, fencing.metadata) == []
    finally:
        django.dispose()


def compare_names(engine, metadata):
    """Return what autogenerate would change in the fence's table."""
    with engine.connect() as connection:
        options = {**OPTIONS, "include_name": lambda name, kind, _: kind != "table" or name == "dlock_fence"}
        return compare_metadata(MigrationContext.configure(connection, opts=options), metadata)
