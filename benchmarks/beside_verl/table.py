"""Table of the comparison, from the steps of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.beside_verl.logs import PHASES, StepRecord


@dataclass(frozen=True)
class VariantSteps:
    """Measured steps of a variant.

    Args:
        name: such as `verl tuned`.
        note: its settings, in words.
        steps: of all of its runs, without those that warm up.
        runs: number of runs.
        peak_bytes: maximum memory of the GPU in any of its runs; None without a GPU.
        problems: sentences about runs that failed or did other work.
    """

    name: str
    note: str
    steps: Sequence[StepRecord]
    runs: int = 0
    peak_bytes: int | None = None
    problems: Sequence[str] = field(default=())


def columns(flops: float, peak_flops: float | None) -> dict[str, Callable[[StepRecord], float | None]]:
    """Columns of the table: functions of a step.

    Args:
        flops: of an update.
        peak_flops: of the GPU, dense bf16; None if it is not known.
    """
    phases = {phase: _phase(phase) for phase in PHASES}
    return {
        "tokens/s per GPU": lambda step: step.tokens / step.seconds,
        "step s": lambda step: step.seconds,
        **{f"{phase} s": seconds for phase, seconds in phases.items()},
        "rest s": lambda step: step.rest,
        "MFU": lambda step: _mfu(step.phases["update"], flops, peak_flops),
        "mismatch": lambda step: step.mismatch,
        "gradient norm": lambda step: step.gradient_norm,
        "entropy": lambda step: step.entropy,
    }


def _phase(phase: str) -> Callable[[StepRecord], float]:
    return lambda step: step.phases[phase]


def _mfu(seconds: float, flops: float, peak_flops: float | None) -> float | None:
    return flops / seconds / peak_flops if peak_flops and seconds else None


def summary(variant: VariantSteps, flops: float, peak_flops: float | None) -> dict[str, Any]:
    """Median, minimum and maximum of every column, over all measured steps."""
    stats: dict[str, Any] = {}
    for name, value in columns(flops, peak_flops).items():
        values = [number for step in variant.steps if (number := value(step)) is not None]
        if values:
            stats[name] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {
        "note": variant.note,
        "runs": variant.runs,
        "steps": len(variant.steps),
        "peak_bytes": variant.peak_bytes,
        "problems": list(variant.problems),
        "columns": stats,
    }


def lines(summaries: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines of the table in Markdown: medians, with ranges in brackets."""
    names = list(columns(0.0, None))
    yield " | ".join(["| variant", "steps", *names, "peak GB |"])
    yield "|---" * (len(names) + 3) + "|"
    for variant, stats in summaries.items():
        cells = [_cell(stats["columns"].get(name)) for name in names]
        peak = "" if stats["peak_bytes"] is None else f"{stats['peak_bytes'] / 1e9:.1f}"
        yield " | ".join([f"| {variant}", str(stats["steps"]), *cells, f"{peak} |"])
    yield ""
    yield from _ratios(summaries)


def _cell(stats: Mapping[str, float] | None) -> str:
    if stats is None:
        return ""
    median, least, most = (_shown(stats[name]) for name in ("median", "least", "most"))
    return median if least == most else f"{median} ({least} to {most})"


def _shown(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def _ratios(summaries: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    rates = {
        name: stats["columns"]["tokens/s per GPU"]["median"]
        for name, stats in summaries.items()
        if "tokens/s per GPU" in stats["columns"]
    }
    for ours, rate in rates.items():
        for verl, other in rates.items():
            if ours.startswith("ours ") and verl.startswith("verl "):
                yield f"- {ours} over {verl}: {rate / other:.2f} times the tokens/s"
