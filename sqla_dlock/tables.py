"""The tables of dlock in the application's database, each on its own MetaData, for `create_all` and for Alembic.

Add the MetaData to Alembic's `target_metadata`, next to the application's. Every application whose locks have a fence
needs `dlock_fence`; only a store in a database needs `dlock_lease`, and on SQLite not even that store does: there the
leases have their own file next to the database.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import BigInteger, Column, Connection, MetaData, String, Table, Text, event
from sqlalchemy.dialects import mysql

__all__ = ["fence_metadata", "fence_table", "lease_metadata", "lease_table"]

# ASCII, compared byte by byte, so that "order:A" and "order:a" are two locks on every database.
_LOCK_NAME: Final = (
    String(512)
    .with_variant(String(512, collation="C"), "postgresql")
    .with_variant(mysql.VARCHAR(512, charset="ascii", collation="ascii_bin"), "mysql", "mariadb")
)

fence_metadata: Final = MetaData()
fence_table: Final = Table(
    "dlock_fence",
    fence_metadata,
    Column("name", _LOCK_NAME, primary_key=True),
    Column("token", BigInteger, nullable=False, autoincrement=False),
    Column("holder", String(32), nullable=False),
    Column("s_token", BigInteger, nullable=False, server_default="0"),
)

lease_metadata: Final = MetaData()
lease_table: Final = Table(
    "dlock_lease",
    lease_metadata,
    Column("name", _LOCK_NAME, primary_key=True),
    Column("token", BigInteger, nullable=False, autoincrement=False),
    Column("holder", String(32), nullable=False),
    Column("owner", Text().with_variant(mysql.LONGTEXT, "mysql", "mariadb"), nullable=False),
    Column("since", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False, index=True),
    Column("wanted_until", BigInteger, nullable=False, server_default="0"),
)


@event.listens_for(fence_table, "after_create")
def _add_floor(_: Table, connection: Connection, **options: Any) -> None:
    """Add the row of the floor: each new name reads it, and if it is missing, MariaDB locks a gap instead of a row."""
    connection.execute(fence_table.insert().values(name="", token=0, holder="", s_token=0))
