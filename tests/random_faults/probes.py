"""The runner's own checks in a quiet time, when every fault is healed and every worker is idle.

The bounds are the documented promises plus a grace for a busy machine: only a time that exceeds both is a violation.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import redis
from sqlalchemy import text

from dlock_core import DLockError, LeaseLost, Lock
from dlock_core.backend import Backend
from dlock_core.inspect import take_snapshot
from tests.random_faults import nursery
from tests.random_faults.checker import Violation
from tests.random_faults.core_clients import backends
from tests.random_faults.database_faults import connected
from tests.random_faults.history import now
from tests.random_faults.items import STORES, items_of
from tests.random_faults.world import World

GRACE_S: Final = 6.0
QUEUE: Final = 4
QUEUED_WITHIN_S: Final = 10.0
QUEUE_TTL_S: Final = 30.0
HOLDS_WITHIN_S: Final = 60.0
GONE_WITHIN_S: Final = 20.0
"""Dead waiters, sessions and keys are gone by then: the longest promise is 6 s (etcd)."""


@dataclass
class Measured:
    """The time that exceeds its bound most, or comes closest, and that bound."""

    seconds: float = 0.0
    bound: float = 0.0
    where: str = ""

    def note(self, seconds: float, bound: float, where: str) -> None:
        if seconds - bound > self.seconds - self.bound or not self.where:
            self.seconds, self.bound, self.where = seconds, bound, where


@dataclass
class Probes:
    """The checks of a run, and their findings."""

    world: World
    config: dict[str, Any]
    violations: list[Violation] = field(default_factory=list)
    longest: dict[str, Measured] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._backends = backends(self.config)

    def look(self, stores: tuple[str, ...]) -> None:
        """Check the stores that have just been through a storm."""
        known = [store for store in stores if store in self._backends]
        self._end_by_hand()
        for store in known:
            self._items_are_free(store)
        if known:
            self._dead_holders_are_followed(known)
        for store in known:
            if STORES[store].is_fair:
                self._first_come_first_served(store)
        self._nothing_is_left(known)

    def _end_by_hand(self) -> None:
        """Delete the keys that a server keeps because its clock went back, as an operator would.

        As documented, the lock of a process that was killed while the clock was ahead lasts for its ttl plus the step.
        """
        for name in self.world.clocks:
            with redis.Redis.from_url(self.world.servers[name].url, decode_responses=True) as client:
                kept = [key for key in client.scan_iter("dlock:*") if client.pttl(key) > GONE_WITHIN_S * 1000]
                if kept:
                    client.delete(*kept)
            what = "keys that outlived their clock, ended by hand"
            self.counts[what] = self.counts.get(what, 0) + len(kept)

    def _items_are_free(self, store: str) -> None:
        """Check that each item can be locked: every holder of the storm is dead or done."""
        for item in items_of(store):
            self._get(self._backends[store], item.lock, "held on after the storm", now(), store)

    def _dead_holders_are_followed(self, stores: list[str]) -> None:
        said = self.world.directory / f"held-{now()}"
        config = str(self.world.directory / "config.json")
        holder = nursery.start("tests.random_faults.holder", said.with_suffix(".log"), config, str(said), *stores)
        holds = _comes(said.exists, HOLDS_WITHIN_S)
        holder.kill()
        holder.join()
        if not holds:
            return
        died = now()
        what = "held by the dead"
        waits = [
            threading.Thread(target=self._get, args=(self._backends[store], f"dead:{store}", what, died, store))
            for store in stores
        ]  # in parallel, so that the time of one is not added to that of the next
        for one in waits:
            one.start()
        for one in waits:
            one.join()

    def _get(self, backend: Backend, name: str, what: str, since: float, store: str) -> None:
        """Acquire a lock that must be free within the promised time, and release it."""
        bound = STORES[store].held_after_death + GRACE_S
        self.counts[what] = self.counts.get(what, 0) + 1
        try:
            with Lock(backend, name, ttl=STORES[store].ttl, wait=bound):
                self.longest.setdefault(f"{what}, {store}", Measured()).note(now() - since, bound, name)
        except LeaseLost:
            pass  # it was acquired, and then this process stood still for longer than the ttl
        except DLockError as error:
            self.violations.append(
                Violation(what, name, f"{type(error).__name__} after {now() - since:.1f} s: {error}")
            )

    def _first_come_first_served(self, store: str) -> None:
        """Check that waiters that queued one after the other are served in this order."""
        backend, name = self._backends[store], f"queue:{store}"
        order: list[int] = []
        disturbed: list[int] = []

        def wait(place: int) -> None:
            try:
                with Lock(backend, name, ttl=QUEUE_TTL_S, wait=60):
                    order.append(place)
            except LeaseLost:
                disturbed.append(place)  # this process stood still for longer than the ttl
            except DLockError as error:
                self.violations.append(Violation("stuck in the queue", store, f"{type(error).__name__}: {error}"))

        threads = [threading.Thread(target=wait, args=(place,), daemon=True) for place in range(QUEUE)]
        self.counts["queues"] = self.counts.get("queues", 0) + 1
        try:
            with Lock(backend, name, ttl=QUEUE_TTL_S, wait=10):
                for place, thread in enumerate(threads):
                    thread.start()
                    if not _comes(lambda place=place: self._waiters(store, name) > place, QUEUED_WITHIN_S):  # type: ignore[misc]
                        return  # nothing to judge: the machine is too slow
        except DLockError as error:
            self.violations.append(Violation("a quiet store fails", store, f"{type(error).__name__}: {error}"))
            return
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join(60)
        if order != sorted(order) and not disturbed:
            self.violations.append(Violation("not first come, first served", store, f"served in the order {order}"))

    def _waiters(self, store: str, name: str) -> int:
        found = take_snapshot([(store, self._backends[store])], name=name).entries
        return sum(entry.role == "waiter" for entry in found)

    def _nothing_is_left(self, stores: list[str]) -> None:
        """Check that the storm has left no holder, waiter, key or open transaction."""
        for what, left in self._left(stores):
            found: list[str] = []

            def is_gone(left: Callable[[], list[str]] = left, found: list[str] = found) -> bool:
                found[:] = left()
                return not found

            began = now()
            if not _comes(is_gone, GONE_WITHIN_S):
                self.violations.append(Violation("left behind", what, "; ".join(found)[:1000]))
            self.longest.setdefault("left behind", Measured()).note(now() - began, GONE_WITHIN_S, what)

    def _left(self, stores: list[str]) -> Iterator[tuple[str, Callable[[], list[str]]]]:
        for store in stores:
            yield f"holders and waiters of {store}", lambda store=store: self._holders(store)  # type: ignore[misc]
        for name in self.world.servers:
            if name.rstrip("012") in stores and name.startswith(("redis", "turned", "redlock")):
                yield f"keys of {name}", lambda name=name: self._keys(name)  # type: ignore[misc]
        yield "transactions in PostgreSQL", self._transactions

    def _holders(self, store: str) -> list[str]:
        found = take_snapshot([(store, self._backends[store])])
        return [entry.described for entry in found.entries] + [each.reason for each in found.unreadable]

    def _keys(self, name: str) -> list[str]:
        with redis.Redis.from_url(self.world.servers[name].url, decode_responses=True) as client:
            found = set(client.scan_iter("dlock:*")) - {"dlock:token", "dlock:locks"}
            return sorted(key for key in found if not 0 <= client.pttl(key) <= 2000 and client.exists(key))

    def _transactions(self) -> list[str]:
        question = (
            "SELECT application_name || ' ' || pid || ' ' || state || ' ' || left(query, 100) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            " AND backend_type = 'client backend' AND state <> 'idle' UNION ALL"
            " SELECT 'waits: ' || locktype FROM pg_locks WHERE NOT granted"
            " UNION ALL SELECT 'prepared: ' || gid FROM pg_prepared_xacts"
        )
        with connected(self.world, "postgresql") as connection:
            return [row for (row,) in connection.execute(text(question))]


def _comes(condition: Callable[[], bool], within: float) -> bool:
    end = now() + within
    while not condition():
        if now() > end:
            return False
        threading.Event().wait(0.05)
    return True
