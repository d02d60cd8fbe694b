from typing import Any

from django.db import migrations

from dlock_core.transactions import fence_functions


class OnPostgreSQL(migrations.RunSQL):
    """Run SQL on PostgreSQL, and nothing elsewhere."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor == "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor == "postgresql":
            super().database_backwards(app_label, schema_editor, from_state, to_state)


class Migration(migrations.Migration):
    """The statements of the fence that exclusive leases send, whose plans PostgreSQL then keeps.

    Where the functions are missing the fence sends the statements themselves. Their text is not kept here, because
    SQLAlchemy makes the same functions; it is as frozen there as it would be here, which a test holds.
    """

    dependencies = [("django_dlock", "0004_lock")]

    operations = [
        OnPostgreSQL(fence_functions.CREATE_ADMIT, fence_functions.DROP_ADMIT),
        OnPostgreSQL(fence_functions.CREATE_CONFIRM, fence_functions.DROP_CONFIRM),
    ]
