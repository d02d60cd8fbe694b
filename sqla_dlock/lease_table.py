"""The table `dlock_lease` for stores in a database, on a MetaData of its own: not everybody has his leases there.

Nor has SQLite, whose leases have a file of their own beside the database.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, MetaData, String, Table, Text
from sqlalchemy.dialects import mysql

from sqla_dlock.fence_table import NAME

__all__ = ["metadata", "table"]

metadata: Final = MetaData()
"""For `create_all`, and for Alembic's `target_metadata` beside your own."""

table: Final = Table(
    "dlock_lease",
    metadata,
    Column("name", NAME, primary_key=True),
    Column("token", BigInteger, nullable=False, autoincrement=False),
    Column("holder", String(32), nullable=False),
    Column("owner", Text().with_variant(mysql.LONGTEXT, "mysql", "mariadb"), nullable=False),
    Column("since", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False, index=True),
    Column("wanted_until", BigInteger, nullable=False, server_default="0"),
)
