from typing import Any

from django.db import migrations

NO_TRANSACTIONS = (
    "SELECT table_name FROM information_schema.tables JOIN information_schema.engines USING (engine) "
    "WHERE table_schema = DATABASE() AND table_name IN ('dlock_fence', 'dlock_lease') AND transactions <> 'YES'"
)


def to_innodb(apps: Any, schema_editor: Any) -> None:
    """On MySQL and MariaDB, give an engine with transactions to tables that the server's default has made without."""
    if schema_editor.connection.vendor != "mysql":
        return
    with schema_editor.connection.cursor() as cursor:
        cursor.execute(NO_TRANSACTIONS)
        tables = [row[0] for row in cursor.fetchall()]
    for table in tables:
        schema_editor.execute(f"ALTER TABLE {table} ENGINE = InnoDB")


class Migration(migrations.Migration):
    """A fence that no transaction locks and no ROLLBACK undoes would refuse nobody."""

    dependencies = [("django_dlock", "0005_functions")]

    operations = [migrations.RunPython(to_innodb, migrations.RunPython.noop, elidable=False)]
