from typing import Any

from django.db import migrations


def add_floor(apps: Any, schema_editor: Any) -> None:
    """Every new name looks at the row of the floor, and where it is missing MariaDB locks a gap instead."""
    fences = apps.get_model("django_dlock", "Fence").objects.using(schema_editor.connection.alias)
    fences.get_or_create(name="", defaults={"token": 0, "holder": ""})


class Migration(migrations.Migration):
    dependencies = [("django_dlock", "0001_fence")]

    operations = [migrations.RunPython(add_floor, migrations.RunPython.noop)]
