"""Plots of times: the phases of each step, the GPUs, and the calls of every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hybridflow.metrics import names as metrics
from hybridflow.metrics.device_samples import DeviceSample
from hybridflow.metrics.timeline import TimelineSpan, step_ends
from hybridflow.report.plots import BUCKETS, Bar, BarPlot, LanePlot, Layer, Line, LinePlot, Plot, bucketed
from hybridflow.report.run_data import Floats, RunData, Series

_MOST_BARS = 80
_CUT_ABOVE = 4.0
"""Medians. A higher bar, such as a first step that compiles, would leave the others too low to see."""
_PHASES = (
    ("generation", metrics.ROLLOUT_TIME),
    ("baseline", metrics.BASELINE_TIME),
    ("rewards", metrics.REWARD_LATENCY),
    ("inference", metrics.INFERENCE_TIME),
    ("updates", metrics.TRAIN_UPDATE_TIME),
    ("wait for the evaluation", metrics.EVAL_WAIT_TIME),
    ("weights to the engines", metrics.SYNC_TIME),
)
_LAST_STEPS = 3
_LAST_SECONDS = 30.0
_MOST_LANES = 40
_NARROWEST = 1 / 2000
"""Share of the plot's width; a narrower bar is invisible."""
_MOST_DEVICE_LINES = 8

_DeviceMetric = tuple[str, str, str, Callable[[DeviceSample], float]]
_DEVICE_METRICS: tuple[_DeviceMetric, ...] = (
    ("device-utilisation", "Utilisation of the GPUs", "%", lambda sample: sample.utilisation),
    ("device-power", "Power of the GPUs", "W", lambda sample: sample.power_w),
    ("device-memory", "Memory of the GPUs", "GiB", lambda sample: sample.memory_bytes / 2**30),
    ("device-clock", "Clock of the GPUs", "MHz", lambda sample: sample.clock_mhz),
)


def step_time_plots(run: RunData) -> Iterator[Plot]:
    """Stack the phases of each step; time of no phase is "everything else". No plot if no step was timed."""
    total = run.series(metrics.TRAIN_STEP_TIME)
    if total is None:
        return
    timed = [(label, series) for label, name in _PHASES if (series := run.series(name)) is not None]
    columns = [total.values, *(_at(total.steps, series) for _, series in timed)]
    bars = min(_MOST_BARS, len(total.steps))
    buckets = [bucketed(total.steps, column / 1000, bars) for column in columns]
    x, (step, *phases) = buckets[0].x, (np.nan_to_num(bucket.mean) for bucket in buckets)
    size = len(total.steps) / bars
    stacked = sum(phases, np.zeros_like(step))
    rest = np.maximum(step - stacked, 0.0)  # phases that overlap in time add up to more than the step
    labels = [label for label, _ in timed]
    heights = np.maximum(step, stacked)
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
        layers=(*map(Layer, labels, phases), Layer("everything else", rest)),
        total=Layer("whole step", step),
        limit=limit,
    )


def _at(steps: Floats, series: Series) -> Floats:
    """Return the value at every step, 0 where it was not logged."""
    values = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
    return np.asarray([values.get(step, 0.0) for step in steps.tolist()])


def _limit(heights: Floats) -> float:
    highest, usual = float(heights.max()), float(np.median(heights))
    if len(heights) > 2 and highest > _CUT_ABOVE * usual > 0:
        return 1.15 * float(heights[heights <= _CUT_ABOVE * usual].max())
    return 1.05 * highest or 1.0


def device_plots(samples: Sequence[DeviceSample]) -> Iterator[Plot]:
    """Plot the samples of the GPUs over time; no plot without samples.

    There is a line for each GPU, or for each node if those are too many, or one for all.
    """
    if not samples:
        return
    began = min(sample.time for sample in samples)
    groups, gpus = _groups(samples)
    note = "A line is the mean of its GPUs, between the lowest and the highest." if len(groups) < gpus else ""
    for name, title, unit, metric in _DEVICE_METRICS:
        lines = tuple(_device_line(label, group, metric, began) for label, group in groups.items())
        yield LinePlot(name=name, title=title, y_label=unit, x_label="minutes", note=note, lines=lines, from_zero=True)


def _groups(samples: Sequence[DeviceSample]) -> tuple[dict[str, list[DeviceSample]], int]:
    """Return the samples of each line by its label, in the order of time, and the number of GPUs."""
    gpus = sorted({(sample.node, sample.gpu) for sample in samples})
    nodes = sorted({node for node, _ in gpus})
    labels = {(node, gpu): f"GPU {gpu}" if len(nodes) == 1 else f"{node} GPU {gpu}" for node, gpu in gpus}
    if len(gpus) > _MOST_DEVICE_LINES:
        one = len(nodes) > _MOST_DEVICE_LINES
        labels = {(node, gpu): f"{len(gpus)} GPUs of {len(nodes)} nodes" if one else node for node, gpu in gpus}
    groups: dict[str, list[DeviceSample]] = {label: [] for label in labels.values()}
    for sample in sorted(samples, key=lambda sample: sample.time):
        groups[labels[sample.node, sample.gpu]].append(sample)
    return groups, len(gpus)


def _device_line(
    label: str, samples: Sequence[DeviceSample], metric: Callable[[DeviceSample], float], began: float
) -> Line:
    minutes = np.asarray([(sample.time - began) / 60 for sample in samples])
    values = np.asarray([metric(sample) for sample in samples], dtype=np.float64)
    gpus = len({(sample.node, sample.gpu) for sample in samples})
    if gpus == 1:
        return Line.of(label, minutes, values)
    return Line.of_buckets(label, bucketed(minutes, values, min(BUCKETS, -(-len(samples) // gpus))))


def timeline_plots(spans: Sequence[TimelineSpan]) -> Iterator[Plot]:
    """Plot the calls of the last steps, or of the last seconds if no step ended; no plot without spans."""
    if not spans:
        return
    begin, end = _window(spans)
    if begin == end:
        return
    seen = [span for span in spans if span.end > begin and span.begin < end]
    visible = [span for span in seen if min(span.end, end) - max(span.begin, begin) >= _NARROWEST * (end - begin)]
    took: dict[str, float] = {}
    lanes: dict[tuple[str, int], list[Bar]] = {}
    for span in visible:
        first, last = max(span.begin, begin) - begin, min(span.end, end) - begin
        took[span.method] = took.get(span.method, 0.0) + last - first
        lanes.setdefault((span.role, span.rank), []).append(Bar(span.method, first, last))
    if not lanes:  # all of them too short to be seen
        return
    names = sorted(lanes)
    notes = []
    if len(names) > _MOST_LANES:
        notes.append(f"{_MOST_LANES} of {len(names)} ranks, of each role the first.")
        names = _first_of_each_role(names)
    if len(visible) < len(seen):
        notes.append("Calls too short to be seen are left out.")
    yield LanePlot(
        name="timeline",
        title="Who computed when: the last steps",
        y_label="",
        x_label="seconds",
        note=" ".join(notes),
        lanes=tuple((f"{role} {rank}", tuple(lanes[role, rank])) for role, rank in names),
        labels=tuple(sorted(took, key=lambda label: -took[label])),
    )


def _window(spans: Sequence[TimelineSpan]) -> tuple[float, float]:
    """Return begin and end of the last steps. A step ends when the engines serve its weights."""
    ends = step_ends(spans)
    if len(ends) > 1:
        return ends[-min(_LAST_STEPS + 1, len(ends))], ends[-1]
    end = max(span.end for span in spans)
    return max(min(span.begin for span in spans), end - _LAST_SECONDS), end


def _first_of_each_role(names: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    roles = {role: [name for name in names if name[0] == role] for role, _ in names}
    count = max(1, _MOST_LANES // len(roles))
    return [name for ranks in roles.values() for name in ranks[:count]]
