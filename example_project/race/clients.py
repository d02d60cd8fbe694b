"""The customers of a race: processes that ship and cancel the same orders at the same moment, over HTTP.

They know no framework and no database: they report what a customer sees.
"""

import multiprocessing
import multiprocessing.synchronize
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.cookies import SimpleCookie
from multiprocessing.pool import Pool

from . import RaceFailed, Shop

PATIENCE = 60  # seconds to wait for an answer of the shop, or a report of a client

ACTIONS = ("ship", "cancel")


@dataclass(frozen=True)
class Pair:
    """One order, and the two requests to be sent for it at once, by their actions."""

    port: int
    csrf: str
    order: int
    paths: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """The answer to one request: its HTTP status (0: no answer), and its times, by a clock that all processes share."""

    order: int
    action: str
    status: int
    started: float
    ended: float
    retries: int = 0


@contextmanager
def customers(workers: int) -> Iterator[Pool]:
    """Run the processes of the customers, which serve for every strategy."""
    processes = multiprocessing.get_context("spawn")
    all_here = processes.Barrier(workers + 1)
    with processes.Pool(workers, initializer=arrive, initargs=(all_here,)) as pool:
        try:
            all_here.wait(PATIENCE)
        except threading.BrokenBarrierError:
            raise RaceFailed(f"a client process has not started within {PATIENCE} s") from None
        yield pool


def race(shop: Shop, customers: Pool, port: int, orders: list[int], seed: int) -> Iterator[list[Answer]]:
    """Send a ship and a cancel for every order, as many orders at a time as there are customers; yield the answers."""
    chance = random.Random(seed)
    csrf = csrf_cookie(port, shop.order_path.format(order=orders[0]))
    pairs = [
        Pair(port, csrf, order, {action: shop.action_path.format(order=order, action=action) for action in both})
        for order, both in ((order, chance.sample(ACTIONS, 2)) for order in orders)
    ]
    reports = customers.imap_unordered(send_both, chance.sample(pairs, len(pairs)))
    try:
        for _ in pairs:
            yield reports.next(PATIENCE)
    except multiprocessing.TimeoutError:
        raise RaceFailed(f"a client process has not reported within {PATIENCE} s") from None


def arrive(all_here: multiprocessing.synchronize.Barrier) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which stops us
    all_here.wait(PATIENCE)


def send_both(pair: Pair) -> list[Answer]:
    gate = threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda action: send(pair, action, gate), pair.paths))


def send(pair: Pair, action: str, gate: threading.Barrier) -> Answer:
    gate.wait()
    started, status, retries = time.monotonic(), 0, 0
    try:
        response = ask(pair.port, "POST", pair.paths[action], pair.csrf)
        status, retries = response.status, int(response.headers.get("Shop-Retries", 0))
    except (OSError, HTTPException):
        pass  # reported as status 0
    return Answer(pair.order, action, status, started, time.monotonic(), retries)


def ask(port: int, method: str, path: str, csrf: str = "") -> HTTPResponse:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE / 2)
    try:
        connection.request(method, path, headers={"Cookie": f"csrftoken={csrf}", "X-CSRFToken": csrf} if csrf else {})
        response = connection.getresponse()
        response.read()
        return response
    finally:
        connection.close()


def csrf_cookie(port: int, path: str) -> str:
    """Return the token of an order's page, as a browser gets it before a click there; an empty text if it has none."""
    page = ask(port, "GET", path)
    if page.status != 200:
        raise RaceFailed(f"the shop cannot show an order: HTTP {page.status}")
    cookie = SimpleCookie(page.headers.get("Set-Cookie", "")).get("csrftoken")
    return cookie.value if cookie else ""
