"""The command line: `python -m tests.random_faults --minutes 10 --seed 7`; exit status 1 if a violation is found."""

import argparse
import logging
import secrets
import signal
import sys

from tests.random_faults.crew import CREW
from tests.random_faults.items import STORES
from tests.random_faults.runner import Options, Run
from tests.random_faults.sabotage import SABOTAGES
from tests.random_faults.schedule import KINDS, Storm, plan
from tests.servers import ServerMissing


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.random_faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="draws the same faults again; by default a random one")
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    parser.add_argument(
        "--faults", nargs="+", choices=KINDS, default=[], help="only these kinds, to narrow down a finding"
    )
    parser.add_argument("--sabotage", choices=SABOTAGES, default="", help="break dlock: something has to be found")
    parser.add_argument("--stop-rate", type=float, default=0.01, help="how often a worker stops itself at a stage")
    parser.add_argument(
        "--until-found",
        nargs="?",
        const="",
        metavar="RULE",
        help="end with the first violation, or the first of a rule",
    )
    parser.add_argument("--keep", action="store_true", help="keep the directory of the run, and say where it is")
    parser.add_argument("--plan", action="store_true", help="only show which faults the seed draws")
    given = parser.parse_args()
    given.seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    return given


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def show(storms: list[Storm]) -> None:
    for storm in storms:
        say(f"storm {storm.cycle} on {', '.join(storm.stores)}")
        for fault in storm.faults:
            say(f"  {fault.at:5.1f} {fault.kind} of {fault.target}, {fault.seconds:.1f} s")


def main() -> int:
    given = arguments()
    options = Options(
        minutes=given.minutes, seed=given.seed, stores=given.stores, only=tuple(given.faults), sabotage=given.sabotage,
        stop_rate=given.stop_rate, until_found=given.until_found, keep=given.keep,
    )  # fmt: skip
    if given.plan:
        show(plan(options.seed, options.minutes, options.stores, len(CREW), options.only))
        return 0
    logging.disable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run removes its files
    say(f"seed {given.seed}")
    run = Run(options)
    try:
        report = run.carry_out()
    except ServerMissing as missing:
        say(str(missing))
        return 2
    say("\n".join(report.lines()))
    if given.keep:
        say(run.directory)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
