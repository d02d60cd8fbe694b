"""The race: its servers, clients that ship and cancel at once, and a report of the outcome.

It depends on no framework: each shop describes, as a `Shop`, how it is served and what its database says.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class RaceFailed(Exception):
    """The race cannot be run, or had faults; the text says which."""


@dataclass(frozen=True)
class Tally:
    """What a database says about the orders of a race; `changed` counts lines of history that ship or cancel."""

    orders: int
    both_shipped_and_cancelled: int
    refunds_of_shipped: int
    lost_updates: int
    changed: int


Sale = tuple[list[int], Callable[[], Tally]]
"""The numbers of paid orders, and a function that counts what has become of them."""


class Shop(Protocol):
    strategies: Sequence[str]
    server: str
    announcement: str
    """What each process of the server writes to its log once it serves."""
    folder: Path
    """Where Python finds the server's modules: the race may be started from any folder."""
    order_path: str
    action_path: str

    def database(self, url: str) -> AbstractContextManager[str]:
        """Use this database, make its tables, and yield its name for the title; raises RaceFailed."""

    def command(self, fd: int, processes: int) -> list[str]:
        """Return the command that serves the shop on a socket that already listens."""

    def paid_orders(self, number: int) -> AbstractContextManager[Sale]:
        """Create `number` paid orders, and remove them afterwards: the database may have other uses."""
