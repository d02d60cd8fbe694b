"""`manage.py dlock` has the commands of the core, with Django's stores, databases and conventions."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test import override_settings

from django_dlock import lock
from django_dlock.errors import StaleToken
from django_dlock.fencing import TableFence
from django_dlock.models import Fence
from django_dlock.operations import purge
from dlock_core.backend import Released
from dlock_core.transactions.fencing import FenceEntry
from tests.waiting import until

DAY = 86_400_000_000
ONLY_STORES = ("--database", "default")
"""SQLite has no locks to show, and needs no server."""


@pytest.fixture(autouse=True)
def width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def stores(redis_server, redis_store):
    with override_settings(DLOCK={"default": {"BACKEND": redis_server.url}, "memory": {"BACKEND": "memory://"}}):
        yield


def called(*args, **options):
    out = io.StringIO()
    call_command("dlock", *args, stdout=out, **options)
    return out.getvalue()


def listed(*options):
    return called("list", *ONLY_STORES, *options)


def entries():
    return json.loads(listed("--format", "json"))["entries"]


def test_list_shows_holders_and_waiters_of_every_store_in_order(stores):
    def wait():
        lock("order", 42, fence=False, wait=60).acquire().release()

    with lock("order", 42, fence=False, ttl=20) as lease, lock("note", "ä", store="memory", shared=True, fence=False):
        threads = [threading.Thread(target=wait, name=f"waiter-{n}") for n in range(2)]
        for place, thread in enumerate(threads, 1):
            thread.start()
            until(lambda place=place: len(entries()) >= 2 + place)
        holder, first, second, note = entries()
        table = listed()
    for thread in threads:
        thread.join()
    assert (holder["role"], holder["name"], holder["mode"], holder["token"]) == (
        "holder", "order:42", "exclusive", lease.token,
    )  # fmt: skip
    assert 0 < holder["expires_in"] <= 20
    assert (first["owner"]["thread"], first["position"]) == ("waiter-0", 1)
    assert (second["owner"]["thread"], second["position"]) == ("waiter-1", 2)
    assert (note["name"], note["mode"], note["source"]) == ("note:%C3%A4", "shared", "memory")
    assert "order:42" in table
    assert "2 holders, 2 waiters" in table


def test_list_of_nothing_says_so(stores):
    assert listed() == "0 holders, 0 waiters\n"


def test_store_that_is_down_is_one_line_and_exit_code_1(capsys):
    stores = {"default": {"BACKEND": "redis://:secret@localhost:1"}, "memory": {"BACKEND": "memory://"}}
    with override_settings(DLOCK=stores), pytest.raises(CommandError, match="1 of 3 stores and databases") as failure:
        call_command("dlock", "list", *ONLY_STORES)
    output = capsys.readouterr().out
    assert failure.value.returncode == 1
    assert "default: ConnectionError" in output
    assert "secret" not in output


def test_control_characters_and_markup_of_an_owner_do_nothing_to_the_terminal(stores):
    from dlock_core.owner import request_line

    token = request_line.set("GET /\x1b[2J[red]/orders")
    try:
        with lock("order", 42, fence=False):
            output = listed()
    finally:
        request_line.reset(token)
    assert "\x1b" not in output
    assert "[red]" in output


def test_show_and_release_of_a_lock(stores):
    lease = lock("order", 42, fence=False).acquire()
    assert f"token: {lease.token}" in called("show", "order:42", *ONLY_STORES)
    assert f"token {lease.token}" in called("release", "order:42", "--no-input")
    assert lease.release() is Released.EXPIRED
    with pytest.raises(CommandError, match="has no holder") as failure:
        called("show", "order:42", *ONLY_STORES)
    assert failure.value.returncode == 1


def test_options_may_be_given_by_name_as_to_every_command(stores):
    lease = lock("order", 42, fence=False).acquire()
    told = json.loads(called("list", format="json", store=["default"], database=["default"]))
    assert [entry["token"] for entry in told["entries"]] == [lease.token]
    called("release", name="order:42", token=lease.token, interactive=False)
    assert lease.release() is Released.EXPIRED


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["list", "--store", "nope"], "no store 'nope', only: 'default', 'memory'"),
        (["list", "--database", "nope"], "no database 'nope', only: 'default'"),
        (["purge", "--days", "0"], "0 is not in the range"),
        (["nosuch"], "nosuch"),
        ([], "Usage"),
    ],
)
def test_wrong_usage_has_the_return_code_2(stores, options, says):
    with pytest.raises(CommandError) as failure:
        called(*options)
    assert failure.value.returncode == 2
    assert says in str(failure.value)


def test_django_takes_its_own_options_anywhere_in_the_line(stores):
    output = called("list", "--no-color", "-v", "2", *ONLY_STORES)
    assert output == "0 holders, 0 waiters\n"
    with lock("order", 42, fence=False):
        assert "\x1b[" in listed("--force-color")
        assert "\x1b[" not in listed()


def test_name_that_looks_like_an_option_follows_two_dashes(stores):
    with pytest.raises(CommandError, match="no lease of '--no-color' is held"):
        called("release", "--no-input", "--", "--no-color")


def test_manage_py_ends_with_the_exit_code_of_the_verb(redis_server):
    program = "from django.core.management import execute_from_command_line as run; import sys; run(['manage.py', *sys.argv[1:]])"

    def manage(*args):
        environment = {
            **__import__("os").environ,
            "DLOCK_URL": redis_server.url,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
        }
        return subprocess.run(
            [sys.executable, "-c", program, "dlock", *args],
            capture_output=True, text=True, timeout=60, check=False, env=environment, cwd=Path(__file__).parents[2],
        )  # fmt: skip

    missing = manage("release", "nobody:has:it", "--settings=tests.settings", "--no-input")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "CommandError: no lease of 'nobody:has:it' is held" in missing.stderr
    told = manage("--help")
    assert told.returncode == 0
    assert "release" in told.stdout


def test_doctor_knows_the_settings(stores, monkeypatch):
    middleware = ["django.middleware.security.SecurityMiddleware", "django_dlock.middleware.LockMiddleware"]
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    with override_settings(MIDDLEWARE=middleware):
        findings = doctored("--store", "default", *ONLY_STORES)
    assert findings["Django", "middleware"] == ("ok", "LockMiddleware is number 2 of 2, after SecurityMiddleware")
    assert findings["default", "ATOMIC_REQUESTS"][:2] == ("ok", "on")
    assert findings["Django", "dlock.I001"][0] == "ok"
    assert findings["Django", "dlock.W011"][0] == "warning"
    assert findings["default", "pool"][0] == "ok"


def test_doctor_tells_what_the_checks_tell(stores):
    with override_settings(
        MIDDLEWARE=["django_dlock.middleware.LockMiddleware", "corsheaders.middleware.CorsMiddleware"]
    ):
        findings = doctored("--store", "default", *ONLY_STORES)
    level, measured = findings["Django", "dlock.W002"]
    assert level == "warning"
    assert "CorsMiddleware" in measured


def test_pool_of_one_connection_is_a_warning(monkeypatch):
    from django_dlock.operations import findings

    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", {"pool": {"max_size": 1}})
    assert {one.check: one.level for one in findings(["default"])}["pool"] == "warning"


def doctored(*options):
    out = io.StringIO()
    with contextlib.suppress(CommandError):  # something about a store in memory is always unsafe
        call_command("dlock", "doctor", "--format", "json", *options, stdout=out)
    return {
        (one["source"], one["check"]): (one["level"], one["measured"])
        for one in json.loads(out.getvalue())["findings"]
        if one["subject"] != "store"
    }


def test_purge_replaces_old_rows_by_a_floor_that_refuses_their_tokens(database):
    now = int(time.time() * 1_000_000)
    rows = {"old": now - 40 * DAY, "older": now - 50 * DAY, "young": now - DAY, "revision": 7}
    for name, token in rows.items():
        Fence.objects.using(database).create(name=name, token=token, holder="a")
    assert purge(database, 30) == 2
    left = dict(Fence.objects.using(database).values_list("name", "token"))
    assert left == {"": rows["old"], "young": rows["young"], "revision": 7}
    for token in (rows["older"], rows["old"]):
        with pytest.raises(StaleToken), transaction.atomic(using=database):
            TableFence().admit(connections[database], FenceEntry("old", token, "b" * 32))
    with transaction.atomic(using=database):
        TableFence().admit(connections[database], FenceEntry("old", rows["old"] + 1, "b" * 32))
        TableFence().admit(connections[database], FenceEntry("other revision", 3, "b" * 32))


def test_purge_keeps_what_is_raised_above_the_floor_meanwhile(database):
    """Its clock may be days ahead of the store's, so that every row looks old."""
    now = int(time.time() * 1_000_000)
    Fence.objects.using(database).create(name="old", token=now - 50 * DAY, holder="a")
    Fence.objects.using(database).create(name="at work", token=now - 60 * DAY, holder="a")

    def work_meanwhile(execute, sql, params, many, context):
        answer = execute(sql, params, many, context)
        if sql.startswith("INSERT"):  # the floor is set, and nothing is deleted yet
            Fence.objects.using(database).filter(name="at work").update(token=now - 50 * DAY + 1)
        return answer

    with connections[database].execute_wrapper(work_meanwhile):
        assert purge(database, 30) == 1
    left = dict(Fence.objects.using(database).values_list("name", "token"))
    assert left == {"": now - 50 * DAY, "at work": now - 50 * DAY + 1}


def test_purge_never_lowers_the_floor_of_an_earlier_one(database):
    now = int(time.time() * 1_000_000)
    Fence.objects.using(database).create(name="", token=now - 40 * DAY, holder="")
    Fence.objects.using(database).create(name="was at work then", token=now - 50 * DAY, holder="a")
    assert (purge(database, 30), purge(database, 30)) == (1, 0)
    assert dict(Fence.objects.using(database).values_list("name", "token")) == {"": now - 40 * DAY}


def test_purge_counts_shared_holders_as_well(database):
    now = int(time.time() * 1_000_000)
    rows = {"shared long ago": (0, now - 40 * DAY), "shared now": (now - 50 * DAY, now - DAY)}
    for name, (token, s_token) in rows.items():
        Fence.objects.using(database).create(name=name, token=token, holder="", s_token=s_token)
    assert purge(database, 30) == 1
    left = dict(Fence.objects.using(database).values_list("name", "token"))
    assert left == {"": now - 40 * DAY, "shared now": now - 50 * DAY}


def test_purge_removes_rows_that_never_had_a_token(database):
    Fence.objects.using(database).create(name="looked at by a stranger", token=0, holder="")
    Fence.objects.using(database).create(name="revision", token=0, holder="", s_token=7)
    assert purge(database, 30) == 1
    assert set(Fence.objects.using(database).values_list("name", flat=True)) == {"", "revision"}


def test_purge_removes_what_shared_holders_of_names_that_strangers_chose_have_left(database, redis_server):
    with override_settings(DLOCK={"default": {"BACKEND": redis_server.url}}):
        for number in range(20):
            with lock("stranger", number, using=database, shared=True, fence="lease" if number % 2 else True):
                pass
    assert Fence.objects.using(database).count() == 20
    assert purge(database, 0) == 20
    assert list(Fence.objects.using(database).values_list("name", flat=True)) == [""]


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_purge_leaves_what_a_transaction_is_at_work_on(database):
    now = int(time.time() * 1_000_000)
    for name in ("busy", "old"):
        Fence.objects.using(database).create(name=name, token=now - 40 * DAY, holder="a")
    with transaction.atomic(using=database):
        Fence.objects.using(database).select_for_update().get(name="busy")
        thread = threading.Thread(target=purge_elsewhere, args=(database, found := []))
        thread.start()
        thread.join()
    assert found == [1]
    assert set(Fence.objects.using(database).values_list("name", flat=True)) == {"", "busy"}


def purge_elsewhere(database, found):
    try:
        found.append(purge(database, 30))
    finally:
        connections[database].close()


def test_purge_says_what_it_did(database):
    Fence.objects.using(database).create(name="old", token=int(time.time() * 1_000_000) - 40 * DAY, holder="a")
    assert called("purge", "--database", database) == f"1 fence rows older than 30 days removed from {database}\n"


@pytest.mark.parametrize("package", ["click", "rich"])
def test_command_without_its_extra_says_what_to_install(package):
    program = f"""
import sys
sys.modules[{package!r}] = None
import os, django
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
from django.core.management import execute_from_command_line
execute_from_command_line(["manage.py", "dlock", "list"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 1
    assert "pip install 'dlock-orm[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
