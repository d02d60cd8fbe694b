"""The race's page: a button starts the race, which shows live which orders went wrong under which strategy."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.acceptance.test_race import SHOP, STRATEGIES
from tests.conftest import give_up

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the shop as a newcomer does, on a socket that is already listening."""
    home = tmp_path_factory.mktemp("site")
    clean = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    clean |= {"PYTHONPATH": str(SHOP.parent), "DJANGO_SETTINGS_MODULE": "shopsite.settings"}
    clean |= {"DATABASE_URL": f"sqlite:///{home}/shop.sqlite3", "XDG_RUNTIME_DIR": str(home)}
    subprocess.run([sys.executable, "manage.py", "migrate", "-v0"], cwd=SHOP, env=clean, check=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd, port = listener.fileno(), listener.getsockname()[1]
        command = [sys.executable, "-m", "gunicorn", "shopsite.wsgi", f"--bind=fd://{fd}", "--threads=4"]
        server = subprocess.Popen(command, cwd=SHOP, env=clean, pass_fds=[fd], stderr=subprocess.DEVNULL)
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait(60)


@pytest.fixture(scope="module")
def events(site: str) -> list[dict[str, object]]:
    """Return what one race reported, from the button to its end."""
    with httpx.Client(base_url=site, timeout=60) as browser:
        page = browser.get("/race/")
        assert page.text.count("<i></i>") == 80 * len(STRATEGIES)
        assert browser.post("/race/start/").status_code == 403
        started = browser.post("/race/start/", headers={"X-CSRFToken": page.cookies["csrftoken"], "Referer": site})
        assert started.status_code == 302
        text, state = "", "running"
        while state == "running":
            answer = browser.get("/race/lines/", params={"from": len(text)})
            text, state = text + answer.text, answer.headers["Race"]
            threading.Event().wait(0.1)
    assert state == "over"
    return [json.loads(line) for line in text.splitlines()]


def test_race_tells_of_every_order_under_every_strategy(events):
    told = [event for event in events if "order" in event]
    assert len(told) == 80 * len(STRATEGIES)
    for strategy in STRATEGIES:
        assert {event["order"] for event in told if event["strategy"] == strategy} == set(range(80))
    wrong = {event["strategy"] for event in told if len(event["done"]) == 2}
    assert wrong == {"none"}


@pytest.mark.parametrize("position", ["nonsense", "-1", "9" * 400, "\N{SUPERSCRIPT TWO}"])
def test_position_that_is_none_gives_the_lines_from_the_start_or_nothing(site, events, position):
    answer = httpx.get(f"{site}/race/lines/", params={"from": position})
    assert answer.status_code == 200
    assert answer.text in {"", httpx.get(f"{site}/race/lines/", params={"from": 0}).text}


def test_page_in_a_browser_shows_red_orders_under_none_and_no_others(site, events, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        give_up("chromium is missing: on Debian, apt-get install chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--virtual-time-budget=5000"]
    done = subprocess.run([browser, *flags, "--dump-dom", f"{site}/race/"], capture_output=True, text=True, check=True)
    found = {name: len(re.findall('<i class="wrong">', card)) for name, card in cards(done.stdout).items()}
    counted = sum(event.get("strategy") == "none" and len(event.get("done", ())) == 2 for event in events)
    assert found == dict.fromkeys(STRATEGIES, 0) | {"none": counted}
    assert counted > 0


def cards(page: str) -> dict[str, str]:
    return dict(re.findall(r'<section class="card race[^"]*" id="race-(\w+)">(.*?)</section>', page, re.S))
