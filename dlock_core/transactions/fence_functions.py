"""Creates the fence's functions on PostgreSQL; `fence_sql` calls them.

They do the same as the statements in `fence_sql`, but PostgreSQL keeps their plans, and no plan outlives the table that
it was made for. Migrations of `django_dlock`, create_all() and Alembic run this text, so it must never change once it
was released: functions that behave differently need other names, because a release may run before its migration, and
must not call those of the previous release. See docs/adr/0017-fence-functions.md.
"""

from typing import Final

__all__ = ["CREATE_ADMIT", "CREATE_BOTH", "CREATE_CONFIRM", "DROP_ADMIT", "DROP_CONFIRM"]

_SIGNATURE: Final = "(varchar, bigint, varchar, text)"
_PARAMETERS: Final = "(p_name varchar, p_token bigint, p_holder varchar, p_lock_timeout text)"

# The wait for row locks is limited, and the session's own limit restored; the application_name shows the inspector
# under which lease the transaction works. A plan that was made while the table was small must not read the whole table
# when it has grown, so the plans are made without sequential scans.
# PostgreSQL keeps the plan of a statement in a function even when a table of the same name is created later, in a
# schema that is earlier in the search path. So the kept plan is for the table of the function's own schema, by its full
# name, and changes nothing unless the caller's search path leads there at that moment, when the table is already
# locked. If nothing was changed, the text is planned again: a refusal never comes from a kept plan.
_TEMPLATE: Final = """\
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

_ADMIT: Final = """\
INSERT INTO {fence} AS f (name, token, holder, s_token) SELECT {name}, {t}, {holder}, 0
        WHERE {check}({t} < 1000000000000000
        OR NOT EXISTS (SELECT 1 FROM {fence} AS p WHERE p.name = '' AND p.token >= {t}))
        ON CONFLICT (name) DO UPDATE SET token = excluded.token, holder = excluded.holder
        WHERE f.s_token < excluded.token
        AND (f.token < excluded.token OR (f.token = excluded.token AND f.holder = excluded.holder))"""

_CONFIRM: Final = """\
UPDATE {fence} SET holder = holder
        WHERE {check}name = {name} AND token = {t} AND holder = {holder} AND s_token < {t}"""


def _create(name: str, change: str) -> str:
    """Return the statement that creates the function which executes this change."""
    check = "to_regclass('dlock_fence') = to_regclass(%2$L) AND "
    kept = change.format(fence="%1$s", check=check, name="p_name", t="p_token", holder="p_holder")
    anew = change.format(fence="dlock_fence", check="", name="$1", t="$2", holder="$3")
    return _TEMPLATE.format(name=name, signature=_PARAMETERS, kept=kept, anew=anew)


CREATE_ADMIT: Final = _create("dlock_admit", _ADMIT)
CREATE_CONFIRM: Final = _create("dlock_confirm", _CONFIRM)
DROP_ADMIT: Final = f"DROP FUNCTION IF EXISTS dlock_admit{_SIGNATURE}"
DROP_CONFIRM: Final = f"DROP FUNCTION IF EXISTS dlock_confirm{_SIGNATURE}"

CREATE_BOTH: Final = f"""\
DO $both$ BEGIN
EXECUTE $one$
{CREATE_ADMIT}
$one$;
EXECUTE $two$
{CREATE_CONFIRM}
$two$;
END $both$"""
"""Creates both in one statement: a driver that prepares its statements accepts only one at a time."""
