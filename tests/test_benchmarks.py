"""The page of the benchmarks shows the results that are committed: tables are never edited by hand."""

from benchmarks import report


def test_the_page_shows_the_committed_results() -> None:
    figures = {make.__name__: make(report.Results(report.RESULTS)) for make in report.FIGURES}
    page = report.PAGE.read_text()
    assert report.filled(page, figures) == page, "python -m benchmarks.report"


def test_each_figure_has_its_place_in_the_page_and_its_charts() -> None:
    page = report.PAGE.read_text()
    for make in report.FIGURES:
        figure = make(report.Results(report.RESULTS))
        assert f"<!-- figures: {figure.name} -->" in page
        for theme in ("light", "dark") if figure.panels else ():
            assert (report.CHARTS / f"{figure.name}-{theme}.svg").exists()
