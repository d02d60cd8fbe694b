"""Measure what `import django_dlock` and `import sqla_dlock` cost over the bare framework: modules, time, memory.

python -m benchmarks.imports --rounds 15 [--tree ../another/checkout]

Each import happens in a fresh process. The runs of the bare framework and of dlock alternate in a shuffled order, and
the table shows the differences between their medians. Time is CPU time, so that other programs count little; memory is
the growth of the resident memory. `--tree` measures another checkout in the same rounds.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.measure import Report

HERE: Final = Path(__file__).resolve().parent.parent

DJANGO: Final = """
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth"] + {apps},
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}},
    DLOCK={{"default": {{"BACKEND": "memory://"}}}},
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
)
import django
import django.core.handlers.wsgi
import django.db.models.sql.compiler
import django.shortcuts
import django.views
django.setup()
"""
SQLALCHEMY: Final = "import sqlalchemy\nimport sqlalchemy.orm\n"
IMPORTS: Final = {
    "Django": DJANGO.format(apps=[]),
    "django_dlock": DJANGO.format(apps=["django_dlock"])
    + "import django_dlock.middleware\nfrom django_dlock import lock, locked\nimport dlock_core.backends.memory",
    "SQLAlchemy": SQLALCHEMY,
    "sqla_dlock": SQLALCHEMY + "from sqla_dlock import lock\nimport dlock_core.backends.memory",
}
OVER: Final = {"django_dlock": "Django", "sqla_dlock": "SQLAlchemy"}

PROBE: Final = """
import sys, time
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
before, memory = time.process_time(), resident()
{imports}
seconds, memory = time.process_time() - before, resident() - memory
import json
print(json.dumps({{"modules": len(sys.modules), "ms": 1000 * seconds, "MB": memory / 1e6}}))
"""

Cost = dict[str, float]


def cost(imports: str, tree: Path, compiled: str) -> Cost:
    """Return what one import costs in a fresh process that finds our packages in `tree`, and bytecode in `compiled`."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    code = PROBE.format(imports=imports)
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tree, capture_output=True, check=True)
    told: Cost = json.loads(done.stdout)
    return told


def measure(trees: list[Path], rounds: int, compiled: str) -> list[dict[str, Any]]:
    """Return a row for each package and tree."""
    runs = [(tree, what) for tree in trees for what in IMPORTS]
    for tree, what in runs:
        cost(IMPORTS[what], tree, compiled)  # compiles the modules
    costs: dict[tuple[Path, str], list[Cost]] = {run: [] for run in runs}
    for _ in range(rounds):
        for run in random.sample(runs, len(runs)):
            costs[run].append(cost(IMPORTS[run[1]], run[0], compiled))
    return [row(tree, what, costs) for tree in trees for what in OVER]


def row(tree: Path, what: str, costs: dict[tuple[Path, str], list[Cost]]) -> dict[str, Any]:
    def over(key: str) -> float:
        middle = [statistics.median(one[key] for one in costs[tree, name]) for name in (what, OVER[what])]
        return middle[0] - middle[1]

    figures = {"modules": round(over("modules")), "CPU ms": round(over("ms"), 1), "MB": round(over("MB"), 1)}
    return {"tree": tree.name, "import": f"{what} over {OVER[what]}", **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout to compare with")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    given = parser.parse_args()
    with TemporaryDirectory() as compiled:
        found = measure([HERE, *[tree.resolve() for tree in given.tree]], given.rounds, compiled)
    report = Report(given.format)
    report.add("The cost of an import, over the bare framework", found)
    report.end()


if __name__ == "__main__":
    main()
