"""Heat maps of a run's experts: their loads and their biases, by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from hybridflow.metrics.expert_loads import ExpertLoads, StepLoads
from hybridflow.report.plots import HEAT_CLASSES, HeatPlot
from hybridflow.report.run_data import RunData
from hybridflow.report.tables import Cell, Table

_LOADS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
_NO_TOKEN = "no token"


def expert_load_plots(run: RunData, steps: tuple[int, int] | None = None) -> Iterator[HeatPlot]:
    """Draw loads and biases of each model's experts at two steps.

    Args:
        run: with the loads of some steps.
        steps: the newest of these that is not later is drawn for each; the first and the last if None.
    """
    for record in _chosen(run.expert_loads, steps):
        for role, model in record.models.items():
            yield _load_plot(role, record.step, model)
            if model.biases is not None and np.ptp(model.biases) > 0:
                yield _bias_plot(role, record.step, model)


def _chosen(records: Sequence[StepLoads], steps: tuple[int, int] | None) -> list[StepLoads]:
    if not records:
        return []
    if steps is None:
        chosen = [records[0], records[-1]]
    else:
        chosen = [next((record for record in reversed(records) if record.step <= step), records[0]) for step in steps]
    return list({record.step: record for record in chosen}.values())


def _load_plot(role: str, step: int, model: ExpertLoads) -> HeatPlot:
    bounds = [f"{bound:g}" for bound in _LOADS]
    return HeatPlot(
        name=f"expert-load-{role}-{step}",
        title=f"Load of the {role}'s experts in step {step:,}, over the mean of the layer".replace("_", " "),
        y_label="layer",
        x_label="expert",
        rows=model.layers,
        values=model.loads,
        bounds=_LOADS,
        classes=_class_names(bounds),
        unit="times the mean",
        zeros=_NO_TOKEN,
    )


def _bias_plot(role: str, step: int, model: ExpertLoads) -> HeatPlot:
    assert model.biases is not None
    width = 2 * float(np.abs(model.biases).max()) / HEAT_CLASSES
    bounds = tuple(width * (index - HEAT_CLASSES / 2) for index in range(1, HEAT_CLASSES))
    return HeatPlot(
        name=f"expert-bias-{role}-{step}",
        title=f"Biases of the {role}'s experts in step {step:,}, less the mean of the layer".replace("_", " "),
        y_label="layer",
        x_label="expert",
        rows=model.layers,
        values=model.biases,
        bounds=bounds,
        classes=_class_names([f"{bound:.2g}" for bound in bounds]),
    )


def _class_names(bounds: Sequence[str]) -> tuple[str, ...]:
    between = (f"{low} to {high}" for low, high in pairwise(bounds))
    return (f"below {bounds[0]}", *between, f"{bounds[-1]} and more")


def rows_table(plot: HeatPlot) -> Table:
    """Tabulate the highest and the lowest value of each row of a heat map, and its zeros where those are crossed."""
    columns = (plot.y_label, "highest", plot.x_label, "lowest", plot.x_label, *((plot.zeros,) if plot.zeros else ()))
    rows = []
    for number, values in zip(plot.rows, plot.values, strict=True):
        high, low = int(values.argmax()), int(values.argmin())
        zeros = (Cell(f"{int((values == 0).sum())}"),) if plot.zeros else ()
        cells = (str(number), f"{values[high]:.4g}", str(high), f"{values[low]:.4g}", str(low))
        rows.append((*map(Cell, cells), *zeros))
    return Table(columns, tuple(rows))
