"""What a chart shows, without a plotting library: sets of bars, and curves of growth."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["ours", "peer", "floor"]


@dataclass(frozen=True)
class Bar:
    label: str
    value: float | None
    role: Role = "peer"
    goal: float | None = None


@dataclass(frozen=True)
class Bars:
    """One set of bars; `floor` is where the floor's line stands, if the values are ratios to it."""

    title: str
    bars: Sequence[Bar]
    floor: float | None = 1.0


@dataclass(frozen=True)
class Line:
    label: str
    points: Sequence[tuple[float, float]]
    role: Role = "peer"


@dataclass(frozen=True)
class Growth:
    """Growth curves, with both axes logarithmic."""

    title: str
    of: str
    lines: Sequence[Line]


Panel = Bars | Growth


def number(value: float | None) -> str:
    """Write about three significant digits; from 100 on, a whole number with commas."""
    if value is None:
        return "-"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.05 else f"{value:.2g}"
