"""Where the time of a step went."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hybridflow.metrics import names as metrics
from hybridflow.report.plots import BarPlot, Part, Plot
from hybridflow.report.run_data import Floats, RunData, Series
from hybridflow.report.thinning import bucketed

_MOST_BARS = 80
_CUT_ABOVE = 4.0
"""A bar of more than so many medians, such as a first step that compiles, would leave the others too low to see."""
_PARTS = (
    ("generation", metrics.ROLLOUT_TIME),
    ("baseline", metrics.BASELINE_TIME),
    ("rewards", metrics.REWARD_LATENCY),
    ("inference", metrics.INFERENCE_TIME),
    ("updates", metrics.TRAIN_UPDATE_TIME),
    ("wait for the evaluation", metrics.EVAL_WAIT_TIME),
    ("weights to the engines", metrics.SYNC_TIME),
)


def step_time_plots(run: RunData) -> Iterator[Plot]:
    """The parts of each step, stacked; what no part accounts for is everything else. Nothing if no step was timed."""
    total = run.series(metrics.TRAIN_STEP_TIME)
    if total is None:
        return
    parts = [(label, series) for label, name in _PARTS if (series := run.series(name)) is not None]
    columns = [total.values, *(_at(total.steps, series) for _, series in parts)]
    bars = min(_MOST_BARS, len(total.steps))
    buckets = [bucketed(total.steps, column / 1000, bars) for column in columns]
    x, (step, *phases) = buckets[0].x, (np.nan_to_num(bucket.mean) for bucket in buckets)
    size = len(total.steps) / bars
    # Phases that overlap in time add up to more than the step: then nothing is left, rather than less than nothing.
    rest = np.maximum(step - sum(phases, np.zeros_like(step)), 0.0)
    labels = [label for label, _ in parts]
    heights = np.maximum(step, sum(phases, np.zeros_like(step)))
    limit = _limit(heights)
    notes = [f"{len(total.steps):,} steps in {bars} bars, each the mean of its own."] if size > 1 else []
    notes.append("A line across a bar is the time of the step; parts above it overlapped in time.")
    if (heights > limit).any():
        notes.append("A bar with an arrow is cut; the number is the time of its step.")
    yield BarPlot(
        name="step-times",
        title="Time of a step",
        y_label="s",
        x_label="step",
        note=" ".join(notes),
        x=x,
        width=size,
        parts=(*map(Part, labels, phases), Part("everything else", rest)),
        total=Part("whole step", step),
        limit=limit,
    )


def _at(steps: Floats, series: Series) -> Floats:
    """The figure at every step, 0 where it was not logged."""
    values = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
    return np.asarray([values.get(step, 0.0) for step in steps.tolist()])


def _limit(heights: Floats) -> float:
    highest, usual = float(heights.max()), float(np.median(heights))
    if len(heights) > 2 and highest > _CUT_ABOVE * usual > 0:
        return 1.15 * float(heights[heights <= _CUT_ABOVE * usual].max())
    return 1.05 * highest or 1.0
