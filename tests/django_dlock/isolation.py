"""A second alias of a database, with an isolation level; SQLite has IMMEDIATE and DEFERRED."""

from typing import Any

from django.db import connections


def alias(database: str, level: str | None) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of an alias; None means the server's default level."""
    settings = {**connections.settings[database], "OPTIONS": dict(connections.settings[database]["OPTIONS"])}
    if database == "postgresql":
        from django.db.backends.postgresql.psycopg_any import IsolationLevel

        settings["OPTIONS"]["isolation_level"] = IsolationLevel[str(level).upper().replace(" ", "_")]
    elif database == "mariadb":
        settings["OPTIONS"]["isolation_level"] = level
    else:
        settings["OPTIONS"]["transaction_mode"] = level
    return f"{database} {level}", settings
