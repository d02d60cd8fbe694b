"""The report at the end of a run."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tests.random_faults.checker import WAIT_OVER_S, Facts, Violation, times_over_wait
from tests.random_faults.probes import Measured

EXAMPLES: Final = 4
"""How many violations of one rule are shown."""


@dataclass
class Report:
    """The figures of a run; `violations` decides its exit status."""

    seed: int
    seconds: float = 0.0
    cycles: int = 0
    violations: list[Violation] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    """Faults that could not be injected or healed: something is wrong with the run, not with dlock."""
    longest: dict[str, Measured] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    sections: Counter[str] = field(default_factory=Counter)
    """Sections by kind of worker and outcome."""
    fenced: Counter[str] = field(default_factory=Counter)
    """Changes of rows that carry their own fence, by kind of worker."""
    errors: Counter[str] = field(default_factory=Counter)

    def count(self, facts: Facts) -> None:
        """Count sections, errors and the workers' own faults in the histories."""
        kinds = {record.section: record.values["kind"] for record in facts.of("begin")}
        ended = {record.section for record in facts.of("end")}
        self.sections = Counter(f"{kinds[record.section]} {record.values['outcome']}" for record in facts.of("end"))
        self.sections.update(f"{kind} killed" for section, kind in kinds.items() if section not in ended)
        self.fenced = Counter(kinds[change.section] for change in facts.changes if facts.items[change.item].is_fenced)
        for section, seconds in times_over_wait(facts):
            self.longest.setdefault("time beyond an acquire's wait", Measured()).note(seconds, WAIT_OVER_S, section)
        self.errors = Counter(record.values["error"] for record in facts.of("end") if record.values["error"])
        own = Counter(record.event for record in facts.of("stopped", "interrupt", "cancel", "fork"))
        names = {"stopped": "stop at a stage", "interrupt": "interrupt", "cancel": "cancel", "fork": "fork"}
        self.injected.update({names[event]: times for event, times in own.items()})

    def lines(self) -> list[str]:
        outcomes = ("ok", "refused", "unknown", "killed")
        clients = sorted({key.rpartition(" ")[0] for key in self.sections})
        found = [f"seed {self.seed}: {self.seconds:.0f} s, {self.cycles} storms, {sum(self.injected.values())} faults"]
        found += [f"  {kind:<26}{times:>7}" for kind, times in sorted(self.injected.items())]
        found += [f"{sum(self.sections.values())} sections" + "".join(f"{one:>10}" for one in outcomes)]
        for client in clients:
            found.append(f"  {client:<16}" + "".join(f"{self.sections[f'{client} {one}']:>10}" for one in outcomes))
        found += [
            "changes of rows that are the fence: " + ", ".join(f"{who} {n}" for who, n in sorted(self.fenced.items()))
        ]
        found += ["errors: " + ", ".join(f"{name} {times}" for name, times in self.errors.most_common(14))]
        for what, one in sorted(self.longest.items()):
            found.append(f"longest {what}: {one.seconds:.2f} s ({one.where}; bound {one.bound:.1f} s)")
        found += [f"{what}: {times}" for what, times in sorted(self.counts.items())]
        found += [f"fault that failed: {failure}" for failure in self.failures]
        return [*found, *self._judgement()]

    def _judgement(self) -> Iterator[str]:
        """Yield the first violations of each rule, and how many more there are."""
        by_rule = Counter(violation.rule for violation in self.violations)
        for rule, times in by_rule.items():
            examples = [str(violation) for violation in self.violations if violation.rule == rule][:EXAMPLES]
            yield from (f"VIOLATION {example}" for example in examples)
            if times > EXAMPLES:
                yield f"VIOLATION {rule}: {times - EXAMPLES} more"
        yield f"{len(self.violations)} violations"
