"""One section as its worker sees it: what it is to do, how far it has come, and how it ended."""

import os
import random
import signal
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Never

from dlock_core import DLockError, StaleObject
from tests.random_faults import sections
from tests.random_faults.history import Recorder, now
from tests.random_faults.items import STORES, Item, items_of
from tests.random_faults.sections import Statement, Steps, Work

Outcome = Literal["ok", "refused", "unknown"]
FENCES: Final = (True, "lease")
WAITS: Final = (0.0, 0.5, 3.0, 3.0, 3.0)
MANNERS: Final = ("", "", "", "", "inside", "by hand", "raises", "elsewhere", "left early")
"""How the section takes its lock and runs its transactions: as the documentation advises, or

- inside: the lock is acquired in a transaction that has already read, and its block ends before COMMIT;
- by hand: Django's transactions are begun and ended by turning autocommit off and on;
- raises: a function that Django calls on commit raises an error that counts as a conflict;
- elsewhere: the work, which `retry_on_conflict` repeats, also writes into a second database of Django;
- left early: a coroutine waits for the thread that does the work for a short time, and then leaves the block.
"""
SHARED_RATE, RETRY_RATE, SEVERAL_RATE = 0.3, 0.2, 0.2
PAUSE_S: Final = 0.01
"""How long a section pauses at each stage, at most."""


class TimeLimit(Exception):
    """Raised by a signal handler, as Celery does at its soft time limit."""


class Refused(Exception):
    """A COMMIT by hand was refused, as it must be."""


@dataclass(frozen=True)
class Wish:
    """What a section is to lock, with which options, and what it does under the lock."""

    items: tuple[Item, ...]
    act: Callable[[Work], list[Steps]]
    options: dict[str, Any]
    retries: bool
    """Whether the work is repeated after a conflict, by `retry_on_conflict`."""
    manner: str = ""
    """One of MANNERS; a client ignores those that it does not know."""
    by_text: bool = False
    """Whether a lock whose fence is the row is named by a text instead of its class; it is the same lock."""

    @property
    def database(self) -> str:
        return self.items[0].database

    @property
    def has_version(self) -> bool:
        return self.items[0].traits.has_version

    @property
    def is_inside(self) -> bool:
        return self.items[0].traits.is_inside

    @property
    def is_shared(self) -> bool:
        return bool(self.options.get("shared"))


class Chooser:
    """Draws wishes; the same seed and stores give the same wishes."""

    def __init__(self, seed: str, databases: tuple[str, ...]) -> None:
        self.chance = random.Random(seed)
        self.databases = databases

    def wish(self, stores: list[str], *, only_one: bool = False) -> Wish | None:
        store = self.chance.choice(stores)
        items = [item for item in items_of(store) if item.database in self.databases]
        if not items:
            return None
        chosen = [self.chance.choice(items)]
        others = [item for item in items if item is not chosen[0] and item.database == chosen[0].database]
        if others and not only_one and self.chance.random() < SEVERAL_RATE:
            chosen.append(self.chance.choice(others))
        return self._with_options(store, tuple(chosen))

    def _with_options(self, store: str, items: tuple[Item, ...]) -> Wish:
        traits, chance = STORES[store], self.chance
        if traits.has_version:
            retries = chance.random() < RETRY_RATE
            return Wish(items[:1], chance.choice(sections.BY_VERSION), {"wait": 0.0}, retries)
        has_shared = traits.has_shared and not any(item.is_fenced for item in items)
        shared = has_shared and chance.random() < SHARED_RATE
        act = chance.choice(sections.SHARED if shared else sections.ALONE)
        options: dict[str, Any] = {"wait": chance.choice(WAITS), "ttl": traits.ttl}
        if shared:
            options["shared"] = True
        if chance.random() < 0.1 and len(items) == 1:
            options["fair"] = False
        if traits.is_inside:
            del options["ttl"]
            if act is sections.add_later:
                act = sections.add
            return Wish(items, act, options, retries=False)
        options["fence"] = chance.choice(FENCES)
        if chance.random() < 0.1:
            options["renew"] = False
        retries = act is sections.add and chance.random() < RETRY_RATE
        by_text, manner = chance.random() < 0.5, chance.choice(MANNERS)
        if manner == "inside" and (retries or act is sections.add_later or items[0].database == "sqlite"):
            manner = ""  # it may need two transactions; on SQLite its wait would block all other writers
        return Wish(items, act, options, retries, manner, by_text)


@dataclass
class Attempt:
    """A section that is under way; its client reports its progress."""

    section: str
    wish: Wish
    recorder: Recorder
    chance: random.Random
    stop_rate: float
    """The probability that the process stops at each stage."""
    leases: dict[str, Any] = field(default_factory=dict)
    parts_left: int = 1
    """How many of its transactions have not committed yet."""
    is_granted: bool = False
    is_committing: bool = False
    is_committed: bool = False
    sure: float = 0.0
    """The last time at which all its leases were certainly valid."""
    tries: int = 0
    """How often its work has begun."""
    after_grant: "Callable[[Attempt], None] | None" = None
    """Called when the leases are held."""
    goes_on_when_cancelled: bool = False
    """Whether its transaction is in a thread, which cannot be cancelled."""

    def granted(self, lease: Any) -> None:
        """Record the lease, or several leases, by the items' keys."""
        held = list(lease) if len(self.wish.items) > 1 else [lease]
        # Several leases are in the order of their names, not of the items.
        by_name = {each.name: each for each in held}
        for item in self.wish.items:
            self.leases[item.key] = next(each for name, each in by_name.items() if name.endswith(item.key))
        self.is_granted = True
        tokens = {key: each.token for key, each in self.leases.items()}
        self.recorder.write("granted", self.section, tokens=tokens)
        self.look()
        self.stage("granted")
        if self.after_grant is not None:
            self.after_grant(self)

    def look(self) -> None:
        """Record the time if all leases are valid now."""
        moment = now()
        if self.leases and all(lease.remaining() > 0 and not lease.lost for lease in self.leases.values()):
            self.sure = moment

    def stage(self, name: str) -> None:
        """Reach a stage, at which the process may stop itself or pause."""
        self.look()
        if self.chance.random() < self.stop_rate:
            self.recorder.write("stopped", self.section, stage=name)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif threading.current_thread() is threading.main_thread():
            time.sleep(self.chance.random() * PAUSE_S)
        self.look()

    def work(self) -> list[Steps]:
        """Begin the work, or begin it again."""
        self.tries += 1
        self.is_committing = False
        parts = self.wish.act(Work(self.section, list(self.wish.items), lambda item: self.leases[item.key].token))
        self.parts_left = len(parts)
        return parts

    def read(self) -> None:
        """Begin, or begin again, to change a row that has a version; there is no lock to acquire."""
        self.is_granted = True
        self.work()

    def wrote(self, seen: int, version: int) -> Statement:
        """Return the journal's line for a row that was saved with a version."""
        self.stage("written")
        [item] = self.wish.items
        row = {
            "item": item.key,
            "row": item.key,
            "value": seen + 1,
            "seen": seen,
            "section": self.section,
            "token": version,
        }
        return sections.JOURNAL, row | {"shared": 0}

    def fails_on_commit(self) -> Never:
        """Fail, in a function that is called on commit, with an error that looks like a conflict."""
        self.committed()
        raise StaleObject(self, expected=1)

    def commits(self) -> None:
        self.stage("before COMMIT")
        self.is_committing = True

    def committed(self) -> None:
        self.is_committing = False
        self.parts_left -= 1
        if self.parts_left == 0:
            self.is_committed = True
        self.stage("after COMMIT")

    def outcome(self, error: BaseException | None) -> Outcome:
        """Return how it ended; unknown only if COMMIT may have been sent and the error does not tell its outcome."""
        if self.is_committed or error is None:
            return "ok"
        if self.is_committing and self.parts_left == 1 and not isinstance(error, DLockError):
            return "unknown"
        all_in_thread = self.wish.has_version or self.wish.manner == "inside"  # its thread may not have got so far yet
        if self.goes_on_when_cancelled and (self.is_granted or all_in_thread) and isinstance(error, CancelledError):
            return "unknown"
        return "refused"
