from typing import Any, Final

from django.db import migrations

SIGNATURE: Final = "(p_name varchar, p_token bigint, p_holder varchar, p_lock_timeout text)"

# The wait for row locks is limited, and the session's own limit restored; the application_name tells the inspector
# under whose lease the transaction works. A plan that was made while the table was small must not read the whole table
# when it has grown, so the plans are made without sequential scans.
#
# PostgreSQL keeps the plan of a statement in a function even when a table of the same name is created later, in a
# schema that stands earlier in the search path. So the kept plan is for the table of the function's own schema, by its
# full name, and changes nothing unless the caller's search path leads there at that moment, when the table is locked
# already. Where nothing was changed the text is read anew: a refusal never comes from a kept plan.
CREATE: Final = """\
DO $do$ BEGIN EXECUTE format($format$
CREATE OR REPLACE FUNCTION {name}{signature} RETURNS bigint LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    own_lock_timeout text := current_setting('lock_timeout');
    mark text := ' dlock:' || left(p_holder, 8);
    changed bigint := 0;
BEGIN
    mark := left(replace(current_setting('application_name'), mark, ''), 48) || mark;
    mark := set_config('application_name', mark, true);
    p_lock_timeout := set_config('lock_timeout', p_lock_timeout, true);
    IF to_regclass('dlock_fence') = to_regclass(%2$L) THEN
        {kept};
        GET DIAGNOSTICS changed = ROW_COUNT;
    END IF;
    IF changed = 0 THEN
        EXECUTE $change$
        {anew}
        $change$ USING p_name, p_token, p_holder;
        GET DIAGNOSTICS changed = ROW_COUNT;
    END IF;
    own_lock_timeout := set_config('lock_timeout', own_lock_timeout, true);
    RETURN changed;
END $$
$format$, format('%I.dlock_fence', current_schema()), format('%I.dlock_fence', current_schema())); END $do$"""

ADMIT: Final = """\
INSERT INTO {fence} AS f (name, token, holder, s_token) SELECT {name}, {t}, {holder}, 0
        WHERE {check}({t} < 1000000000000000
        OR NOT EXISTS (SELECT 1 FROM {fence} AS p WHERE p.name = '' AND p.token >= {t}))
        ON CONFLICT (name) DO UPDATE SET token = excluded.token, holder = excluded.holder
        WHERE f.s_token < excluded.token
        AND (f.token < excluded.token OR (f.token = excluded.token AND f.holder = excluded.holder))"""

CONFIRM: Final = """\
UPDATE {fence} SET holder = holder
        WHERE {check}name = {name} AND token = {t} AND holder = {holder} AND s_token < {t}"""


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
    check = "to_regclass('dlock_fence') = to_regclass(%2$L) AND "
    kept = change.format(fence="%1$s", check=check, name="p_name", t="p_token", holder="p_holder")
    anew = change.format(fence="dlock_fence", check="", name="$1", t="$2", holder="$3")
    create = CREATE.format(name=name, signature=SIGNATURE, kept=kept, anew=anew)
    return OnPostgreSQL(create, f"DROP FUNCTION IF EXISTS {name}(varchar, bigint, varchar, text)")


class Migration(migrations.Migration):
    """The statements of the fence that exclusive leases send, whose plans PostgreSQL then keeps.

    Where the functions are missing the fence sends the statements themselves. Functions that do anything else need
    other names: a release may run before its migration, and must not call those of the release before.
    """

    dependencies = [("django_dlock", "0004_lock")]

    operations = [function("dlock_admit", ADMIT), function("dlock_confirm", CONFIRM)]
