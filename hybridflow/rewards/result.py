"""The rewards of a batch: what each function gave, where it failed, and their sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine3d.errors import UserError
from engine3d.startup.lazy_imports import torch
from hybridflow.rewards.config import RewardFunctionConfig
from hybridflow.rewards.process_handle import CallError
from hybridflow.rewards.scoring import Scoring

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RewardFailure:
    """A sample for which a function gave no reward. As a string, one line for the log."""

    function: str
    """Name of the reward."""
    sample: int
    """Index in the batch."""
    reason: str
    """One line, to follow the name of the reward."""

    def __str__(self) -> str:
        return f"reward {self.function!r} {self.reason}"


@dataclass(frozen=True)
class RewardResult:
    """The rewards of B samples."""

    total: Tensor
    """(B,) float32: the weighted sum over the functions. nan for a dropped sample, so that it cannot be used unseen."""
    by_name: Mapping[str, Tensor]
    """(B,) float32 a function, unweighted. Where the function failed, its `failure_value`, or nan if that drops the
    sample."""
    failed: Mapping[str, Tensor]
    """(B,) bool a function: it gave no reward."""
    dropped: Tensor
    """(B,) bool: to be left out of the step, since a function whose failures drop a sample failed."""
    failures: tuple[RewardFailure, ...]
    """What `failed` marks, by function and sample."""
    figures: Mapping[str, Tensor] = field(default_factory=dict)
    """(B,) float64 each: what functions gave beside, by "FUNCTION/FIGURE"; nan for a sample that has none."""
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    """The same of what is counted, whose sum over the samples is of interest."""


@dataclass(frozen=True, slots=True)
class SampleScore:
    """The rewards of one sample, as plain values. See `RewardResult`."""

    total: float
    dropped: bool
    by_name: Mapping[str, float]
    failures: Mapping[str, str] = field(default_factory=dict)
    """For each function that gave none, why: one line, to follow the name of the reward."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Those of `RewardResult.figures` that the sample has."""
    counts: Mapping[str, float] = field(default_factory=dict)


def combine(scorings: Sequence[Scoring], *, whole: bool = True) -> RewardResult:
    """The rewards of a batch from the finished scorings of all functions. `whole`: as of `RewardFunctions.evaluate`.

    Raises:
        UserError: a sum is not finite; if `whole`, also as `check_given`.
    """
    size = len(scorings[0].batch.texts)
    total = torch.zeros(size)
    dropped = torch.zeros(size, dtype=torch.bool)
    by_name, failed = {}, {}
    failures: list[RewardFailure] = []
    beside: dict[str, dict[str, Tensor]] = {"figures": {}, "counts": {}}
    for scoring in scorings:
        function = scoring.config
        mask = torch.tensor([sample in scoring.failures for sample in range(size)], dtype=torch.bool)
        if whole and size and mask.all():
            raise _failed_on_all(function, size, scoring.failures[0])
        column = torch.tensor(scoring.values, dtype=torch.float32)
        column[mask] = function.failure_value if function.on_failure == "value" else math.nan
        if function.on_failure == "drop":
            dropped |= mask
        weighted = function.weight * column
        _check_finite(function, weighted, ~column.isnan())
        total += weighted
        by_name[function.name], failed[function.name] = column, mask
        failures += [RewardFailure(function.name, *failure) for failure in sorted(scoring.failures.items())]
        for kind, given in (("figures", scoring.figures), ("counts", scoring.counts)):
            for name, each in given.items():
                beside[kind][f"{function.name}/{name}"] = torch.tensor(each, dtype=torch.float64)
    if not total[~dropped].isfinite().all():
        sample = int((~dropped & ~total.isfinite()).nonzero()[0])
        names = " + ".join(f"{each.config.weight:g} x {each.config.name!r}" for each in scorings)
        raise UserError(f"rewards: their sum {names} of sample {sample} is not finite in float32")
    result = RewardResult(total, by_name, failed, dropped, tuple(failures), **beside)
    if whole:
        check_given(result, [scoring.config for scoring in scorings])
    return result


def check_given(result: RewardResult, functions: Sequence[RewardFunctionConfig]) -> None:
    """Refuse what all samples of a step were scored with, if nothing came of it.

    Raises:
        UserError: a function failed on all samples, or every sample is dropped.
    """
    size = len(result.total)
    if not size:
        return
    for function in functions:
        if result.failed[function.name].all():
            first = next(failure for failure in result.failures if failure.function == function.name)
            raise _failed_on_all(function, size, first.reason)
    if result.dropped.all():
        counts = ", ".join(f"reward {name!r} failed on {int(mask.sum())}" for name, mask in result.failed.items())
        raise UserError(f"rewards: all {size} samples of a step are dropped: {counts}; first, {result.failures[0]}")


def _failed_on_all(function: RewardFunctionConfig, size: int, reason: str) -> UserError:
    return UserError(str(CallError(function, f"failed on all {size} samples of a step: it {reason}")))


def by_sample(result: RewardResult) -> list[SampleScore]:
    """What a result says of each of its samples."""
    failures: list[dict[str, str]] = [{} for _ in result.total]
    for failure in result.failures:
        failures[failure.sample][failure.function] = failure.reason
    columns = {name: column.tolist() for name, column in result.by_name.items()}
    figures, counts = _rows(result.figures, len(failures)), _rows(result.counts, len(failures))
    rows = zip(result.total.tolist(), result.dropped.tolist(), failures, figures, counts, strict=True)
    return [
        SampleScore(total, dropped, {name: column[row] for name, column in columns.items()}, failed, *beside)
        for row, (total, dropped, failed, *beside) in enumerate(rows)
    ]


def _rows(columns: Mapping[str, Tensor], size: int) -> list[dict[str, float]]:
    """Of each of so many samples, what is no nan in its columns."""
    rows: list[dict[str, float]] = [{} for _ in range(size)]
    for name, column in columns.items():
        for row, value in zip(rows, column.tolist(), strict=True):
            if not math.isnan(value):
                row[name] = value
    return rows


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
    """The inverse of `_rows`."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: torch.tensor([row.get(name, math.nan) for row in rows], dtype=torch.float64) for name in names}


def of_samples(scores: Sequence[SampleScore], functions: Sequence[RewardFunctionConfig]) -> RewardResult:
    """The result of a batch of these samples, which `functions` have scored. Errors as of `check_given`."""
    names = [function.name for function in functions]
    failures = [
        RewardFailure(name, row, reason)
        for name in names
        for row, score in enumerate(scores)
        if (reason := score.failures.get(name)) is not None
    ]
    result = RewardResult(
        torch.tensor([score.total for score in scores], dtype=torch.float32),
        {name: torch.tensor([score.by_name[name] for score in scores], dtype=torch.float32) for name in names},
        {name: torch.tensor([name in score.failures for score in scores], dtype=torch.bool) for name in names},
        torch.tensor([score.dropped for score in scores], dtype=torch.bool),
        tuple(failures),
        _columns([score.figures for score in scores]),
        _columns([score.counts for score in scores]),
    )
    check_given(result, functions)
    return result


def join_results(parts: Sequence[RewardResult]) -> RewardResult:
    """The rewards of all parts as of one batch, in order; all are of the same functions."""
    starts = [sum(len(part.total) for part in parts[:number]) for number in range(len(parts))]
    return RewardResult(
        torch.cat([part.total for part in parts]),
        {name: torch.cat([part.by_name[name] for part in parts]) for name in parts[0].by_name},
        {name: torch.cat([part.failed[name] for part in parts]) for name in parts[0].failed},
        torch.cat([part.dropped for part in parts]),
        tuple(
            replace(failure, sample=start + failure.sample)
            for start, part in zip(starts, parts, strict=True)
            for failure in part.failures
        ),
        _columns([row for part in parts for row in _rows(part.figures, len(part.total))]),
        _columns([row for part in parts for row in _rows(part.counts, len(part.total))]),
    )


def _check_finite(function: RewardFunctionConfig, weighted: Tensor, given: Tensor) -> None:
    """Refuse a weight that makes of a function's finite numbers what is none."""
    bad = given & ~weighted.isfinite()
    if bad.any():
        sample = int(bad.nonzero()[0])
        raise UserError(
            f"reward {function.name!r} ({function.path}): its weight {function.weight:g} times its value of sample "
            f"{sample} is not finite in float32; expected a smaller weight"
        )


def reward_metrics(result: RewardResult, *, group: str = "reward") -> dict[str, float]:
    """Figures of a result of at least one sample, for the metrics.

    `reward/<name>/mean` is over the samples for which the function has a value; `reward/<name>/failed` and
    `reward/dropped` are counts. What functions gave beside is as of `figure_metrics`. `group` stands for "reward".
    """
    values: dict[str, float] = {}
    for name, column in result.by_name.items():
        values[f"{group}/{name}/mean"] = float(column[~column.isnan()].mean())
        values[f"{group}/{name}/failed"] = int(result.failed[name].sum())
    values[f"{group}/dropped"] = int(result.dropped.sum())
    return values | figure_metrics(result, group=group)


def figure_metrics(result: RewardResult, *, group: str = "reward") -> dict[str, float]:
    """What functions gave beside their rewards, over all samples, dropped ones too.

    Of a figure the mean, `reward/<name>/<figure>`, and the 95th percentile, `reward/<name>/<figure>_p95`; of a count
    the sum.
    """
    values: dict[str, float] = {}
    for name, column in result.figures.items():
        given = column[~column.isnan()]
        if len(given):
            values[f"{group}/{name}"] = float(given.mean())
            values[f"{group}/{name}_p95"] = float(given.quantile(0.95))
    return values | {f"{group}/{name}": float(column.nansum()) for name, column in result.counts.items()}
