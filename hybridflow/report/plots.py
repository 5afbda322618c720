"""Plots as data, before anything is drawn, with as many points as a drawing can show."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hybridflow.report.run_data import Floats, finite

BUCKETS = 300
"""Points of a line at most: a plot is about twice as many pixels wide."""


@dataclass(frozen=True)
class Buckets:
    """Neighbouring points, merged.

    Args:
        x: (m,), the mean of the bucket.
        mean, low, high: (m,), of the finite values of the bucket; nan where it has none.
    """

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def is_long(x: Floats) -> bool:
    """True if there are more points than a plot can show."""
    return len(x) > 2 * BUCKETS


def bucketed(x: Floats, y: Floats, buckets: int = BUCKETS) -> Buckets:
    """Merge points into buckets of nearly equal size.

    Args:
        x, y: (n,), in the order of x, with n at least `buckets`.
    """
    bounds = np.linspace(0, len(x), buckets + 1).astype(int)
    firsts, sizes = bounds[:-1], np.diff(bounds)
    is_finite = np.isfinite(y)
    count = np.add.reduceat(is_finite, firsts, dtype=np.float64)
    empty = count == 0

    def reduced(reduce: np.ufunc, of_others: float) -> Floats:
        values: Floats = reduce.reduceat(np.where(is_finite, y, of_others), firsts)
        return np.where(empty, np.nan, values)

    return Buckets(
        x=np.add.reduceat(x, firsts) / sizes,
        mean=reduced(np.add, 0.0) / np.where(empty, 1.0, count),
        low=reduced(np.minimum, np.inf),
        high=reduced(np.maximum, -np.inf),
    )


@dataclass(frozen=True, kw_only=True)
class Plot(ABC):
    """A plot of any kind.

    Args:
        name: of the plot in the page, such as "gradient-norm".
        title: over it.
        y_label, x_label: with their units; empty for nothing.
        note: under it, needed to read it; empty for nothing.
    """

    name: str
    title: str
    y_label: str
    x_label: str = "step"
    note: str = ""
    is_wide: ClassVar[bool] = False
    """True if it takes the full width of the page."""

    @abstractmethod
    def description(self) -> str:
        """Describe it to a reader who does not see it."""


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
        """Make the line through these points or, if they are many, through the means of neighbours."""
        return cls.of_buckets(label, bucketed(x, y)) if is_long(x) else cls(label, x, y)

    @classmethod
    def of_buckets(cls, label: str, buckets: Buckets) -> Line:
        """Make the line through the means, between the extremes."""
        return cls(label, buckets.x, buckets.mean, buckets.low, buckets.high)


@dataclass(frozen=True)
class Band:
    """The area around a line.

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
        logarithmic: True if the y axis is.
        from_zero: True if the y axis begins at 0.
    """

    lines: tuple[Line, ...]
    band: Band | None = None
    logarithmic: bool = False
    from_zero: bool = False

    def description(self) -> str:
        return f"{self.title} by {self.x_label}: " + "; ".join(_course(line) for line in self.lines)


@dataclass(frozen=True)
class Layer:
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
        layers: from the bottom up.
        total: drawn across each bar, which is higher where layers overlapped in time.
        limit: upper end of the axis; higher bars are cut and labelled with their total.
    """

    x: Floats
    width: float
    layers: tuple[Layer, ...]
    total: Layer
    limit: float
    is_wide = True

    def description(self) -> str:
        means = ", ".join(f"{layer.label} {layer.values.mean():.3g}" for layer in self.layers)
        return f"{self.title}, {self.y_label}, on average: {means}"


@dataclass(frozen=True)
class Bar:
    """A call in a lane, from `begin` to `end`."""

    label: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class LanePlot(Plot):
    """Calls over time, in lanes.

    Args:
        lanes: name and bars, from the top down.
        labels: of all bars, the longest in total first.
    """

    lanes: tuple[tuple[str, tuple[Bar, ...]], ...]
    labels: tuple[str, ...]
    is_wide = True

    def description(self) -> str:
        lanes = ", ".join(name for name, _ in self.lanes)
        return f"{self.title}: lanes {lanes}; what took longest: {', '.join(self.labels[:4])}"


HEAT_CLASSES = 7
"""Colours of a heat map: the middle one, and three on either side of it."""


@dataclass(frozen=True, kw_only=True)
class HeatPlot(Plot):
    """A matrix of values as colours; `x_label` and `y_label` name a column and a row.

    Args:
        rows: numbers of the R rows, from the top down.
        values: (R, C), finite.
        bounds: ascending, between the `HEAT_CLASSES` classes; a value at a bound is in the class above.
        classes: names of the classes in the legend.
        unit: after a value, such as "times the mean"; empty for nothing.
        zeros: name of cells that are 0, which are crossed; empty to give them a class.
    """

    rows: tuple[int, ...]
    values: Floats
    bounds: tuple[float, ...]
    classes: tuple[str, ...]
    unit: str = ""
    zeros: str = ""
    is_wide = True

    def description(self) -> str:
        extremes = (f"{name} {self._cell(int(index))}" for name, index in self._extremes())
        crossed = f"; {self.zeros}: {int((self.values == 0).sum())}" if self.zeros else ""
        return f"{self.title}, a {self.y_label} by {self.x_label} matrix: {'; '.join(extremes)}{crossed}"

    def _extremes(self) -> tuple[tuple[str, np.intp], ...]:
        return ("highest", self.values.argmax()), ("lowest", self.values.argmin())

    def _cell(self, index: int) -> str:
        row, column = divmod(index, self.values.shape[1])
        value = f"{self.values[row, column]:.4g} {self.unit}".strip()
        return f"{value} at {self.y_label} {self.rows[row]}, {self.x_label} {column}"


def _course(line: Line) -> str:
    values = finite(line.y)
    if not len(values):
        return f"{line.label} has no finite value"
    low, high = (values if y is None else finite(y) for y in (line.low, line.high))
    return f"{line.label} from {values[0]:.4g} to {values[-1]:.4g}, lowest {low.min():.4g}, highest {high.max():.4g}"


def spans_decades(lines: tuple[Line, ...], decades: float = 1.5) -> bool:
    """True if values are all above 0 and so far apart that only a logarithmic axis shows the small ones."""
    values = np.concatenate([finite(line.y) for line in lines])
    return bool(len(values) and values.min() > 0 and np.log10(values.max() / values.min()) > decades)
