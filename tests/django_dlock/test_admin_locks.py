"""The admin's page of locks keeps its promises."""

import html
import logging
import re
from contextlib import ExitStack, contextmanager
from urllib.parse import parse_qs, urlsplit

import pytest
from django.apps import apps
from django.contrib.admin.models import LogEntry
from django.contrib.auth.management import create_permissions
from django.contrib.auth.models import Permission, User
from django.test import Client, override_settings

from django_dlock.admin import locks
from django_dlock.admin.locks import plain
from dlock_core import Lock
from dlock_core.errors import LeaseLost
from dlock_core.inspect import Entry, Snapshot, cycles
from tests.django_dlock.pages import form
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("postgresql", "mariadb")  # the page reads every database of DATABASES
LOCKS = "/admin/django_dlock/lock/"
NASTY = [
    "<b>bold</b>",
    "a&b='\"",
    "line\nbreak",
    "\u202eturned",
    "пример",
    "100%",
    "x" * 500,
    "a b",
    "../../etc",
    "{{ 7 }}",
]


def text(response):
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", response.content.decode())))


def release_links(response):
    return [
        html.unescape(link) for link in re.findall(r'href="([^"]+/release/\?lease=[^"]+)"', response.content.decode())
    ]


@pytest.fixture
def operator(admin_pages, store):
    """Return a function that logs in a staff user with just these permissions."""
    create_permissions(apps.get_app_config("django_dlock"), verbosity=0)  # as migrate makes them

    def log_in(*permissions, **options):
        user = User.objects.create(username="otto", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        assert user.user_permissions.count() == len(permissions)
        client = Client(**options)
        client.force_login(user)
        return client

    return log_in


@pytest.fixture
def both(operator):
    return operator("view_lock", "release_lock")


@pytest.fixture
def held(store):
    """Return a context manager that holds the lock with this full name."""

    @contextmanager
    def hold(name="order:42"):
        lease = Lock(store, name, ttl=600, wait=0, renew=False).acquire()
        yield lease
        lease.release()

    return hold


# looking


def test_page_shows_holder_and_waiters_in_order(both, party, held, store):
    first, second = party(), party()
    with held() as lease:
        asked = [each.do(hold_and_let_go, store) for each in (first, second)]
        until(lambda: text(both.get(LOCKS)).count("waits (") == 2)
        shown = text(both.get(LOCKS))
        assert "order:42 lease · default" in shown
        assert f"token {lease.token}" in shown
        assert re.search(r"holds .* waits \(1\) .* waits \(2\) ", shown)
    assert [each.result(60) for each in asked] == [True, True]


def hold_and_let_go(store):
    with Lock(store, "order:42", ttl=600, wait=60, renew=False):
        return True


def test_page_without_locks_says_so(both):
    assert "There are no holders" in text(both.get(LOCKS))


def test_names_are_data(both, held):
    with ExitStack() as stack:
        for name in NASTY:
            stack.enter_context(held(f"data:{name}"))
        response = both.get(LOCKS)
        assert "<b>bold" not in response.content.decode()
        assert len(release_links(response)) == len(NASTY)
        for link in release_links(response):
            confirm = both.get(link)
            assert "Lock data:" in text(confirm)
            assert both.post(f"{LOCKS}release/", form(confirm)).status_code == 302
        assert "There are no holders" in text(both.get(LOCKS))


@pytest.mark.parametrize("name", ["%00", "*", "'%3B%20DROP%20TABLE%20x", "%ED%A0%80", "a::b", "x" * 100_000])
def test_any_name_can_be_asked_for(both, name):
    response = both.get(f"{LOCKS}?name={name}")
    assert response.status_code == 200
    assert "This lock has no holder" in text(response)


def test_one_lock_can_be_asked_for(both, held):
    with held("order:1"), held("order:2"):
        shown = text(both.get(LOCKS, {"name": "order:1"}))
    assert "order:1 lease" in shown
    assert "order:2" not in shown


def test_part_is_the_locks_alone(both, held):
    with held():
        response = both.get(LOCKS, {"part": "1"})
    assert "order:42" in text(response)
    assert "<html" not in response.content.decode()


def test_store_that_is_down_or_wrong_is_one_line_without_its_password(both):
    down = {"BACKEND": "redis://:geheim@127.0.0.1:1/0"}
    wrong = {"BACKEND": "redis://localhost", "TTL": "soon"}
    with override_settings(DLOCK={"memory": {"BACKEND": "memory://"}, "down": down, "wrong": wrong}):
        response = both.get(LOCKS)
    assert response.status_code == 200
    assert "down could not be read: " in text(response)
    assert "wrong could not be read: DLOCK" in text(response)
    assert response.content.decode().count('class="errornote">down could not be read: ') == 1
    assert "geheim" not in response.content.decode()
    assert "The locks are not known, because not everything could be read." in text(response)


@pytest.mark.parametrize("declared", [None, 7])
def test_project_without_stores_has_the_page_all_the_same(both, held, declared):
    with held():
        link = release_links(both.get(LOCKS))[0]
    with override_settings(DLOCK=declared):
        assert "There are no holders" in text(both.get(LOCKS))
        assert both.get(link).status_code == 302


def entry(kind, name, role, party, place=None):
    described, mode = f"<{party}>", "exclusive"
    return Entry(kind, "default", name, role, mode, {}, described, None, None, None, place, party)


def test_deadlock_is_on_top_and_what_nobody_wants_below(both, monkeypatch):
    entries = [
        entry("lease", "idle", "holder", "c"),
        entry("lease", "wanted", "holder", "d"),
        entry("lease", "wanted", "waiter", "e", 1),
        entry("lease", "order:42", "holder", "a"),
        entry("lease", "order:42", "waiter", "b", 1),
        entry("row", "shop_order 42", "holder", "b"),
        entry("row", "shop_order 42", "waiter", "a", 1),
    ]
    found = Snapshot(entries, [], cycles(entries), {"postgresql": 7})
    monkeypatch.setattr(locks, "take_snapshot", lambda *_: found)
    response = both.get(LOCKS)
    shown = text(response)
    places = [shown.index(each) for each in ("Deadlock: ", "order:42 lease", "shop_order 42 row", "wanted", "idle")]
    assert places == sorted(places)
    assert "<a> holds lease order:42 and waits for row shop_order 42" in shown
    assert "7 locks of postgresql" in shown
    assert "<a>" not in response.content.decode()
    assert release_links(response) == []  # no entry has a token


def test_page_needs_no_inline_script_or_style(both, held):
    with held():
        page = both.get(LOCKS).content.decode()
    ours = page[page.index('id="content-main"') :]
    assert "<script" not in ours
    assert not re.search(r"\son\w+=|\sstyle=|javascript:", ours)
    assert '<script src="/static/django_dlock/locks.js" defer></script>' in page


# permissions


@pytest.mark.parametrize("permissions", [[], ["release_lock"], ["view_fence"]])
def test_without_permission_nothing_is_learnt(operator, permissions, held):
    client = operator(*permissions)
    with held():
        for address in (LOCKS, f"{LOCKS}?part=1", f"{LOCKS}release/", f"{LOCKS}release/?lease=x"):
            response = client.get(address)
            assert response.status_code == 403
            assert "order" not in text(response)
        assert client.post(f"{LOCKS}release/").status_code == 403
        assert LOCKS not in client.get("/admin/").content.decode()


def test_who_is_not_logged_in_is_sent_to_the_login(admin_pages, store, held):
    with held():
        response = Client().get(LOCKS)
    assert response.status_code == 302
    assert "/login/" in response["Location"]


def test_permission_to_look_is_none_to_release(operator, both, held):
    with held() as lease:
        link = release_links(both.get(LOCKS))[0]
        User.objects.get(username="otto").user_permissions.remove(Permission.objects.get(codename="release_lock"))
        assert release_links(both.get(LOCKS)) == []
        assert both.get(link).status_code == 403
        assert both.post(f"{LOCKS}release/", reference(link)).status_code == 403
        lease.ensure_held()


def test_index_lists_the_page(operator):
    assert f'href="{LOCKS}"' in operator("view_lock").get("/admin/").content.decode()


def test_other_admin_pages_of_a_lock_do_not_exist(both):
    for path in ("add/", "order:42/change/", "order:42/delete/", "order:42/history/"):
        assert both.get(f"{LOCKS}{path}").status_code == 404
    assert both.post(LOCKS).status_code == 405


# releasing


def reference(link):
    return {key: values[0] for key, values in parse_qs(urlsplit(link).query).items()}


def test_lease_is_released_after_a_confirmation(both, caplog, held):
    with held() as lease:
        confirm = both.get(release_links(both.get(LOCKS))[0])
        shown = text(confirm)
        assert "Lock order:42 Store default Held by" in shown
        assert f"Token {lease.token}" in shown
        with caplog.at_level(logging.WARNING, "dlock"):
            response = both.post(f"{LOCKS}release/", form(confirm), follow=True)
        assert "Released: order:42" in text(response)
        assert "There are no holders" in text(response)
        assert any(f"token {lease.token}) was ended by otto" in record.message for record in caplog.records)
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.object_repr, entry.object_id) == ("otto", "order:42", "order:42")
    assert str(lease.token) in entry.get_change_message()
    assert "order:42" in text(both.get("/admin/"))


def test_displaced_holder_learns_of_it(both, held):
    with held() as lease:
        both.post(f"{LOCKS}release/", reference(release_links(both.get(LOCKS))[0]))
        with pytest.raises(LeaseLost):
            lease.renew()


def test_looking_at_the_confirmation_never_releases(both, held):
    with held() as lease:
        link = release_links(both.get(LOCKS))[0]
        for method in (both.get, both.head, both.options):
            method(link)
        lease.renew()
    assert not LogEntry.objects.exists()


def test_newer_lease_is_never_released(both, held):
    with held():
        link = release_links(both.get(LOCKS))[0]
    with held() as newer:
        response = both.post(f"{LOCKS}release/", reference(link), follow=True)
        assert "has ended by itself" in text(response)
        assert "has ended by itself" in text(both.get(link, follow=True))
        newer.renew()
    assert not LogEntry.objects.exists()


def test_release_without_csrf_is_refused(operator, held):
    client = operator("view_lock", "release_lock", enforce_csrf_checks=True)
    with held() as lease:
        confirm = client.get(release_links(client.get(LOCKS))[0])
        sent = form(confirm)
        without = {key: value for key, value in sent.items() if key != "csrfmiddlewaretoken"}
        assert client.post(f"{LOCKS}release/", without).status_code == 403
        lease.renew()
        assert client.post(f"{LOCKS}release/", sent).status_code == 302


@pytest.mark.parametrize("forged", ["", '["default","order:42",1]:x', "\x00ü"])
def test_forged_reference_releases_nothing(both, forged, held):
    with held() as lease:
        assert both.get(f"{LOCKS}release/", {"lease": forged}).status_code == 302
        assert both.post(f"{LOCKS}release/", {"lease": forged}).status_code == 302
        assert both.post(f"{LOCKS}release/").status_code == 302
        lease.renew()


def test_store_that_went_away_before_the_release_is_told(both, held):
    with held():
        link = release_links(both.get(LOCKS))[0]
    with override_settings(DLOCK={"default": {"BACKEND": "redis://:geheim@127.0.0.1:1/0"}}):
        response = both.post(f"{LOCKS}release/", reference(link), follow=True)
    assert "default could not be read: " in text(response)
    assert "geheim" not in response.content.decode()
    with override_settings(DLOCK={"other": {"BACKEND": "memory://"}}):
        assert "has ended by itself" in text(both.post(f"{LOCKS}release/", reference(link), follow=True))


def test_words_of_others_are_made_printable():
    assert plain("a\u202eb\x1b[31m\n") == "a?b?[31m?"
