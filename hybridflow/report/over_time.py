"""What is plotted over time: the GPUs, and who computed when."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hybridflow.metrics.device_samples import DeviceSample
from hybridflow.metrics.timeline import Span, step_ends
from hybridflow.report.plots import Bar, LanePlot, Line, LinePlot, Plot
from hybridflow.report.thinning import BUCKETS, bucketed

_LAST_STEPS = 3
_LAST_SECONDS = 30.0
_MOST_LANES = 40
_NARROWEST = 1 / 2000
"""Of the plot's width; what is narrower would not be seen."""
_MOST_DEVICE_LINES = 8

_DeviceFigure = tuple[str, str, str, Callable[[DeviceSample], float]]
_DEVICE_FIGURES: tuple[_DeviceFigure, ...] = (
    ("device-utilisation", "Utilisation of the GPUs", "%", lambda sample: sample.utilisation),
    ("device-power", "Power of the GPUs", "W", lambda sample: sample.power_w),
    ("device-memory", "Memory of the GPUs", "GiB", lambda sample: sample.memory_bytes / 2**30),
    ("device-clock", "Clock of the GPUs", "MHz", lambda sample: sample.clock_mhz),
)


def device_plots(samples: Sequence[DeviceSample]) -> Iterator[Plot]:
    """What the GPUs did over time; nothing without samples.

    There is a line for each GPU; where those would be too many for each node; or one for all.
    """
    if not samples:
        return
    began = min(sample.time for sample in samples)
    groups, gpus = _groups(samples)
    note = "A line is the mean of its GPUs, between the lowest and the highest." if len(groups) < gpus else ""
    for name, title, unit, figure in _DEVICE_FIGURES:
        lines = tuple(_device_line(label, group, figure, began) for label, group in groups.items())
        yield LinePlot(name=name, title=title, y_label=unit, x_label="minutes", note=note, lines=lines, from_zero=True)


def _groups(samples: Sequence[DeviceSample]) -> tuple[dict[str, list[DeviceSample]], int]:
    """The samples of each line, in the order of time, by its label; and how many GPUs there are."""
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
    label: str, samples: Sequence[DeviceSample], figure: Callable[[DeviceSample], float], began: float
) -> Line:
    minutes = np.asarray([(sample.time - began) / 60 for sample in samples])
    values = np.asarray([figure(sample) for sample in samples], dtype=np.float64)
    gpus = len({(sample.node, sample.gpu) for sample in samples})
    if gpus == 1:
        return Line.of(label, minutes, values)
    return Line.of_buckets(label, bucketed(minutes, values, min(BUCKETS, -(-len(samples) // gpus))))


def timeline_plots(spans: Sequence[Span]) -> Iterator[Plot]:
    """The last steps, or the last seconds where no step ended; nothing without spans."""
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


def _window(spans: Sequence[Span]) -> tuple[float, float]:
    """Begin and end of the last steps. A step ends when the engines serve the weights that it made."""
    ends = step_ends(spans)
    if len(ends) > 1:
        return ends[-min(_LAST_STEPS + 1, len(ends))], ends[-1]
    end = max(span.end for span in spans)
    return max(min(span.begin for span in spans), end - _LAST_SECONDS), end


def _first_of_each_role(names: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    roles = {role: [name for name in names if name[0] == role] for role, _ in names}
    each = max(1, _MOST_LANES // len(roles))
    return [name for ranks in roles.values() for name in ranks[:each]]
