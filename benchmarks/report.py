"""Fill docs/benchmarks.md with the tables of the last results, and draw its charts.

    python -m benchmarks.report [--check]

Only the parts between `<!-- figures: NAME -->` and `<!-- end of figures -->` are written; all other text of the page is
written by hand, and kept. --check compares instead of writing, needs no plotting library, and exits with status 1 when
the page does not show the results.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Final

from benchmarks import growth, rows
from benchmarks.figures import Figure, Results
from benchmarks.run import RESULTS

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
PAGE: Final = DOCS / "benchmarks.md"
CHARTS: Final = DOCS / "charts"
FIGURES: Final = (*rows.FIGURES, *growth.FIGURES)
BLOCK: Final = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(<!-- end of figures -->)", re.S)


def picture(figure: Figure) -> str:
    """Return the chart as HTML that follows the reader's choice of a light or dark page."""
    source = f"charts/{figure.name}"
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{source}-dark.svg">'
        f'<img alt="{figure.alt}" src="{source}-light.svg"></picture>'
    )


def block(figure: Figure) -> str:
    return f"{figure.table}\n\n{picture(figure)}\n" if figure.panels else f"{figure.table}\n"


def filled(page: str, figures: dict[str, Figure]) -> str:
    return BLOCK.sub(lambda found: f"{found[1]}\n{block(figures[found['name']])}\n{found[3]}", page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    results, page = Results(RESULTS), PAGE.read_text()
    figures = {make.__name__: make(results) for make in FIGURES}
    new = filled(page, figures)
    if given.check:
        return int(new != page)
    from benchmarks import charts

    CHARTS.mkdir(exist_ok=True)
    for figure in figures.values():
        if figure.panels:
            charts.draw(figure.panels, figure.columns, CHARTS / f"{figure.name}.svg")
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
