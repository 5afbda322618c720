"""The table at the head of a report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybridflow.metrics import names as metrics
from hybridflow.metrics.device_samples import RunDevices
from hybridflow.report.evaluations import EVALUATIONS, measured
from hybridflow.report.run_data import RunData, Series, median
from hybridflow.rundir.run_record import RunRecord

_SETTINGS = (
    ("Optimizer steps of a rollout", "trainer.mini_batches"),
    ("Passes over the training prompts", "trainer.epochs_of_data"),
    ("Prompts a step", "trainer.prompts_per_step"),
    ("Responses to a prompt", "rollout.samples_per_prompt"),
    ("Longest response, tokens", "rollout.sampling.max_new_tokens"),
    ("Learning rate", "train.optimizer.lr"),
    ("Training precision", "train.dtype"),
    ("KL coefficient", "algorithm.kl_coef"),
    ("Seed", "seed"),
)


@dataclass(frozen=True)
class Fact:
    """One row."""

    name: str
    value: str


def facts(run: RunData) -> list[Fact]:
    """What a run was and what came of it; what is not known has no row."""
    return [Fact(name, value) for name, value in (*_course(run), *_recipe(run), *_starts(run.record)) if value]


def _starts(record: RunRecord | None) -> Iterator[tuple[str, str]]:
    """Parameters, and the command, host and software of the newest start."""
    if record is None:
        return
    parameters = [_millions(record.parameters)]
    if record.active_parameters is not None and record.active_parameters != record.parameters:
        parameters.append(f"{_millions(record.active_parameters)} for a token")
    yield "Parameters", ", ".join(filter(None, parameters))
    first, *resumed = record.starts
    last = record.starts[-1]
    yield "Started", _clock(first.at)
    yield "Resumed", "; ".join(f"after step {start.after_step}, {_clock(start.at)}" for start in resumed)
    yield "Host of the driver", last.host
    yield "Command", last.command
    yield "Commit", last.commit or ""
    yield "Versions", ", ".join(f"{name} {version}" for name, version in last.versions.items())


def _millions(count: int | None) -> str:
    if count is None:
        return ""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.4g} {word}"
    return f"{count:,}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _course(run: RunData) -> Iterator[tuple[str, str]]:
    train = run.phases.get("train")
    planned = run.setting("trainer.steps")
    if train is not None:
        last = max(int(series.steps[-1]) for series in train.series.values()) if train.series else train.steps
        yield "Steps", f"{last:,} of {planned:,}" if isinstance(planned, int) else f"{last:,}"
    yield "Records", ", ".join(f"{name} {phase.steps:,}" for name, phase in run.phases.items())
    yield "Reward, first and last step", _first_and_last(run.series(metrics.REWARD_MEAN))
    for evaluation in EVALUATIONS.values():
        yield evaluation.title, measured(run, evaluation)
    yield "Best checkpoint", _best_checkpoint(run)
    yield "Median throughput", _amount(median(run.series(metrics.ROLLOUT_THROUGHPUT)), ",.0f", " tokens/s")
    yield "Median time of a step", _amount(median(run.series(metrics.TRAIN_STEP_TIME)) / 1000, ".3g", " s")
    if run.samples:
        devices, utilisation = RunDevices.of(run.samples), [sample.utilisation for sample in run.samples]
        yield "GPUs", f"{devices.at_once}, used to {sum(utilisation) / len(utilisation):.0f} % on average"
        yield "Largest memory of a GPU", f"{max(sample.memory_bytes for sample in run.samples) / 2**30:.1f} GiB"
        yield "Mean power of all GPUs", _amount(devices.power_mean_w, ",.0f", " W")


def _best_checkpoint(run: RunData) -> str:
    """Its step and its value; nothing where none is kept as the best."""
    step, value = (
        run.series(name, "checkpoint") for name in (metrics.CHECKPOINT_BEST_STEP, metrics.CHECKPOINT_BEST_VALUE)
    )
    if step is None or value is None:
        return ""
    return f"step {step.values[-1]:.0f}, {_text(run.setting('checkpoint.keep_best.metric'))} {value.values[-1]:.4g}"


def _recipe(run: RunData) -> Iterator[tuple[str, str]]:
    yield "Algorithm", _text(run.setting("algorithm.name"))
    yield "Model", _model(run)
    yield "Layout of the actor", _pairs(run.setting("train.layout"))
    yield "Layout of an engine", _pairs(_engine(run))
    yield "Placement", _pairs({name: text for name, text in _mapping(run, "placement").items() if name != "pools"})
    yield "Pools", _pairs(run.setting("placement.pools"))
    for name, setting in _SETTINGS:
        yield name, _text(run.setting(setting))


def _engine(run: RunData) -> dict[str, Any]:
    sizes = {name: run.setting(f"rollout.engine.{name}") for name in ("tp", "ep", "attention_dp")}
    return {name: size for name, size in sizes.items() if name != "attention_dp" or size != 1}


def _model(run: RunData) -> str:
    if path := run.setting("model.path"):
        return str(path)
    config = _mapping(run, "model.create.config")
    sizes = {name: config.get(name) for name in ("num_hidden_layers", "hidden_size", "num_experts")}
    named = ", ".join(map(str, config.get("architectures") or ()))
    return ", ".join(part for part in (named, _pairs(sizes)) if part)


def _mapping(run: RunData, setting: str) -> dict[str, Any]:
    value = run.setting(setting)
    return value if isinstance(value, dict) else {}


def _pairs(values: Any) -> str:
    """Those that are set."""
    if not isinstance(values, dict):
        return ""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _first_and_last(series: Series | None) -> str:
    return "" if series is None else f"{series.values[0]:.4g} → {series.values[-1]:.4g}"


def _amount(value: float, form: str, unit: str) -> str:
    return "" if math.isnan(value) else f"{value:{form}}{unit}"
