"""`python -m tests.mutants PART [--sample 100 --seed 1]`: how many faults do the tests of a part notice?

Without a part it prints the table of what earlier runs have found.
"""

import argparse
import re
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
    """Return the line of the table, and the survivors that nobody has explained."""
    known, mutants = Results(RESULTS / f"{name}.jsonl").read(), mutants_of(PARTS[name])
    tried = [(each, known[each.key]) for each in mutants if each.key in known]
    survivors = [re.sub(r":\d+: ", ": ", str(each), count=1) for each, outcome in tried if outcome == "survived"]
    found = Counter(outcome for _, outcome in tried)
    noticed = found["killed"] + found["timeout"]
    open_ones = [each for each in survivors if each not in EXPLAINED]
    share = f"{noticed / len(tried):.1%}" if tried else "-"
    line = (
        f"| {name} | {len(mutants)} | {len(tried)} | {found['killed']} | {found['timeout']} |"
        f" {len(survivors) - len(open_ones)} | {len(open_ones)} | {share} |"
    )
    return "\n".join([line, *(f"    survived: {each}" for each in open_ones)])


if __name__ == "__main__":
    main()
