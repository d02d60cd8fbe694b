"""The command line: `python -m tests.soak --minutes 60`; exit status 1 if something grows, dies or is unexplained."""

import argparse
import logging
import signal
import sys

from tests.random_faults.items import STORES
from tests.servers import ServerMissing
from tests.soak.runner import Soak

USED = [store for store in STORES if store not in {"turned", "version"}]
"""Every store: `turned` is one more Redis, for faults of its clock, and `version` is no store."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=10.0, help="sections per second, of all workers together")
    parser.add_argument("--stores", nargs="+", choices=USED, default=USED)
    parser.add_argument("--restart-every", type=float, default=0.0, help="seconds after which the next server restarts")
    parser.add_argument("--leak", action="store_true", help="let the worker of the core leak: this has to be found")
    given = parser.parse_args()
    logging.disable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run removes its files
    try:
        soak = Soak(given.minutes, given.rate, given.stores, restart_every_s=given.restart_every, leak=given.leak)
        report = soak.carry_out()
    except ServerMissing as missing:
        sys.stdout.write(f"{missing}\n")
        return 2
    sys.stdout.write("\n".join(report.lines()) + "\n")
    return 1 if report.violations() else 0


if __name__ == "__main__":
    sys.exit(main())
