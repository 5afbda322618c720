"""Comparison of a replay with the run: the same bits, within a tolerance, or neither."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.metrics import names as metrics

Verdict = Literal["same", "close", "different"]

# `computed_again` is the earlier name of `capacity_retries`, in stored runs.
_OF_TIME_AND_PLACE = re.compile(
    r"(?:device|memory|sync|step|checkpoint|offload|stream)/.*|.*(?:_ms|_sec|/mfu|_mb|_w|_j|_bytes|/capacity_retries|/computed_again)"
)
"""Metrics of time, of the machine, and of the use of engines."""
_OF_ALL_SAMPLES = ("rollout/", "reward/", "cost/")
"""Groups of metrics of how samples were drawn and rewarded, some of which may not be stored."""
_OF_CHOICE = ("sampling/", "replay/", metrics.PREFERENCE_WITHOUT_DIFFERENCE)
"""Metrics of how the samples that are stored were chosen, which is not done again."""
_OF_LAYOUT = (metrics.TRAIN_PADDING_SHARE,)
_OF_VERSIONS = (metrics.STREAM_STALENESS_MAX, metrics.STREAM_MIXED_SHARE)


@dataclass(frozen=True)
class Tolerance:
    """Differences that another layout may make.

    Args:
        relative, absolute: of a figure: within relative * |figure of the run| + absolute.
        of_change: norm of the difference of weights, over that of what the steps have changed.
        of_weights: the same over that of the weights, where what was before is not known.
    """

    relative: float
    absolute: float
    of_change: float
    of_weights: float


TOLERANCES = {
    "float32": Tolerance(relative=1e-2, absolute=1e-4, of_change=1e-2, of_weights=1e-4),
    "bfloat16": Tolerance(relative=0.1, absolute=1e-2, of_change=0.3, of_weights=1e-3),
}
"""Tolerances by the dtype in which models compute. Adam divides a gradient by its own size, so that rounding moves the
weights of the smallest gradients most.
"""


@dataclass(frozen=True)
class MetricsCompared:
    """The metrics of one step, compared.

    Args:
        compared: how many.
        differing: name, figure of the run, and of the replay, of those that are not the same; nan where the replay has
            none. The farthest first, by the tolerance.
        outside: the names of those among them that are not within the tolerance.
        not_made: those of the run that were not found again: of how samples were drawn and rewarded.
    """

    compared: int
    differing: tuple[tuple[str, float, float], ...]
    outside: tuple[str, ...]
    not_made: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Verdict on all metrics."""
        return "same" if not self.differing else "different" if self.outside else "close"


def compare_metrics(
    ran: Mapping[str, Any], replayed: Mapping[str, float], tolerance: Tolerance, *, same_layout: bool
) -> MetricsCompared:
    """Compare the metrics of a step, but for those of time.

    Args:
        ran: of the run, as its metrics.jsonl has them.
        replayed: of the replay.
        tolerance: that says which are close.
        same_layout: whether those that depend on the layout are compared too.
    """
    names = [name for name in ran if name not in ("phase", "step") and _tells_of_samples(name)]
    names = [name for name in names if same_layout or name not in _OF_LAYOUT]
    differing: dict[str, tuple[float, float]] = {}
    distances: dict[str, float] = {}
    not_made: list[str] = []
    for name in names:
        before, now = float(ran[name]), float(replayed.get(name, math.nan))
        of_samples = name.startswith(_OF_ALL_SAMPLES) or name in _OF_VERSIONS
        if name.startswith(_OF_CHOICE) or (of_samples and name not in replayed):
            not_made.append(name)
        elif not (before == now or (name in replayed and math.isnan(before) and math.isnan(now))):
            differing[name] = before, now
            distance = abs(now - before) / (tolerance.relative * abs(before) + tolerance.absolute)
            distances[name] = math.inf if math.isnan(distance) else distance
    farthest = sorted(differing, key=lambda name: -distances[name])
    return MetricsCompared(
        len(names) - len(not_made),
        tuple((name, *differing[name]) for name in farthest),
        tuple(name for name in farthest if distances[name] > 1),
        tuple(not_made),
    )


def _tells_of_samples(name: str) -> bool:
    return name in _OF_VERSIONS or not _OF_TIME_AND_PLACE.fullmatch(name)


def worst(*verdicts: Verdict) -> Verdict:
    """The worst of several verdicts; "same" of none."""
    order: tuple[Verdict, ...] = ("same", "close", "different")
    return max(verdicts, key=order.index, default="same")
