"""A worker process of the soak: `main(CONFIG, KIND, NAME)`. Two threads or two tasks begin sections at a constant rate.

The first of them also samples the process between its sections.
"""

import asyncio
import ctypes
import gc
import itertools
import json
import logging
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from dlock_core import DLockError, owner
from dlock_core.backends.advisory.labels import label_of
from dlock_core.names import canonical
from tests.random_faults.attempt import Attempt, Chooser
from tests.random_faults.items import Item
from tests.random_faults.worker import LEFT_OUT, client_of, is_expected

KINDS: Final = ("django", "django-async", "sqla", "sqla-asyncpg", "core", "core-async")
PARTIES: Final = 2
"""Threads or tasks in each process."""
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
ALLOCATOR: Final = ctypes.CDLL(None)
WARM_UP_FACTOR: Final = 4
NEW_NAME_RATE: Final = 0.5
"""The share of the core's sections that use a new name, as when strangers choose the names."""

KEEPS_NAMES: Final = ("table",)
"""Stores without new names: rows are deleted an hour after their last use, so in a run they would look like growth."""


class Silent:
    """Replaces the recorder of a run with faults: the history of an hour would only fill the disk."""

    is_writing = False

    def write(self, event: str, section: str = "", **values: Any) -> None:
        pass


@dataclass
class Pace:
    """The regular times at which one thread or task begins its sections; missed ones are not made up for."""

    period_s: float
    due: float
    warm_until: float
    """Until then the rate is WARM_UP_FACTOR times as high, so that pools and caches are full when the samples count."""

    def left(self) -> float:
        """Return the seconds until the next section begins."""
        now = time.monotonic()
        period_s = self.period_s / WARM_UP_FACTOR if now < self.warm_until else self.period_s
        self.due = max(self.due + period_s, now)
        return self.due - now


def fill_caches() -> None:
    """Fill the caches of names and owners, which the run's new names, threads and tasks would otherwise fill slowly."""
    for number in range(canonical.cache_info().maxsize or 0):
        canonical(f"visit:{number}")
    for number in range(label_of.cache_info().maxsize or 0):
        label_of(f"visit:{number}", "dlock:")
    for number in range(owner._text.cache_info().maxsize or 0):
        owner._text(os.getpid(), "task", f"Task-{number}", number, "", "", (), ())


class Worker:
    """The common part of both kinds of worker."""

    def __init__(self, config: dict[str, Any], kind: str, name: str) -> None:
        directory = Path(config["directory"])
        self.config, self.kind, self.name = config, kind, name
        self.over = directory / "over"
        self.client = client_of(kind, config)
        self.outcomes: Counter[str] = Counter()
        self.strange: Counter[str] = Counter()
        self.leaked: list[Attempt] = []
        """With --leak, every section of the core, as if a registry never dropped it; the report must find this."""
        self._samples = (directory / f"{name}.samples").open("a", buffering=1)
        self._sample_at = 0.0
        self._numbers = itertools.count()
        self._recorder: Any = Silent()
        fill_caches()

    def chooser(self, party: int) -> Chooser:
        return Chooser(f"{self.name} {party}", self.client.databases)

    def pace(self, party: int) -> Pace:
        period = self.config["parties"] / self.config["rate"]
        begin = time.monotonic() + random.Random(f"{self.name} {party}").random() * period
        return Pace(period, begin, warm_until=self.config["warm_until"])

    def next_attempt(self, chooser: Chooser) -> Attempt | None:
        is_core = self.kind.startswith("core")
        stores = [store for store in self.config["used"] if self.kind not in LEFT_OUT.get(store, ())]
        wish = chooser.wish(stores, only_one=is_core)
        if wish is None:
            return None
        number = next(self._numbers)
        is_kept = wish.items[0].store in KEEPS_NAMES
        if is_core and not is_kept and chooser.chance.random() < NEW_NAME_RATE:
            wish = replace(wish, items=(Item(f"visit-{self.name}-{number}", wish.items[0].store, "postgresql"),))
        return Attempt(f"{self.name}-{number}", wish, self._recorder, chooser.chance, stop_rate=0)

    def ended(self, attempt: Attempt, error: BaseException | None) -> None:
        """Count an outcome; an unexplained error is kept with its traceback."""
        if self.config["leak"] and self.kind == "core":
            self.leaked.append(attempt)
        self.outcomes[type(error).__name__ if error else "done"] += 1
        if error is not None and not is_expected(error):
            where = f"{attempt.wish.items[0].store}, {attempt.wish.act.__name__}, {attempt.wish.options}"
            self.strange[where + "\n" + "".join(traceback.format_exception(error))[-3000:]] += 1

    def sample(self) -> None:
        """Record the process's memory, threads and descriptors when a sample is due."""
        if time.monotonic() < self._sample_at:
            return
        self._sample_at = time.monotonic() + self.config["every"]
        gc.collect()
        ALLOCATOR.malloc_trim(0)  # dlock does not use the memory that is free in the C library's allocator.
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        values = {
            "memory, KiB": pages * PAGE / 1024,
            "Python's memory blocks": sys.getallocatedblocks(),
            "threads": threading.active_count(),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())) - 1,
        }
        line = {"at": time.monotonic(), "subject": self.kind, "values": values, "outcomes": self.outcomes}
        self._samples.write(json.dumps(line | {"strange": self.strange}) + "\n")


class ThreadWorker(Worker):
    """Runs sections in threads, each one after the other."""

    def work(self) -> None:
        others = [threading.Thread(target=self._one, args=(party,)) for party in range(1, PARTIES)]
        for thread in others:
            thread.start()
        self._one(0)
        for thread in others:
            thread.join()
        self.sample()

    def _one(self, party: int) -> None:
        chooser, pace = self.chooser(party), self.pace(party)
        while not self.over.exists():
            time.sleep(pace.left())
            if party == 0:
                self.sample()
            if (attempt := self.next_attempt(chooser)) is not None:
                self._try(attempt)
        self.client.close()

    def _try(self, attempt: Attempt) -> None:
        try:
            self.client.play(attempt)
        except Exception as error:
            self.ended(attempt, error)
            if not isinstance(error, DLockError):
                self.client.clean_up()
        else:
            self.ended(attempt, None)


class TaskWorker(Worker):
    """Runs sections in tasks of one event loop."""

    def work(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        await asyncio.gather(*[self._one(party) for party in range(PARTIES)])
        self.sample()
        await self.client.aclose()

    async def _one(self, party: int) -> None:
        chooser, pace = self.chooser(party), self.pace(party)
        while not self.over.exists():
            await asyncio.sleep(pace.left())
            if party == 0:
                self.sample()
            if (attempt := self.next_attempt(chooser)) is not None:
                await self._try(attempt)

    async def _try(self, attempt: Attempt) -> None:
        try:
            await self.client.aplay(attempt)
        except Exception as error:
            self.ended(attempt, error)
            if not isinstance(error, DLockError):
                await self.client.aclean_up()
        else:
            self.ended(attempt, None)


def main(path: str, kind: str, name: str) -> None:
    config = json.loads(Path(path).read_text())
    config["name"] = os.environ["PGAPPNAME"] = name
    logging.disable()
    warnings.simplefilter("ignore")
    make = TaskWorker if kind in {"django-async", "sqla-asyncpg", "core-async"} else ThreadWorker
    make(config, kind, name).work()
