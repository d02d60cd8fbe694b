"""The tables of dlock in the application's database, each on its own MetaData, for `create_all` and for Alembic.

This module is imported at the first access to a table: its options for MySQL load SQLAlchemy's dialect for it, which
takes longer than all of dlock.

Add the MetaData to Alembic's `target_metadata`, next to the application's. Every application whose locks have a fence
needs `dlock_fence`; only a store in a database needs `dlock_lease`, and on SQLite not even that store does: there the
leases have their own file next to the database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import BigInteger, Column, Connection, MetaData, String, Table, Text, event, text
from sqlalchemy.dialects.mysql import LONGTEXT

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["fence_metadata", "fence_table", "lease_metadata", "lease_table"]

# ASCII, compared byte by byte, so that "order:A" and "order:a" are two locks on every database. The collation
# implies MySQL's character set.
_LOCK_NAME: Final = (
    String(512)
    .with_variant(String(512, collation="C"), "postgresql")
    .with_variant(String(512, collation="ascii_bin"), "mysql", "mariadb")
)

_INNODB: Final = "InnoDB"
"""MyISAM and Aria have neither transactions nor row locks, and a server may have one of them as its default."""

fence_metadata: Final = MetaData()
fence_table: Final = Table(
    "dlock_fence",
    fence_metadata,
    Column("name", _LOCK_NAME, primary_key=True),
    Column("token", BigInteger, nullable=False, autoincrement=False),
    Column("holder", String(32), nullable=False),
    Column("s_token", BigInteger, nullable=False, server_default="0"),
    mysql_engine=_INNODB,
    mariadb_engine=_INNODB,
)

lease_metadata: Final = MetaData()
lease_table: Final = Table(
    "dlock_lease",
    lease_metadata,
    Column("name", _LOCK_NAME, primary_key=True),
    Column("token", BigInteger, nullable=False, autoincrement=False),
    Column("holder", String(32), nullable=False),
    Column("owner", Text().with_variant(LONGTEXT, "mysql", "mariadb"), nullable=False),
    Column("since", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False, index=True),
    Column("wanted_until", BigInteger, nullable=False, server_default="0"),
    mysql_engine=_INNODB,
    mariadb_engine=_INNODB,
)


@event.listens_for(fence_table, "after_create")
def _add_floor(_: Table, connection: Connection, **options: Any) -> None:
    """Add the row of the floor: each new name reads it, and if it is missing, MariaDB locks a gap instead of a row."""
    connection.execute(fence_table.insert().values(name="", token=0, holder="", s_token=0))


@event.listens_for(fence_table, "after_create")
def _add_functions(_: Table, connection: Connection, **options: Any) -> None:
    """Create PostgreSQL's functions, unless the search path has them, or the role may not: the fence works without."""
    if connection.dialect.name == "postgresql":
        from dlock_core.transactions import fence_functions, fence_sql

        missing, create = fence_sql.SCHEMA_OF_FUNCTIONS, fence_functions.CREATE_BOTH
        connection.execute(text(_IF_MISSING.format(schema=missing, create=create)))


# Another process may create them at the same time, and be first.
_IF_MISSING: Final = """\
DO $dlock$ BEGIN IF {schema} IS NULL THEN EXECUTE $create$
{create}
$create$; END IF;
EXCEPTION WHEN insufficient_privilege OR unique_violation OR read_only_sql_transaction THEN NULL; END $dlock$"""


@event.listens_for(fence_metadata, "after_create")
def _add_functions_to_table(_: MetaData, connection: Connection, tables: Iterable[Table], **options: Any) -> None:
    """Create them also for a table that already existed."""
    if fence_table not in tables:
        _add_functions(fence_table, connection)


@event.listens_for(fence_table, "after_drop")
def _drop_functions(_: Table, connection: Connection, **options: Any) -> None:
    """Drop the functions in the table's schema; those in another schema of the search path may have other users."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(_DROP))


_DROP: Final = """\
DO $dlock$ BEGIN EXECUTE format(
'DROP FUNCTION IF EXISTS %1$I.dlock_admit(varchar, bigint, varchar, text), '
'%1$I.dlock_confirm(varchar, bigint, varchar, text)', current_schema());
EXCEPTION WHEN insufficient_privilege THEN NULL; END $dlock$"""
