"""The fence in SQLAlchemy's databases: the table `dlock_fence`, or the protected row itself (`FencedMixin`)."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, MetaData, String, Table
from sqlalchemy.dialects import mysql

__all__ = ["metadata", "table"]

# ASCII, compared byte by byte, so that "order:A" and "order:a" are two locks on every database.
_NAME: Final = (
    String(512)
    .with_variant(String(512, collation="C"), "postgresql")
    .with_variant(mysql.VARCHAR(512, charset="ascii", collation="ascii_bin"), "mysql", "mariadb")
)

metadata: Final = MetaData()
"""For `create_all`, and for Alembic's `target_metadata` beside your own."""

table: Final = Table(
    "dlock_fence",
    metadata,
    Column("name", _NAME, primary_key=True),
    Column("token", BigInteger, nullable=False, autoincrement=False),
    Column("holder", String(32), nullable=False),
    Column("s_token", BigInteger, nullable=False, server_default="0"),
)
