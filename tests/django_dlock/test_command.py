"""`manage.py dlock`: who holds, who waits; the fence table kept small."""

from __future__ import annotations

import json
import sys
import threading
import time

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import override_settings

from django_dlock import lock
from django_dlock.errors import StaleToken
from django_dlock.fencing import TableFence
from django_dlock.models import Fence
from django_dlock.purge import purge
from dlock_core import AcquireTimeout
from dlock_core.fencing import Claim

DAY = 86_400_000_000


@pytest.fixture
def stores(redis_server):
    with override_settings(DLOCK={"default": {"BACKEND": redis_server.url}, "memory": {"BACKEND": "memory://"}}):
        yield


def listed(capsys, *options):
    call_command("dlock", "list", *options)
    return capsys.readouterr().out


def test_list_shows_holders_and_waiters_of_every_store_in_order(stores, capsys):
    def wait():
        with pytest.raises(AcquireTimeout):
            lock("order", 42, fence=False, wait=3).acquire()

    with lock("order", 42, fence=False, ttl=20) as lease, lock("note", "ä", store="memory", shared=True, fence=False):
        threads = [threading.Thread(target=wait, name=f"waiter-{n}") for n in range(2)]
        for place, thread in enumerate(threads, 1):
            thread.start()
            while len(json.loads(listed(capsys, "--format", "json"))["entries"]) < 2 + place:
                time.sleep(0.01)
        locks = json.loads(listed(capsys, "--format", "json"))["entries"]
        table = listed(capsys)
        for thread in threads:
            thread.join()
    holder, first, second, note = locks
    assert (holder["role"], holder["name"], holder["mode"], holder["token"]) == (
        "holder", "order:42", "exclusive", lease.token,
    )  # fmt: skip
    assert 0 < holder["expires_in"] <= 20
    assert (first["owner"]["thread"], first["place"]) == ("waiter-0", 1)
    assert (second["owner"]["thread"], second["place"]) == ("waiter-1", 2)
    assert (note["name"], note["mode"], note["source"]) == ("note:%C3%A4", "shared", "memory")
    assert "order:42" in table
    assert "2 holders, 2 waiters" in table


def test_list_of_nothing_says_so(stores, capsys):
    assert "0 holders, 0 waiters" in listed(capsys)


def test_store_that_is_down_is_one_line_and_exit_code_1(capsys):
    stores = {"default": {"BACKEND": "redis://:secret@localhost:1"}, "memory": {"BACKEND": "memory://"}}
    with override_settings(DLOCK=stores), pytest.raises(CommandError, match="1 of 2 stores") as failure:
        call_command("dlock", "list")
    output = capsys.readouterr().out
    assert failure.value.returncode == 1
    assert "default: store unavailable" in output
    assert "secret" not in output


def test_control_characters_and_markup_of_an_owner_do_nothing_to_the_terminal(stores, capsys):
    from dlock_core.owner import request_line

    token = request_line.set("GET /\x1b[2J[red]/orders")
    try:
        with lock("order", 42, fence=False):
            output = listed(capsys)
    finally:
        request_line.reset(token)
    assert "\x1b" not in output
    assert "[red]" in output.replace("\n", "")


def test_purge_replaces_old_rows_by_a_floor_that_refuses_their_tokens(database):
    now = int(time.time() * 1_000_000)
    rows = {"old": now - 40 * DAY, "older": now - 50 * DAY, "young": now - DAY, "revision": 7}
    for name, token in rows.items():
        Fence.objects.using(database).create(name=name, token=token, holder="a")
    assert purge(database, 30) == 2
    left = dict(Fence.objects.using(database).values_list("name", "token"))
    assert left == {"": rows["old"], "young": rows["young"], "revision": 7}
    from django.db import connections

    for token in (rows["older"], rows["old"]):
        with pytest.raises(StaleToken), transaction.atomic(using=database):
            TableFence().admit(connections[database], Claim("old", token, "b" * 32))
    with transaction.atomic(using=database):
        TableFence().admit(connections[database], Claim("old", rows["old"] + 1, "b" * 32))
        TableFence().admit(connections[database], Claim("other revision", 3, "b" * 32))


def test_purge_counts_shared_holders_as_well(database):
    now = int(time.time() * 1_000_000)
    rows = {"shared long ago": (0, now - 40 * DAY), "shared now": (now - 50 * DAY, now - DAY)}
    for name, (token, s_token) in rows.items():
        Fence.objects.using(database).create(name=name, token=token, holder="", s_token=s_token)
    assert purge(database, 30) == 1
    left = dict(Fence.objects.using(database).values_list("name", "token"))
    assert left == {"": now - 40 * DAY, "shared now": now - 50 * DAY}


def test_purge_of_the_last_day_is_refused(database):
    with pytest.raises(CommandError, match="at least 1"):
        call_command("dlock", "purge", "--days", "0", "--database", database)


def test_unknown_store_is_named_and_the_known_ones_too(stores):
    with pytest.raises(CommandError, match="no store 'nope', only: 'default', 'memory'"):
        call_command("dlock", "list", "--store", "nope")


def test_table_without_rich_says_what_to_install(stores, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(CommandError, match=r"dlock-orm\[cli\]"):
        call_command("dlock", "list")
    call_command("dlock", "list", "--format", "json")
