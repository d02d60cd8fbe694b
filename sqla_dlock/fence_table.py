"""The table `dlock_fence`, on a MetaData of its own."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import BigInteger, Column, Connection, MetaData, String, Table, event
from sqlalchemy.dialects import mysql

__all__ = ["NAME", "metadata", "table"]

# ASCII, compared byte by byte, so that "order:A" and "order:a" are two locks on every database.
NAME: Final = (
    String(512)
    .with_variant(String(512, collation="C"), "postgresql")
    .with_variant(mysql.VARCHAR(512, charset="ascii", collation="ascii_bin"), "mysql", "mariadb")
)
"""A lock's name, as a column."""

metadata: Final = MetaData()
"""For `create_all`, and for Alembic's `target_metadata` beside your own."""

table: Final = Table(
    "dlock_fence",
    metadata,
    Column("name", NAME, primary_key=True),
    Column("token", BigInteger, nullable=False, autoincrement=False),
    Column("holder", String(32), nullable=False),
    Column("s_token", BigInteger, nullable=False, server_default="0"),
)


@event.listens_for(table, "after_create")
def _add_floor(_: Table, connection: Connection, **options: Any) -> None:
    """Add the row of the floor: every new name looks at it, and where it is missing MariaDB locks a gap instead."""
    connection.execute(table.insert().values(name="", token=0, holder="", s_token=0))
