from django.db import migrations


class Migration(migrations.Migration):
    """No table: the permissions of the admin's page of locks."""

    dependencies = [("django_dlock", "0003_lease")]

    operations = [
        migrations.CreateModel(
            name="Lock",
            fields=[],
            options={
                "verbose_name": "lock",
                "verbose_name_plural": "locks",
                "permissions": (("release_lock", "Can release lock"),),
                "proxy": True,
                "indexes": [],
                "constraints": [],
                "default_permissions": ("view",),
            },
            bases=("django_dlock.fence",),
        ),
    ]
