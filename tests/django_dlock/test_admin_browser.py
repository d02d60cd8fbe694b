"""The admin's pages in a real browser: Chromium, headless."""

from collections.abc import Iterator

import pytest
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.test.testcases import LiveServerThread

from dlock_core import Lock
from tests.chromium import Chromium
from tests.conftest import give_up
from tests.django_dlock.admin_fixtures import change
from tests.servers import ServerMissing
from tests.testapp.models import Ticket

pytestmark = pytest.mark.usefixtures("postgresql", "mariadb")  # the page reads every database of DATABASES
LOCKS = "/admin/django_dlock/lock/"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    try:
        chromium = Chromium(tmp_path_factory.mktemp("chromium"))
    except ServerMissing as missing:
        give_up(str(missing))
    with chromium:
        yield chromium


@pytest.fixture
def server(admin_pages) -> Iterator[str]:
    thread = LiveServerThread("127.0.0.1", StaticFilesHandler)
    thread.daemon = True
    thread.start()
    thread.is_ready.wait()
    assert not thread.error
    yield f"http://127.0.0.1:{thread.port}"
    thread.terminate()


@pytest.fixture
def chromium(program, server, browser, store) -> Iterator[Chromium]:
    program.log_in(server, browser)
    yield program
    program.go("about:blank")  # stops the requests to the server


def test_lock_appears_and_goes_while_one_looks(chromium, server, store):
    chromium.go(f"{server}{LOCKS}")
    assert "There are no holders" in chromium.text()
    lease = Lock(store, "order:42", ttl=600, renew=False).acquire()
    chromium.until("document.body.innerText.includes('order:42')")
    assert f"token {lease.token}" in chromium.text()
    lease.release()
    chromium.until("document.body.innerText.includes('There are no holders')")
    assert "Live" in chromium.text()


def test_lease_is_released_by_two_clicks(chromium, server, store):
    lease = Lock(store, "order:42", ttl=600, renew=False).acquire()
    chromium.go(f"{server}{LOCKS}")
    chromium.click("#dlock-locks a.button")
    assert "Release this lease?" in chromium.text()
    assert str(lease.token) in chromium.text()
    chromium.click(".submit-row input[type=submit]")
    assert "Released: order:42" in chromium.text()
    assert "There are no holders" in chromium.text()
    lease.release()


def test_keyboard_stays_where_it_was_when_the_page_is_refreshed(chromium, server, store):
    with Lock(store, "order:42", ttl=600, renew=False):
        chromium.go(f"{server}{LOCKS}")
        chromium.js("(window.old = document.querySelector('#dlock-locks a.button')).focus()")
        chromium.until("!window.old.isConnected")
        assert chromium.js("document.activeElement.textContent") == "Release…"


def test_hidden_page_asks_nothing_and_a_shown_one_at_once(chromium, server, store):
    chromium.go(f"{server}{LOCKS}")
    chromium.js("window.asked = 0; window.ask = window.fetch; window.fetch = (...to) => { asked++; return ask(...to) }")
    chromium.js("document.getElementById('dlock-locks').dataset.every = '10'")
    chromium.until("window.asked > 2")
    see = "Object.defineProperty(document, 'hidden', {{configurable: true, value: {}}});"
    chromium.js(see.format("true") + "document.dispatchEvent(new Event('visibilitychange'))")
    asked = chromium.js("new Promise(done => setTimeout(() => { asked = 0; setTimeout(() => done(asked), 500) }, 500))")
    assert asked == 0
    chromium.js(see.format("false") + "document.dispatchEvent(new Event('visibilitychange'))")
    chromium.until("window.asked > 0")


def test_who_was_logged_out_is_told(chromium, server, store, browser):
    chromium.go(f"{server}{LOCKS}")
    browser.logout()
    chromium.until("document.body.innerText.includes('Logged out: reload the page')")


@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_the_screen(chromium, server, store, width):
    chromium.size(width)
    with Lock(store, "order:" + "long" * 60, ttl=600, renew=False):
        for page in (LOCKS, f"{LOCKS}?name=x"):
            chromium.go(f"{server}{page}")
            assert chromium.js("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("width", [390, 1280])
def test_conflict_is_settled_by_choosing(chromium, server, ticket, width):
    chromium.size(width)
    chromium.go(f"{server}/admin/testapp/ticket/{ticket.pk}/change/")
    change(ticket, title="theirs", notes="theirs")
    chromium.js("for (const name of ['title', 'notes']) document.getElementById('id_' + name).value = 'mine'")
    chromium.click("input[name=_save]")
    assert "Nothing of yours has been saved yet" in chromium.text()
    assert chromium.js("document.documentElement.scrollWidth <= window.innerWidth")
    chromium.js("document.querySelector('.submit-row input').click()")  # the page stays: two fields are undecided
    chromium.js("document.querySelector('[name=dlock_version_title][value=mine]').click()")
    chromium.js("document.querySelector('[name=dlock_version_notes][value=theirs]').click()")
    chromium.click(".submit-row input")
    assert "was changed successfully" in chromium.text()
    ticket = Ticket.objects.get()
    assert (ticket.title, ticket.notes) == ("mine", "theirs")
