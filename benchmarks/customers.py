"""The customers of a load test: threads that ship and cancel orders over HTTP as fast as they are answered.

Requests come in pairs, a `ship` and a `cancel` of the same order one after the other, so that two customers contend for
each order. Readers look at pages, which need no lock.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Final, Literal, Protocol

from example_project.race.clients import ACTIONS, csrf_cookie

PATIENCE_S: Final = 60.0
NO_ANSWER: Final = 0

Kind = Literal["order", "page"]


class Paths(Protocol):
    order_path: str
    action_path: str


@dataclass(frozen=True)
class Answer:
    """The status of one request, and when it was sent and answered, by the monotonic clock."""

    kind: Kind
    status: int
    sent: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.sent


@dataclass
class Crowd:
    """Customers of one shop, who share a list of orders."""

    shop: Paths
    port: int
    orders: Sequence[int]
    pause: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.csrf = csrf_cookie(self.port, self.shop.order_path.format(order=self.orders[0]))
        self._turn = threading.Lock()
        self._requests = self._pairs()

    def run(self, customers: int, readers: int = 0, *, until: Callable[[], bool] = lambda: False) -> None:
        """Send the requests for all orders, or stop once `until` is true; readers go on to the end."""
        over = threading.Event()
        buyers = [threading.Thread(target=self._buy, args=(until,)) for _ in range(customers)]
        others = [threading.Thread(target=self._read, args=(over,)) for _ in range(readers)]
        for thread in (*buyers, *others):
            thread.start()
        for thread in buyers:
            thread.join()
        over.set()
        for thread in others:
            thread.join()

    def _pairs(self) -> Iterator[str]:
        for order, actions in zip(self.orders, itertools.cycle((ACTIONS, ACTIONS[::-1])), strict=False):
            for action in actions:
                yield self.shop.action_path.format(order=order, action=action)

    def _buy(self, until: Callable[[], bool]) -> None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        while not until():
            with self._turn:
                path = next(self._requests, None)
            if path is None:
                return
            self._ask(connection, "order", "POST", path)
            time.sleep(self.pause)

    def _read(self, over: threading.Event) -> None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        path = self.shop.order_path.format(order=self.orders[0])
        while not over.is_set():
            self._ask(connection, "page", "GET", path)
            time.sleep(self.pause)

    def _ask(self, connection: HTTPConnection, kind: Kind, method: str, path: str) -> None:
        headers = {"Cookie": f"csrftoken={self.csrf}", "X-CSRFToken": self.csrf}
        sent, status = time.monotonic(), NO_ANSWER
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            response.read()
            status = response.status
        except (OSError, HTTPException):
            connection.close()  # the next request opens it again
        self.answers.append(Answer(kind, status, sent, time.monotonic()))
