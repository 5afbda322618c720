"""The rewards of a batch: what each function gave, where it failed, and their sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine3d.errors import UserError
from engine3d.startup.lazy_imports import torch
from hybridflow.rewards.config import RewardFunctionConfig
from hybridflow.rewards.processes.handle import CallError
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
    """Failures that `failed` marks, by function and sample."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """(B,) float64 each: metrics of functions, by "FUNCTION/METRIC"; nan for a sample without one."""
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    """(B,) float64 each: counts of functions, likewise. Their sum over the samples is logged."""


@dataclass(frozen=True, slots=True)
class SampleScore:
    """The rewards of one sample, as plain values. See `RewardResult`."""

    total: float
    dropped: bool
    by_name: Mapping[str, float]
    failures: Mapping[str, str] = field(default_factory=dict)
    """Reason of each function that gave none: one line, to follow the name of the reward."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the sample, of `RewardResult.metrics`."""
    counts: Mapping[str, float] = field(default_factory=dict)


def combine(scorings: Sequence[Scoring], *, complete: bool = True) -> RewardResult:
    """Combine the finished scorings of all functions to the rewards of a batch. `complete`: as of
    `RewardFunctions.submit`.

    Raises:
        UserError: a sum is not finite; if `complete`, also as `check_given`.
    """
    size = len(scorings[0].batch.texts)
    total = torch.zeros(size)
    dropped = torch.zeros(size, dtype=torch.bool)
    by_name, failed = {}, {}
    failures: list[RewardFailure] = []
    extras: dict[str, dict[str, Tensor]] = {"metrics": {}, "counts": {}}
    for scoring in scorings:
        function = scoring.config
        mask = torch.tensor([sample in scoring.failures for sample in range(size)], dtype=torch.bool)
        if complete and size and mask.all():
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
        for kind, given in (("metrics", scoring.metrics), ("counts", scoring.counts)):
            for name, values in given.items():
                extras[kind][f"{function.name}/{name}"] = torch.tensor(values, dtype=torch.float64)
    if not total[~dropped].isfinite().all():
        sample = int((~dropped & ~total.isfinite()).nonzero()[0])
        names = " + ".join(f"{scoring.config.weight:g} x {scoring.config.name!r}" for scoring in scorings)
        raise UserError(f"rewards: their sum {names} of sample {sample} is not finite in float32")
    result = RewardResult(total, by_name, failed, dropped, tuple(failures), **extras)
    if complete:
        check_given(result, [scoring.config for scoring in scorings])
    return result


def check_given(result: RewardResult, functions: Sequence[RewardFunctionConfig]) -> None:
    """Refuse a step without rewards.

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
    """Split a result into the scores of its samples."""
    failures: list[dict[str, str]] = [{} for _ in result.total]
    for failure in result.failures:
        failures[failure.sample][failure.function] = failure.reason
    columns = {name: column.tolist() for name, column in result.by_name.items()}
    metrics, counts = _rows(result.metrics, len(failures)), _rows(result.counts, len(failures))
    rows = zip(result.total.tolist(), result.dropped.tolist(), failures, metrics, counts, strict=True)
    return [
        SampleScore(total, dropped, {name: column[row] for name, column in columns.items()}, failed, *extras)
        for row, (total, dropped, failed, *extras) in enumerate(rows)
    ]


def _rows(columns: Mapping[str, Tensor], size: int) -> list[dict[str, float]]:
    """Values of each row in its columns, without nan."""
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
    """Join the scores of samples to the result of a batch. Errors as of `check_given`."""
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
        _columns([score.metrics for score in scores]),
        _columns([score.counts for score in scores]),
    )
    check_given(result, functions)
    return result


def join_results(results: Sequence[RewardResult]) -> RewardResult:
    """Concatenate the rewards of several batches, in order. All are of the same functions."""
    starts = [sum(len(result.total) for result in results[:number]) for number in range(len(results))]
    return RewardResult(
        torch.cat([result.total for result in results]),
        {name: torch.cat([result.by_name[name] for result in results]) for name in results[0].by_name},
        {name: torch.cat([result.failed[name] for result in results]) for name in results[0].failed},
        torch.cat([result.dropped for result in results]),
        tuple(
            replace(failure, sample=start + failure.sample)
            for start, result in zip(starts, results, strict=True)
            for failure in result.failures
        ),
        _columns([row for result in results for row in _rows(result.metrics, len(result.total))]),
        _columns([row for result in results for row in _rows(result.counts, len(result.total))]),
    )


def _check_finite(function: RewardFunctionConfig, weighted: Tensor, given: Tensor) -> None:
    """Refuse a weight whose product with a function's finite numbers is not finite."""
    bad = given & ~weighted.isfinite()
    if bad.any():
        sample = int(bad.nonzero()[0])
        raise UserError(
            f"reward {function.name!r} ({function.path}): its weight {function.weight:g} times its value of sample "
            f"{sample} is not finite in float32; expected a smaller weight"
        )


def reward_metrics(result: RewardResult, *, group: str = "reward") -> dict[str, float]:
    """Metrics of a result of at least one sample.

    `reward/<name>/mean` is over the samples for which the function has a value; `reward/<name>/failed` and
    `reward/dropped` are counts. Functions' own metrics are as of `function_metrics`. `group` stands for "reward".
    """
    values: dict[str, float] = {}
    for name, column in result.by_name.items():
        values[f"{group}/{name}/mean"] = float(column[~column.isnan()].mean())
        values[f"{group}/{name}/failed"] = int(result.failed[name].sum())
    values[f"{group}/dropped"] = int(result.dropped.sum())
    return values | function_metrics(result, group=group)


def function_metrics(result: RewardResult, *, group: str = "reward") -> dict[str, float]:
    """Metrics that functions gave next to their rewards, over all samples, dropped ones included.

    A metric has its mean, `reward/<name>/<metric>`, and its 95th percentile, `reward/<name>/<metric>_p95`. A count has
    its sum.
    """
    values: dict[str, float] = {}
    for name, column in result.metrics.items():
        given = column[~column.isnan()]
        if len(given):
            values[f"{group}/{name}"] = float(given.mean())
            values[f"{group}/{name}_p95"] = float(given.quantile(0.95))
    return values | {f"{group}/{name}": float(column.nansum()) for name, column in result.counts.items()}
