"""One run: it starts servers and workers, alternates storms and quiet times, judges the results, and ends all."""

import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sqlalchemy import text

from tests.random_faults.checker import Change, Event, Facts, Violation, check
from tests.random_faults.crew import CREW, LOOK_EVERY_S, Crew
from tests.random_faults.database_faults import connected
from tests.random_faults.history import History, Record, Recorder, now
from tests.random_faults.items import STORES, every_item
from tests.random_faults.nemesis import Nemesis
from tests.random_faults.probes import Measured, Probes
from tests.random_faults.report import Report
from tests.random_faults.schedule import STORM_S, Storm, plan
from tests.random_faults.world import World

IDLE_WITHIN_S: Final = 45.0
"""How long a section may continue after all faults are healed: at most 3 s for its lock, 20 s for a database."""
START_WITHIN_S: Final = 180.0
END_WITHIN_S: Final = 30.0
BEFORE: Final = -1
"""The number of the quiet time in which the workers start."""


@dataclass
class Options:
    """The options of a run."""

    minutes: float = 10.0
    seed: int = 0
    stores: list[str] = field(default_factory=lambda: list(STORES))
    kinds: tuple[str, ...] = CREW
    only: tuple[str, ...] = ()
    """The kinds of faults to draw from; all if it is empty."""
    sabotage: str = ""
    stop_rate: float = 0.01
    until_found: str | None = None
    """End with the first storm after which a violation of this rule, or any if it is empty, is found."""
    keep: bool = False
    """Whether to keep the run's directory."""


class Run:
    """A run, from the start of the servers to the report."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.directory = Path(tempfile.mkdtemp(prefix="dlock-faults-"))
        self.directory.chmod(0o755)
        self.world = World(self.directory, options.stores)
        self.recorder = Recorder(self.directory / "runner.history")
        self.history = History(self.directory)
        self.report = Report(options.seed)
        self.found: list[Violation] = []

    def carry_out(self) -> Report:
        begin = now()
        options = self.options
        storms = plan(options.seed, options.minutes, options.stores, len(options.kinds), options.only)
        try:
            self.world.start()
            self._carry_out(storms)
        finally:
            self.world.stop()
            if not self.options.keep:
                shutil.rmtree(self.directory, ignore_errors=True)
        self.report.seconds = now() - begin
        return self.report

    def _carry_out(self, storms: list[Storm]) -> None:
        config = self.world.config()
        config |= {"seed": self.options.seed, "sabotage": self.options.sabotage, "stop_rate": self.options.stop_rate}
        crew = Crew(config, self.recorder, self.options.kinds)
        nemesis, probes = Nemesis(self.world, crew, self.recorder), Probes(self.world, config)
        crew.say(BEFORE, "quiet", [])
        try:
            crew.start()
            self._wait_until_idle(BEFORE, crew)
            end = now() + self.options.minutes * 60
            for storm in storms:
                self._storm(storm, crew, nemesis)
                self._quiet(storm, crew, nemesis, probes)
                if now() > end - STORM_S or self._has_found(self.options.until_found):
                    break
            crew.say(len(storms), "end", [])
            self.found += [Violation("stuck", "at the end", late) for late in crew.end(END_WITHIN_S)]
            self._judge(nemesis, probes)
        finally:
            crew.kill_all()
            nemesis.end()

    def _has_found(self, rule: str | None) -> bool:
        return rule is not None and any(rule in violation.rule for violation in self.report.violations)

    def _storm(self, storm: Storm, crew: Crew, nemesis: Nemesis) -> None:
        crew.is_storm = True
        crew.say(storm.cycle, "storm", list(storm.stores))
        nemesis.storm(storm, lambda: self._look_after(crew))

    def _quiet(self, storm: Storm, crew: Crew, nemesis: Nemesis, probes: Probes) -> None:
        crew.is_storm = False
        crew.say(storm.cycle, "quiet", [])
        nemesis.heal()
        healed = now()
        if self._wait_until_idle(storm.cycle, crew):
            self.report.longest.setdefault("section under way after a storm", Measured()).note(
                now() - healed, IDLE_WITHIN_S, f"storm {storm.cycle}"
            )
            probes.look(storm.stores)
        self.report.cycles += 1
        self._judge(nemesis, probes)

    def _wait_until_idle(self, cycle: int, crew: Crew) -> bool:
        """Wait until no section is under way; workers that have not started yet have more time than others."""
        begin, idle = now(), set[int]()
        while now() < begin + START_WITHIN_S:
            self._look_after(crew)
            idle = {record.pid for record in self._records() if _is_idle(record, cycle)}
            started = {record.pid for record in self._records() if record.event == "start"}
            late = [member for member in crew.members if member.pid not in idle]
            if not late:
                return True
            if now() > begin + IDLE_WITHIN_S and any(member.pid in started for member in late):
                break
        for member in late:
            stacks = crew.dump_stacks(member)
            text = f"not idle {now() - begin:.0f} s after all was healed\n{stacks}"
            self.found.append(Violation("stuck", member.name, text))
            crew.kill(member.place)
        return False

    def _records(self) -> list[Record]:
        self.history.more()
        return self.history.records

    def _look_after(self, crew: Crew) -> None:
        crew.look_after()
        threading.Event().wait(LOOK_EVERY_S)

    def _judge(self, nemesis: Nemesis, probes: Probes) -> None:
        facts = self._facts()
        self.report.injected = nemesis.injected.copy()
        self.report.count(facts)
        self.report.failures = nemesis.failures
        self.report.longest |= probes.longest
        self.report.counts = probes.counts
        self.report.violations = [*self.found, *probes.violations, *check(facts)]

    def _facts(self) -> Facts:
        facts = Facts(list(self._records()), every_item(self.options.stores))
        for database in (*self.world.databases, "sqlite"):
            with connected(self.world, database) as connection:
                for name, value in connection.execute(text("SELECT name, value FROM item")):
                    facts.values[name] = value
                columns = "item, value, seen, section, token, shared, fence"
                facts.changes += [Change(*row) for row in connection.execute(text(f"SELECT {columns} FROM journal"))]
                facts.notes += connection.scalars(text("SELECT section FROM note"))
                events = connection.execute(text("SELECT item, number, what, section FROM event"))
                facts.events += [Event(*row) for row in events]
        return facts


def _is_idle(record: Record, cycle: int) -> bool:
    return record.event == "idle" and bool(record.values["cycle"] == cycle)
