"""What a run has logged of its held-out sets, by set and figure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hybridflow.metrics import names as metrics
from hybridflow.metrics.evaluation_statistics import HIGH, LOW, REWARD
from hybridflow.report.run_data import RunData, Series

_NAME = re.compile(r"eval/([^/]+)/(.+)")
_SHARE = re.compile(r"(?:mean|pass|maj)@(\d+)")


@dataclass(frozen=True)
class SetFigure:
    """One figure of a set over its measurements.

    Args:
        name: such as "pass@4".
        series: its values.
        low, high: the ends of their intervals by step, where there are any.
    """

    name: str
    series: Series
    low: Mapping[float, float]
    high: Mapping[float, float]


def sets_of(run: RunData) -> dict[str, dict[str, SetFigure]]:
    """The figures of each set by name: `reward_mean`, `mean@k`, the `pass@j` of the largest j, and `maj@k`."""
    logged = run.phases["eval"].series if "eval" in run.phases else {}
    found: dict[str, dict[str, SetFigure]] = {}
    for name in logged:
        matched = _NAME.fullmatch(name)
        if matched is not None and (matched[2] == REWARD or _SHARE.fullmatch(matched[2])):
            figure = SetFigure(matched[2], logged[name], _ends(logged, name, LOW), _ends(logged, name, HIGH))
            found.setdefault(matched[1], {})[matched[2]] = figure
    return {name: _chosen(figures) for name, figures in found.items()}


def prompts_of(run: RunData, name: str) -> int:
    """Prompts in the last measurement of a set."""
    series = run.series(metrics.of_set(name, metrics.SET_PROMPTS), "eval")
    return 0 if series is None else int(series.values[-1])


def _ends(logged: Mapping[str, Series], name: str, end: str) -> dict[float, float]:
    series = logged.get(f"{name}{end}")
    return {} if series is None else dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def _chosen(figures: Mapping[str, SetFigure]) -> dict[str, SetFigure]:
    """Without the `pass@j` of smaller j, of which `pass@1` is `mean@k`."""
    passes = [int(name.removeprefix("pass@")) for name in figures if name.startswith("pass@")]
    largest = max(passes, default=0)
    wanted = {f"pass@{largest}"} if largest > 1 else set()
    return {name: each for name, each in figures.items() if not name.startswith("pass@") or name in wanted}
