"""Plots as data: what is to be seen, before anything is drawn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hybridflow.report.run_data import Floats, finite
from hybridflow.report.thinning import Buckets, bucketed, is_long


@dataclass(frozen=True, kw_only=True)
class Plot(ABC):
    """What every kind of plot has.

    Args:
        name: of the plot in the page, such as "gradient-norm".
        title: over it.
        y_label, x_label: with their units; empty for nothing.
        note: under it, what a reader must know to read it; empty for nothing.
    """

    name: str
    title: str
    y_label: str
    x_label: str = "step"
    note: str = ""
    is_wide: ClassVar[bool] = False
    """Whether it takes the whole width of the page."""

    @abstractmethod
    def description(self) -> str:
        """What a reader is told who does not see it."""


@dataclass(frozen=True)
class Line:
    """One line of a plot.

    Args:
        label: in the legend.
        x, y: (n,); where y is not finite the line has a gap.
        low, high: (n,), where each point stands for many: the lowest and highest of them.
    """

    label: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None

    @classmethod
    def of(cls, label: str, x: Floats, y: Floats) -> Line:
        """The line through these points, or where they are many, through the means of neighbours."""
        return cls.of_buckets(label, bucketed(x, y)) if is_long(x) else cls(label, x, y)

    @classmethod
    def of_buckets(cls, label: str, buckets: Buckets) -> Line:
        """The line through their means, between their extremes."""
        return cls(label, buckets.x, buckets.mean, buckets.low, buckets.high)


@dataclass(frozen=True)
class Band:
    """What lies around a line.

    Args:
        label: in the legend.
        x, low, high: (n,).
    """

    label: str
    x: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, kw_only=True)
class LinePlot(Plot):
    """Lines over steps or time.

    Args:
        lines: at least one.
        band: behind the lines, of the colour of the first.
        logarithmic: whether the y axis is.
        from_zero: whether the y axis begins at 0.
    """

    lines: tuple[Line, ...]
    band: Band | None = None
    logarithmic: bool = False
    from_zero: bool = False

    def description(self) -> str:
        return f"{self.title} by {self.x_label}: " + "; ".join(_course(line) for line in self.lines)


@dataclass(frozen=True)
class Part:
    """One layer of stacked bars.

    Args:
        values: (n,), the height in each bar, none below 0.
    """

    label: str
    values: Floats


@dataclass(frozen=True, kw_only=True)
class BarPlot(Plot):
    """Stacked bars over steps.

    Args:
        x: (n,), the middle of each bar.
        width: of a bar, in steps.
        parts: from the bottom up.
        total: drawn across each bar, which is higher where its parts overlapped in time.
        limit: the highest that the axis shows; higher bars are cut, and say what their total is.
    """

    x: Floats
    width: float
    parts: tuple[Part, ...]
    total: Part
    limit: float
    is_wide = True

    def description(self) -> str:
        means = ", ".join(f"{part.label} {part.values.mean():.3g}" for part in self.parts)
        return f"{self.title}, {self.y_label}, on average: {means}"


@dataclass(frozen=True)
class Bar:
    """What was done in a lane, from `begin` to `end`."""

    label: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class LanePlot(Plot):
    """Who did what when.

    Args:
        lanes: from the top down: the name of each, and its bars.
        labels: of all bars, those that took longest first.
    """

    lanes: tuple[tuple[str, tuple[Bar, ...]], ...]
    labels: tuple[str, ...]
    is_wide = True

    def description(self) -> str:
        lanes = ", ".join(name for name, _ in self.lanes)
        return f"{self.title}: lanes {lanes}; what took longest: {', '.join(self.labels[:4])}"


def _course(line: Line) -> str:
    values = finite(line.y)
    if not len(values):
        return f"{line.label} has no finite value"
    low, high = (values if y is None else finite(y) for y in (line.low, line.high))
    return f"{line.label} from {values[0]:.4g} to {values[-1]:.4g}, lowest {low.min():.4g}, highest {high.max():.4g}"


def spans_decades(lines: tuple[Line, ...], decades: float = 1.5) -> bool:
    """Whether values are all above 0 and so far apart that only a logarithmic axis shows the small ones."""
    values = np.concatenate([finite(line.y) for line in lines])
    return bool(len(values) and values.min() > 0 and np.log10(values.max() / values.min()) > decades)
