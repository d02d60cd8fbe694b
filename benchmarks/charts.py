"""Charts of docs/benchmarks.md: bars of ratios with floor and goal, and growth curves, for light and dark pages.

A chart is an SVG with a transparent background. Ours stand out, peers are muted; each bar carries its value, so it
needs no scale.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import log
from pathlib import Path
from typing import Any, Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from benchmarks.panels import Bars, Growth, Panel, number

WIDTH_IN: Final = 8.6
BAR_IN: Final = 0.27
PLOT_PT: Final = 115.0
"""The approximate height of a growth panel's axis."""
NAME_PT: Final = 11.0
THEMES: Final = {
    "light": {"text": "#1f2328", "faint": "#818b98", "ours": "#0969da", "peer": "#c4ccd6", "floor": "#8c959f"},
    "dark": {"text": "#f0f6fc", "faint": "#9198a1", "ours": "#4493f8", "peer": "#4a525c", "floor": "#818b98"},
}
GOAL: Final = {"light": "#cf222e", "dark": "#ff7b72"}
SETTINGS: Final = {
    "font.family": "DejaVu Sans", "font.size": 9, "svg.fonttype": "path", "svg.hashsalt": "dlock",
    "axes.spines.top": False, "axes.spines.right": False, "axes.facecolor": "none",
}  # fmt: skip


def draw(panels: Sequence[Panel], columns: int, path: Path) -> None:
    """Write `path` with -light and -dark before its suffix."""
    for theme, of_theme in THEMES.items():
        colours = {**of_theme, "goal": GOAL[theme]}
        file = path.with_stem(f"{path.stem}-{theme}")
        with themed(colours):
            paint(panels, columns, colours).savefig(file, transparent=True, metadata={"Date": None, "Creator": None})


@contextmanager
def themed(colours: dict[str, str]) -> Iterator[None]:
    text = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), colours["text"])
    with rc_context({**SETTINGS, **text, "axes.edgecolor": colours["faint"]}):
        yield


def paint(panels: Sequence[Panel], columns: int, colours: dict[str, str]) -> Figure:
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heights = [max(map(height, row)) for row in rows]
    figure = Figure(figsize=(WIDTH_IN, sum(heights) + 0.3), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for row, axes in zip(rows, grid, strict=True):
        for index, axis in enumerate(axes):
            if index >= len(row):
                axis.set_axis_off()
            elif isinstance(panel := row[index], Bars):
                names = index == 0 or labels(panel) != labels(row[0])
                bars(axis, panel, colours, with_names=names)
            else:
                growth(axis, panel, colours)
    if any(isinstance(panel, Bars) for panel in panels):
        legend(figure, panels, colours)
    return figure


def height(panel: Panel) -> float:
    return 0.45 + BAR_IN * len(panel.bars) if isinstance(panel, Bars) else 2.3


def labels(panel: Panel) -> list[str]:
    return [bar.label for bar in panel.bars] if isinstance(panel, Bars) else []


def bars(axis: Axes, panel: Bars, colours: dict[str, str], *, with_names: bool) -> None:
    places = range(len(panel.bars))
    end = max([bar.value or 0 for bar in panel.bars] + [bar.goal or 0 for bar in panel.bars] + [panel.floor or 0])
    for place, bar in zip(places, panel.bars, strict=True):
        axis.barh(place, bar.value or 0, height=0.68, color=colours[bar.role], linewidth=0)
        reach = max(bar.value or 0, bar.goal or 0)
        if panel.floor is not None and reach < panel.floor:
            reach = panel.floor  # beyond its line
        weight = "bold" if bar.role == "ours" else "normal"
        axis.text(reach + end * 0.02, place, number(bar.value), va="center", weight=weight)
        if bar.goal is not None:
            axis.plot([bar.goal] * 2, [place - 0.44, place + 0.44], color=colours["goal"], linewidth=2.2, zorder=3)
    if panel.floor is not None:
        axis.axvline(panel.floor, color=colours["faint"], linewidth=1, linestyle=(0, (3, 2)), zorder=2)
    axis.set_title(panel.title, loc="left", fontsize=9.5)
    axis.set_yticks(places, labels(panel) if with_names else [])
    axis.tick_params(length=0)
    for tick, bar in zip(axis.get_yticklabels(), panel.bars, strict=False):
        tick.set_fontweight("bold" if bar.role == "ours" else "normal")
    axis.set_xticks([])
    axis.set_xlim(0, end * 1.17)
    axis.set_ylim(len(panel.bars) - 0.4, -0.6)
    axis.spines["bottom"].set_visible(False)


def legend(figure: Figure, panels: Sequence[Panel], colours: dict[str, str]) -> None:
    """Explain the marks that occur, in a line below the panels."""
    sets = [panel for panel in panels if isinstance(panel, Bars)]
    marks: list[Any] = []
    if any(panel.floor is not None for panel in sets):
        marks.append(handle("the floor", color=colours["faint"], linewidth=1, linestyle=(0, (3, 2))))
    if any(bar.goal is not None for panel in sets for bar in panel.bars):
        marks.append(handle("goal", color=colours["goal"], linewidth=2.2))
    if marks:
        figure.legend(handles=marks, loc="outside lower right", ncols=2, frameon=False, fontsize=8, handlelength=1.6)


def handle(label: str, **style: Any) -> Any:
    return Line2D([], [], label=label, **style)


def growth(axis: Axes, panel: Growth, colours: dict[str, str]) -> None:
    axis.set_xscale("log")
    axis.set_yscale("log")
    for line in panel.lines:
        ours = line.role == "ours"
        style = {"linewidth": 2.2 if ours else 1.3, "markersize": 4 if ours else 3, "zorder": 3 if ours else 2}
        axis.plot(*zip(*line.points, strict=True), color=colours[line.role], marker="o", **style)
    values = [y for line in panel.lines for _, y in line.points]
    axis.set_ylim(min(values) / 1.6, max(values) * 1.6)
    names_of_lines(axis, panel, colours)
    axis.set_title(panel.title, loc="left", fontsize=9.5)
    axis.set_xlabel(panel.of, fontsize=8.5)
    axis.xaxis.set_major_locator(FixedLocator(sorted({x for line in panel.lines for x, _ in line.points})))
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 50 * min(values) else (1,), numticks=8))
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
        scale.set_minor_locator(NullLocator())
    axis.tick_params(which="both", length=0, labelsize=8)
    axis.grid(visible=True, axis="y", color=colours["faint"], alpha=0.25, linewidth=0.6)


def names_of_lines(axis: Axes, panel: Growth, colours: dict[str, str]) -> None:
    """Write the name and the last value at the end of each line, and move apart names that would overlap."""
    low, high = map(log, axis.get_ylim())
    lines = sorted(panel.lines, key=lambda line: line.points[-1][1])
    heights = [(log(line.points[-1][1]) - low) / (high - low) * PLOT_PT for line in lines]
    for line, height, place in zip(lines, heights, apart(heights), strict=True):
        last, ours = line.points[-1], line.role == "ours"
        name = f"{line.label} {number(last[1])}"
        axis.annotate(
            name, last, xytext=(6, place - height), textcoords="offset points", va="center", fontsize=8,
            color=colours["ours" if ours else "text"], weight="bold" if ours else "normal", annotation_clip=False,
        )  # fmt: skip


def apart(heights: Sequence[float]) -> list[float]:
    """Return places for names near these ascending heights, so that none overlaps another or rises above the panel."""
    places, bottom, top = [], float("-inf"), PLOT_PT
    for height in heights:
        bottom = max(height, bottom + NAME_PT)
        places.append(bottom)
    for index in reversed(range(len(places))):
        places[index] = min(places[index], top)
        top = places[index] - NAME_PT
    return places
