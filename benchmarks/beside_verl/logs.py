"""Steps of a run, from the metrics that either system logs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine3d.errors import UserError
from hybridflow.metrics import names as metrics

PHASES = ("generate", "log-probs", "update", "weights")


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Args:
        seconds: of the step.
        tokens: of prompts and responses.
        response_tokens: of a response, mean.
        phases: seconds of each of `PHASES`.
        mismatch: mean difference of the log-probs of engine and trainer, absolute, per token.
        gradient_norm: before clipping.
        entropy: of the policy, nats per token.
    """

    seconds: float
    tokens: float
    response_tokens: float
    phases: Mapping[str, float]
    mismatch: float | None
    gradient_norm: float | None
    entropy: float | None

    @property
    def rest(self) -> float:
        """Seconds outside of `phases`."""
        return max(0.0, self.seconds - sum(self.phases.values()))


def read_ours(path: Path) -> list[StepRecord]:
    """Read a metrics.jsonl of `hybridflow train`. Raises UserError for what is no such file."""
    steps = []
    for record in _records(path):
        if record.get("phase") != "train":
            continue
        seconds = _number(path, record, metrics.TRAIN_STEP_TIME) / 1e3
        times = (metrics.ROLLOUT_TIME, metrics.INFERENCE_TIME, metrics.TRAIN_UPDATE_TIME, metrics.SYNC_TIME)
        steps.append(
            StepRecord(
                seconds=seconds,
                tokens=_number(path, record, metrics.STEP_DEVICE_THROUGHPUT) * seconds,
                response_tokens=_number(path, record, metrics.ROLLOUT_RESPONSE_LENGTH),
                phases={phase: record.get(name, 0.0) / 1e3 for phase, name in zip(PHASES, times, strict=True)},
                mismatch=record.get(metrics.MISMATCH_LOGPROB_MEAN),
                gradient_norm=record.get(metrics.TRAIN_GRADIENT_NORM),
                entropy=record.get(metrics.TRAIN_ENTROPY),
            )
        )
    return steps


def read_verl(path: Path) -> list[StepRecord]:
    """Read a file of verl's file logger (VERL_FILE_LOGGER_PATH). Raises UserError for what is no such file."""
    steps = []
    for record in _records(path):
        data = record.get("data")
        if not isinstance(data, dict):
            raise UserError(f"{path}: a line has no `data`, expected the lines of verl's file logger")
        if "timing_s/step" not in data:
            continue
        timers = ("gen", "old_log_prob", "update_actor", "update_weights")
        steps.append(
            StepRecord(
                seconds=_number(path, data, "timing_s/step"),
                tokens=_number(path, data, "perf/total_num_tokens"),
                response_tokens=_number(path, data, "response_length/mean"),
                phases={p: data.get(f"timing_s/{name}", 0.0) for p, name in zip(PHASES, timers, strict=True)},
                # Its losses name their metrics again with the prefix of the actor, in bypass mode.
                mismatch=_first(data, "rollout_corr/logprob_abs_diff", "actor/rollout_corr/logprob_abs_diff"),
                gradient_norm=data.get("actor/grad_norm"),
                entropy=_first(data, "actor/entropy", "actor/entropy_loss"),
            )
        )
    return steps


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):  # of a run that was ended while it wrote
                break
            raise UserError(f"{path}:{number}: expected a JSON object") from None
        if not isinstance(record, dict):
            raise UserError(f"{path}:{number}: expected a JSON object")
        records.append(record)
    return records


def _number(path: Path, record: Mapping[str, Any], name: str) -> float:
    if name not in record:
        raise UserError(f"{path}: a step has no {name}")
    return float(record[name])


def _first(record: Mapping[str, Any], *names: str) -> float | None:
    return next((record[name] for name in names if name in record), None)


def checked(steps: Sequence[StepRecord], tokens: float, response_tokens: float) -> str | None:
    """Compare steps with the tokens that a workload has.

    Args:
        steps: all of a run.
        tokens: of a step.
        response_tokens: of a response, mean.

    Returns:
        The difference as a sentence; None if there is none.
    """
    for number, step in enumerate(steps, 1):
        if abs(step.tokens - tokens) > 0.001 * tokens or abs(step.response_tokens - response_tokens) > 0.01:
            return (
                f"step {number} has {step.tokens:.0f} tokens and {step.response_tokens:.2f} of a response, expected "
                f"{tokens:.0f} and {response_tokens:.2f}"
            )
    return None
