"""Run all benchmarks of docs/benchmarks.md one after the other, and keep their results as JSON.

    python -m benchmarks.run [--scale 0.1] [part ...]

Each part is one command in its own process; its results replace the file of the same name in benchmarks/results. These
files are committed, so that `benchmarks.report` can make page and charts without a measurement, and a single part can
be measured again. --scale shortens everything for a trial; such figures mean little.
"""

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results"
MAX_PART_S: Final = 900

Options = dict[str, float | str]
PEERS: Final = "dlock,redis-py,python-redis-lock"
PARTS: Final[dict[str, tuple[str, Options]]] = {
    "uncontended": ("uncontended", {"rounds": 15, "count": 300}),
    "uncontended-network": ("uncontended", {"rounds": 9, "count": 60, "latency": 0.5}),
    "contended": ("contended", {"rounds": 3, "seconds": 1.2, "only": PEERS}),
    "contended-growth": (
        "contended",
        {"rounds": 2, "seconds": 1.0, "only": "dlock", "processes": "4,16,64", "think": "0"},
    ),
    "held": ("held", {"sizes": "10,100,1000,10000,100000"}),
    "many": ("many", {"rounds": 9, "count": 60, "sizes": "10"}),
    "many-growth": ("many", {"rounds": 5, "count": 60, "sizes": "1,100,1000", "only": "dlock"}),
    "django_orm": ("django_orm", {"rounds": 15, "count": 60}),
    "request": ("request", {"rounds": 15, "count": 60}),
    "request-network": ("request", {"rounds": 7, "count": 30, "latency": 0.5}),
    "sqlalchemy_lock": ("sqlalchemy_lock", {"rounds": 15, "count": 60}),
    "sqlalchemy_lock-network": ("sqlalchemy_lock", {"rounds": 7, "count": 30, "latency": 0.5}),
    "sqlalchemy_flush": ("sqlalchemy_flush", {"rounds": 9, "count": 40}),
    "counter": ("counter", {"repeat": 3, "seconds": 1.5}),
    "crowd": ("crowd", {"tasks": "1,10,100,1000", "seconds": 5.0}),
    "imports": ("imports", {"rounds": 15}),
    "advisory": ("advisory", {"rounds": 15, "count": 100}),
    "stores": ("stores", {"rounds": 9, "count": 60}),
    "load": ("load", {"customers": "1,4,16,64", "orders": 100, "wait": 3.0}),
}
"""What is measured, in this order: the name of the results, the module, its options."""

SCALED: Final = {"rounds": 2, "count": 4, "repeat": 1, "seconds": 0.3}
"""Options that --scale multiplies, and the least value of each."""
LIBRARIES: Final = (
    "redis", "hiredis", "python-redis-lock", "pottery", "Django", "psycopg", "django-pglock", "django-optimistic-lock",
    "SQLAlchemy", "sqlalchemy-dlock",
)  # fmt: skip


def scaled(options: Options, scale: float) -> Options:
    def one(name: str, value: float | str) -> float | str:
        if name not in SCALED:
            return value
        return type(value)(max(value * scale, min(value, SCALED[name])))

    return {name: one(name, value) for name, value in options.items()}


def measured(module: str, options: Options) -> dict[str, Any]:
    """Run one benchmark, and return its command, the load, its duration, and its tables."""
    command = ["-m", f"benchmarks.{module}", *(f"--{name}={value}" for name, value in options.items())]
    load, start = os.getloadavg()[0], time.monotonic()
    done = subprocess.run(
        [sys.executable, *command, "--format=json"], capture_output=True, text=True, check=False, timeout=MAX_PART_S
    )
    if done.returncode:
        raise ValueError(done.stderr[-2000:])
    return {
        "command": " ".join(["python", *command]),
        "load before": round(load, 1),
        "seconds": round(time.monotonic() - start),
        "tables": json.loads(done.stdout),
    }


def machine() -> dict[str, str | int]:
    """Describe in general terms where this ran."""

    def first_line(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        except (OSError, subprocess.CalledProcessError):
            return "not installed"

    def installed(library: str) -> str:
        try:
            return version(library)
        except PackageNotFoundError:
            return "not installed"

    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "Python": platform.python_version(),
        "Redis": first_line("redis-server", "--version").partition("v=")[2].partition(" ")[0],
        **{library: installed(library) for library in LIBRARIES},
    }


def write(name: str, what: Any) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(what, ensure_ascii=False, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)}; by default all")
    parser.add_argument("--scale", type=float, default=1.0)
    given = parser.parse_args()
    if unknown := set(given.part) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    RESULTS.mkdir(exist_ok=True)
    failed, start = [], time.monotonic()
    for name in given.part or PARTS:
        module, options = PARTS[name]
        try:
            found = measured(module, scaled(options, given.scale))
        except (subprocess.SubprocessError, ValueError) as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
        else:
            write(name, found)
            print(f"{name}: {found['seconds']} s", flush=True)
    write("machine", machine())
    print(f"{(time.monotonic() - start) / 60:.1f} minutes; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
