from django.db import migrations, models

import django_dlock.models


class Migration(migrations.Migration):
    """Not on SQLite, whose leases have a file of their own."""

    dependencies = [("django_dlock", "0002_floor")]

    operations = [
        migrations.CreateModel(
            name="Lease",
            fields=[
                ("name", django_dlock.models.LockNameField(max_length=512, primary_key=True, serialize=False)),
                ("token", models.BigIntegerField()),
                ("holder", models.CharField(max_length=32)),
                ("owner", models.TextField()),
                ("since", models.BigIntegerField()),
                ("expires_at", models.BigIntegerField(db_index=True)),
                ("wanted_until", models.BigIntegerField(db_default=0, default=0)),
            ],
            options={
                "db_table": "dlock_lease",
                "default_permissions": ("view",),
                "required_db_features": ("has_select_for_update",),
            },
        ),
    ]
