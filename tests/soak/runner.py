"""One soak: it starts servers and workers, samples them until the time is over, and ends them."""

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import cycle
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from tests.random_faults import nursery
from tests.random_faults.world import World
from tests.servers import Server
from tests.soak.report import Report
from tests.soak.server_samples import sampled
from tests.soak.slopes import WARM_UP
from tests.soak.worker import KINDS, PARTIES

SAMPLES: Final = 120
"""Samples in a run that is neither short nor long; the garbage collection before each takes time."""
BETWEEN_SAMPLES_S: Final = (2.0, 30.0)
END_WITHIN_S: Final = 30.0
LOOK_EVERY_S: Final = 0.25


class Soak:
    """A run at `rate` sections per second, all workers together, for some minutes; `restart_every_s=0` restarts nothing."""

    def __init__(
        self, minutes: float, rate: float, stores: list[str], *, restart_every_s: float = 0, leak: bool = False
    ) -> None:
        self.minutes, self.rate, self.restart_every_s, self.leak = minutes, rate, restart_every_s, leak
        least, most = BETWEEN_SAMPLES_S
        self.every_s = min(max(minutes * 60 / SAMPLES, least), most)
        self.directory = Path(tempfile.mkdtemp(prefix="dlock-soak-"))
        self.directory.chmod(0o755)
        self.world = World(self.directory, stores, proxied=False)
        self.workers: dict[str, BaseProcess] = {}
        self.report = Report(minutes)

    def carry_out(self) -> Report:
        try:
            self.world.start()
            self._start_workers()
            self._sample()
            self._end_workers()
            self._read()
        finally:
            for worker in self.workers.values():
                worker.kill()
                worker.join()
            self.world.stop()
            shutil.rmtree(self.directory, ignore_errors=True)
        return self.report

    def _start_workers(self) -> None:
        config = self.world.config()
        config |= {"used": self.world.stores, "rate": self.rate, "parties": len(KINDS) * PARTIES, "every": self.every_s}
        config |= {"leak": self.leak, "warm_until": time.monotonic() + WARM_UP * self.minutes * 60}
        path = self.directory / "config.json"
        path.write_text(json.dumps(config))
        for kind in KINDS:
            log = self.directory / f"{kind}.log"
            self.workers[kind] = nursery.start("tests.soak.worker", log, str(path), kind, kind)

    def _sample(self) -> None:
        """Sample the servers, and restart one now and then, until the time is over."""
        end = time.monotonic() + self.minutes * 60
        sample_at, restart_at = 0.0, time.monotonic() + self.restart_every_s
        turns = self._turns()
        while time.monotonic() < end:
            if time.monotonic() >= sample_at:
                sample_at = time.monotonic() + self.every_s
                for subject, values in sampled(self.world).items():
                    self.report.add(time.monotonic(), subject, values)
            if self.restart_every_s and time.monotonic() >= restart_at:
                restart_at = time.monotonic() + self.restart_every_s
                name, server = next(turns)
                server.stop()
                server.start()
                self.report.restarts[name] += 1
            threading.Event().wait(LOOK_EVERY_S)

    def _turns(self) -> Iterator[tuple[str, Server]]:
        """Return an endless iterator over the servers."""
        several = {
            "sentinel": self.world.sentinel.servers if self.world.sentinel else [],
            "cluster": self.world.cluster.nodes if self.world.cluster else [],
        }
        alone = list(self.world.servers.items())
        return cycle([*alone, *((name, server) for name, servers in several.items() for server in servers)])

    def _end_workers(self) -> None:
        for kind, worker in self.workers.items():
            seconds = _cpu_s(worker) if worker.is_alive() else 0.0
            self.report.cpu_s[kind] = 100 * seconds / (self.minutes * 60)
        self.report.deaths = [kind for kind, worker in self.workers.items() if not worker.is_alive()]
        (self.directory / "over").touch()
        for kind, worker in self.workers.items():
            worker.join(END_WITHIN_S)
            if worker.is_alive():
                self.report.deaths.append(f"{kind} did not end, and")
        for kind in self.report.deaths:
            log = self.directory / f"{kind}.log"
            self.report.strange[log.read_text()[-3000:] if log.exists() else ""] += 1

    def _read(self) -> None:
        for path in sorted(self.directory.glob("*.samples")):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                self.report.add(line["at"], line["subject"], line["values"])
            if lines:
                self.report.outcomes[lines[-1]["subject"]].update(lines[-1]["outcomes"])
                self.report.strange.update(lines[-1]["strange"])


def _cpu_s(worker: BaseProcess) -> float:
    """Return the processor time that a process has taken."""
    user, system = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / 100
