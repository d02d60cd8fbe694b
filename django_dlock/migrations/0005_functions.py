from typing import Any, Final

from django.db import migrations

SIGNATURE: Final = "(p_name varchar, p_token bigint, p_holder varchar, p_lock_timeout text)"

# The wait for row locks is limited, and the session's own limit restored; the application_name tells the inspector
# under whose lease the transaction works. A plan that was made while the table was small must not read the whole table
# when it has grown, so the plans are made without sequential scans.
BODY: Final = """\
CREATE OR REPLACE FUNCTION {name}{signature} RETURNS bigint LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    own_lock_timeout text := current_setting('lock_timeout');
    mark text := ' dlock:' || left(p_holder, 8);
    changed bigint;
BEGIN
    mark := left(replace(current_setting('application_name'), mark, ''), 48) || mark;
    mark := set_config('application_name', mark, true);
    p_lock_timeout := set_config('lock_timeout', p_lock_timeout, true);
    {change};
    GET DIAGNOSTICS changed = ROW_COUNT;
    own_lock_timeout := set_config('lock_timeout', own_lock_timeout, true);
    RETURN changed;
END $$"""

ADMIT: Final = """\
INSERT INTO dlock_fence AS f (name, token, holder, s_token) SELECT p_name, p_token, p_holder, 0
    WHERE p_token < 1000000000000000
    OR NOT EXISTS (SELECT 1 FROM dlock_fence AS p WHERE p.name = '' AND p.token >= p_token)
    ON CONFLICT (name) DO UPDATE SET token = excluded.token, holder = excluded.holder
    WHERE f.s_token < excluded.token
    AND (f.token < excluded.token OR (f.token = excluded.token AND f.holder = excluded.holder))"""

CONFIRM: Final = """\
UPDATE dlock_fence SET holder = holder
    WHERE name = p_name AND token = p_token AND holder = p_holder AND s_token < p_token"""


class OnPostgreSQL(migrations.RunSQL):
    """Run SQL on PostgreSQL, and nothing elsewhere."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor == "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor == "postgresql":
            super().database_backwards(app_label, schema_editor, from_state, to_state)


def function(name: str, change: str) -> OnPostgreSQL:
    """Make the function that sends this change."""
    create = BODY.format(name=name, signature=SIGNATURE, change=change)
    return OnPostgreSQL(create, f"DROP FUNCTION {name}(varchar, bigint, varchar, text)")


class Migration(migrations.Migration):
    """The statements of the fence that exclusive leases send, whose plans PostgreSQL then keeps.

    Where the functions are missing the fence sends the statements themselves. Functions that do anything else need
    other names: a release may run before its migration, and must not call those of the release before.
    """

    dependencies = [("django_dlock", "0004_lock")]

    operations = [function("dlock_admit", ADMIT), function("dlock_confirm", CONFIRM)]
