"""Injects the faults of a storm: each begins at its time, lasts as long as planned, and is healed."""

import threading
import traceback
from collections import Counter, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from tests.random_faults import database_faults, network_faults, store_faults
from tests.random_faults.crew import Crew
from tests.random_faults.history import Recorder, now
from tests.random_faults.schedule import Fault, Storm
from tests.random_faults.world import World

FAULTS: Final[dict[str, Any]] = {**store_faults.FAULTS, **network_faults.FAULTS, **database_faults.FAULTS}
HANDS: Final = 12
"""How many faults may last at the same time."""
AT_ONCE: Final = ("flush", "kill clients", "cut", "kill sessions", "lock rows")
"""Faults that are over as soon as they have begun."""
HEAL_WITHIN_S: Final = 90.0


class Nemesis:
    """Injects the faults of a run; its threads live to the end: the kernel kills a thread's child processes with it."""

    def __init__(self, world: World, crew: Crew, recorder: Recorder) -> None:
        self._world, self._crew, self._recorder = world, crew, recorder
        self._hands = ThreadPoolExecutor(HANDS, thread_name_prefix="fault")
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._calm = threading.Event()
        self._under_way: list[Future[None]] = []
        self.injected: Counter[str] = Counter()
        self.failures: list[str] = []

    def storm(self, storm: Storm, look_after: Any) -> None:
        """Inject the faults of a storm, and call `look_after` repeatedly."""
        self._calm.clear()
        begin, left = now(), list(storm.faults)
        while now() < begin + storm.seconds:
            while left and now() >= begin + left[0].at:
                self._under_way.append(self._hands.submit(self._inject, left.pop(0)))
            look_after()

    def heal(self) -> None:
        """End every fault, and wait until all servers work again."""
        self._calm.set()
        for fault in self._under_way:
            fault.result(HEAL_WITHIN_S)
        self._under_way.clear()

    def end(self) -> None:
        self._calm.set()
        self._hands.shutdown(wait=True)

    def _inject(self, fault: Fault) -> None:
        server = fault.target if fault.kind not in network_faults.FAULTS else f"network of {fault.target}"
        try:
            with self._locks[server]:
                if self._calm.is_set():
                    return
                self.injected[fault.kind] += 1
                self._recorder.write("fault", kind=fault.kind, target=fault.target, seconds=fault.seconds)
                self._carry_out(fault)
                self._recorder.write("healed", kind=fault.kind, target=fault.target)
        except Exception:
            self.failures.append(f"{fault.kind} of {fault.target}: {traceback.format_exc(limit=-3)}")

    def _carry_out(self, fault: Fault) -> None:
        if fault.kind == "stop worker":
            self._crew.stop(int(fault.target))
        elif fault.kind == "kill worker":
            self._crew.kill(int(fault.target))
        else:
            with FAULTS[fault.kind](self._world, fault):
                self._calm.wait(0 if fault.kind in AT_ONCE else fault.seconds)
