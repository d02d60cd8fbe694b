"""Count how many faults the tests of a part notice: `python -m tests.mutants PART [--sample 100 --seed 1]`.

Without a part, print the table of the results of earlier runs.
"""

import argparse
import sys
from collections import Counter

from tests.mutants.parts import EXPLAINED, PARTS
from tests.mutants.runner import RESULTS, Results, mutants_of, run, sample


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="so many at random (default: all)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of that choice (default: 1)")
    parser.add_argument("--jobs", type=int, default=2, metavar="J", help="so many side by side (default: 2)")
    options = parser.parse_args()
    if options.part:
        part, results = PARTS[options.part], Results(RESULTS / f"{options.part}.jsonl")
        chosen = sample(mutants_of(part), options.sample, options.seed)
        for number, (mutant, outcome, by) in enumerate(run(part, chosen, results, options.jobs), 1):
            write(f"{number:5} {outcome:8} {mutant}   [{' '.join(by.split())[:150]}]")
    write(
        "| part | mutants | tried | killed | timeout | explained | survived | noticed |\n|---|---|---|---|---|---|---|---|"
    )
    for name in PARTS:
        if not options.part or name == options.part:
            write(summary(name))


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def summary(name: str) -> str:
    """Return the part's line of the table, and its survivors without an explanation."""
    known, mutants = Results(RESULTS / f"{name}.jsonl").read(), mutants_of(PARTS[name])
    told = [(each, known[each.key]) for each in mutants if each.key in known]
    found = Counter("explained" if each.name in EXPLAINED else outcome for each, outcome in told)
    open_ones = [each.name for each, outcome in told if outcome == "survived" and each.name not in EXPLAINED]
    noticed = found["killed"] + found["timeout"]
    share = f"{noticed / len(told):.1%}" if told else "-"
    line = (
        f"| {name} | {len(mutants)} | {len(told)} | {found['killed']} | {found['timeout']} |"
        f" {found['explained']} | {len(open_ones)} | {share} |"
    )
    return "\n".join([line, *(f"    survived: {each}" for each in open_ones)])


if __name__ == "__main__":
    main()
