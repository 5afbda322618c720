"""Texts of the page as rows: the summary at its head, the table of samples, the table of hosts."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.metrics import names as metrics
from hybridflow.metrics.device_samples import RunDevices
from hybridflow.metrics.precisions import compared_precisions
from hybridflow.report.catalogue import EVALUATIONS, MetricPlot
from hybridflow.report.run_data import RunData, Series, median
from hybridflow.report.stored_texts import StoredText
from hybridflow.rundir.run_record import RunRecord
from hybridflow.rundir.samples.store import StoredSample
from hybridflow.rundir.status.hosts_file import RunHost

_SETTINGS = (
    ("Optimizer steps of a rollout", "trainer.mini_batches"),
    ("Passes over the training prompts", "trainer.epochs_of_data"),
    ("Prompts a step", "trainer.prompts_per_step"),
    ("Responses to a prompt", "rollout.samples_per_prompt"),
    ("Longest response, tokens", "rollout.sampling.max_new_tokens"),
    ("Learning rate", "train.optimizer.lr"),
    ("Training precision", "train.dtype"),
    ("Quantised operands of training", "train.precision"),
    ("Quantised weights of the engines", "rollout.engine.precision"),
    ("KV cache of the engines", "rollout.engine.kv_cache_dtype"),
    ("KL coefficient", "algorithm.kl_coef"),
    ("Seed", "seed"),
)
_PHASES = {
    "rollout": metrics.ROLLOUT_TIME,
    "scoring": metrics.INFERENCE_TIME,
    "update": metrics.TRAIN_UPDATE_TIME,
    "transfer": metrics.SYNC_TIME,
    "step": metrics.TRAIN_STEP_TIME,
}
"""Metric of each phase that is predicted."""
_MOST_CHARACTERS = 600
_TEXTS = ("prompt", "response", "answer")
_SAMPLE_COLUMNS = (
    *("step", "times", "reward", "version", "group", "sample", "data row", "length", "by function"),
    *_TEXTS,
)
_HOST_COLUMNS = ("hosts", "interface", "role", "devices", "network")


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Args:
        text: of the cell.
        kind: "text" for lines that are kept and wrap, "code" for a name.
        note: under the text, smaller; empty for none.
    """

    text: str
    kind: str = ""
    note: str = ""


def text_cell(value: Any, note: str = "") -> Cell:
    """Show a prompt, a response or an answer, cut where it is long; what is no string as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Cell(f"{text[:_MOST_CHARACTERS]} …" if len(text) > _MOST_CHARACTERS else text, "text", note)


@dataclass(frozen=True)
class Table:
    """A table of the page."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def summary(run: RunData) -> list[tuple[str, str]]:
    """Return names and values of the head: progress, results, settings and starts; unknown values are left out."""
    return [(name, value) for name, value in (*_results(run), *_recipe(run), *_starts(run.record)) if value]


def _starts(record: RunRecord | None) -> Iterator[tuple[str, str]]:
    """Yield the parameters, and the command, host and software of the newest start."""
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


def _results(run: RunData) -> Iterator[tuple[str, str]]:
    train = run.phases.get("train")
    planned = run.setting("trainer.steps")
    if train is not None:
        last = max(int(series.steps[-1]) for series in train.series.values()) if train.series else train.steps
        yield "Steps", f"{last:,} of {planned:,}" if isinstance(planned, int) else f"{last:,}"
    yield "Records", ", ".join(f"{name} {phase.steps:,}" for name, phase in run.phases.items())
    yield "Reward, first and last step", _first_and_last(run.series(metrics.REWARD_MEAN))
    for evaluation in EVALUATIONS:
        yield evaluation.title, _measured(run, evaluation)
    yield "Mismatch of log-probs, first and last step", _mismatch(run)
    yield "Best checkpoint", _best_checkpoint(run)
    throughput = metrics.STREAM_THROUGHPUT if run.setting("rollout.stream") is not None else metrics.ROLLOUT_THROUGHPUT
    yield "Median throughput", _amount(median(run.series(throughput)), ",.0f", " tokens/s")
    yield "Median time of a step", _amount(median(run.series(metrics.TRAIN_STEP_TIME)) / 1000, ".3g", " s")
    if run.samples:
        devices, utilisation = RunDevices.of(run.samples), [sample.utilisation for sample in run.samples]
        yield "GPUs", f"{devices.at_once}, used to {sum(utilisation) / len(utilisation):.0f} % on average"
        yield "Largest memory of a GPU", f"{max(sample.memory_bytes for sample in run.samples) / 2**30:.1f} GiB"
        yield "Mean power of all GPUs", _amount(devices.power_mean_w, ",.0f", " W")


def _measured(run: RunData, evaluation: MetricPlot) -> str:
    """Return the first and the last value with their steps and prompts; empty if nothing was measured."""
    [metric] = evaluation.metrics
    series = run.series(metric, "eval")
    if series is None:
        return ""
    first, last = (f"{series.values[end]:.4g} (step {series.steps[end]:.0f})" for end in (0, -1))
    values = first if len(series.steps) == 1 else f"{first} → {last}"
    names = (metrics.of_set(metrics.EVAL, figure) for figure in (metrics.SET_PROMPTS, metrics.SET_TRAINING))
    counts = [run.series(name, "eval") for name in names]
    prompts, trained_on = (int(count.values[-1]) if count is not None else 0 for count in counts)
    if not prompts:
        return values  # as earlier versions logged it
    some = f", {'all' if trained_on == prompts else trained_on} of them training prompts" if trained_on else ""
    return f"{values}, {prompts:,} prompts{some}"


def _mismatch(run: RunData) -> str:
    """Return the mean differences of log-probs and the precisions that they are of; empty if none were measured."""
    differences = _first_and_last(run.series(metrics.MISMATCH_LOGPROB_MEAN))
    precisions = compared_precisions(_mapping(run, "train"), _mapping(run, "rollout.engine"))
    return f"{differences} ({precisions})" if differences and precisions else differences


def _best_checkpoint(run: RunData) -> str:
    """Return its step and its value; empty if none is kept as the best."""
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
    yield "Adapters", _adapters(run)
    yield "Training of the layer that drafts", _drafting(run)
    for name, setting in _SETTINGS:
        yield name, _text(run.setting(setting))


def _adapters(run: RunData) -> str:
    """Rank, alpha and layers of the adapters that are trained alone; empty without any."""
    lora = _mapping(run, "train.lora")
    if not lora:
        return ""
    targets = ", ".join(lora.get("targets") or ("attention, MLP and experts",))
    return f"rank {lora.get('rank')}, alpha {lora.get('alpha'):g}, of {targets}"


def _drafting(run: RunData) -> str:
    """Learning rate and clipping of the layer that drafts; empty where it is not trained."""
    mtp = _mapping(run, "train.mtp")
    if not mtp:
        return ""
    rate = "that of the actor" if mtp.get("lr") is None else f"{mtp['lr']:g}"
    return f"learning rate {rate}, gradient norm up to {mtp.get('clip_grad')}"


def _engine(run: RunData) -> dict[str, Any]:
    sizes = {name: run.setting(f"rollout.engine.{name}") for name in ("tp", "ep", "attention_dp")}
    return {name: size for name, size in sizes.items() if name != "attention_dp" or size != 1}


def _model(run: RunData) -> str:
    if path := run.setting("model.path"):
        return str(path)
    config = _mapping(run, "model.create.config")
    sizes = {name: config.get(name) for name in ("num_hidden_layers", "hidden_size", "num_experts")}
    return ", ".join(filter(None, [*map(str, config.get("architectures") or ()), _pairs(sizes)]))


def _mapping(run: RunData, setting: str) -> dict[str, Any]:
    value = run.setting(setting)
    return value if isinstance(value, dict) else {}


def _pairs(values: Any) -> str:
    """Join the names and values that are set."""
    if not isinstance(values, dict):
        return ""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _first_and_last(series: Series | None) -> str:
    return "" if series is None else f"{series.values[0]:.4g} → {series.values[-1]:.4g}"


def _amount(value: float, form: str, unit: str) -> str:
    return "" if math.isnan(value) else f"{value:{form}}{unit}"


def sample_table(run: RunData) -> Table | None:
    """Tabulate the distinct samples of a run; None if it has none.

    Of the last steps in the run's store those of the highest and lowest rewards, and samples that were written as
    texts: of the first step that has some and of the last ones. Columns that no sample has a value for are left out.
    """
    stored = {text.sample.step for text in run.stored}
    texts = [text for text in run.texts if text["phase"] != "train" or text["step"] not in stored]
    distinct: dict[tuple[str, ...], dict[str, Any]] = {}
    for values in (*(_stored_sample(text, run.texts) for text in run.stored), *map(_written_sample, texts)):
        identity = tuple(str(values[name]) for name in ("step", "reward", *_TEXTS))
        distinct.setdefault(identity, values | {"times": 0})["times"] += 1
    if not distinct:
        return None
    samples = list(distinct.values())
    names = [name for name in _SAMPLE_COLUMNS if any(values.get(name, "") not in ("", None) for values in samples)]
    if all(values["times"] == 1 for values in samples):
        names.remove("times")
    return Table(
        tuple(names),
        tuple(
            tuple(text_cell(values[name]) if name in _TEXTS else Cell(str(values.get(name, ""))) for name in names)
            for values in samples
        ),
    )


def _written_sample(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a sample of samples.jsonl by column."""
    reward = text["reward"]
    return {
        "step": f"{text['phase']} {text['step']}",
        "reward": f"{reward:.4g}" if isinstance(reward, int | float) else str(reward),
        "version": text["version"],
        "sample": text.get("sample", ""),
        "data row": text.get("row", ""),
        **{name: text[name] for name in _TEXTS},
    }


def _stored_sample(text: StoredText, texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of a sample of the store by column."""
    sample = text.sample
    answer = sample.answer
    if answer is None:  # a store of earlier versions has none: perhaps the sample was written as a text too
        same = (written for written in texts if written["phase"] == "train" and written.get("sample") == sample.sample)
        answer = next((written["answer"] for written in same), "")
    return {
        "step": f"train {sample.step}",
        "reward": "" if sample.reward is None else f"{sample.reward:.4g}",
        "version": sample.version,
        "group": sample.group,
        "sample": sample.sample,
        "data row": sample.data_row or "",
        "length": f"{len(sample.response_tokens)}, {sample.finish_reason}",
        "by function": ", ".join(
            f"{name} {value:.4g}" for score in sample.scores for name, value in _with_verdicts(sample, score).items()
        ),
        "prompt": text.prompt,
        "response": text.response,
        "answer": answer,
    }


def _with_verdicts(sample: StoredSample, name: str) -> dict[str, float]:
    """Score of a function, and its metrics and counts that are not 0."""
    return {name: sample.by_name[name]} | {f"{name}/{key}": value for key, value in sample.verdicts(name).items()}


def prediction_table(run: RunData) -> Table | None:
    """Tabulate predicted against measured seconds of a step by phase, medians; None where nothing was predicted."""
    if run.predicted is None:
        return None
    rows = []
    for phase, metric in _PHASES.items():
        seconds, measured = run.predicted.seconds.get(phase), median(run.series(metric)) / 1000
        if seconds is not None and not math.isnan(measured):
            width = run.predicted.intervals.get(phase, 0.0)
            interval = f"{max(0.0, seconds * (1 - width)):.3g} to {seconds * (1 + width):.3g}"
            rows.append((phase, f"{seconds:.3g}", interval, f"{measured:.3g}", f"{seconds / measured - 1:+.0%}"))
    tokens = median(run.series(metrics.ROLLOUT_RESPONSE_LENGTH))
    if rows and not math.isnan(tokens):
        assumed = run.predicted.response_tokens
        rows.append(("tokens of a response", f"{assumed:,.0f}", "", f"{tokens:,.0f}", f"{assumed / tokens - 1:+.0%}"))
    columns = ("", f"predicted, s ({run.predicted.profile})", "interval, s", "measured, s", "predicted too long by")
    return Table(columns, tuple(tuple(map(Cell, row)) for row in rows)) if rows else None


def host_table(run: RunData) -> Table | None:
    """Tabulate hosts, one row for those that differ only in name and address; None if no launcher started the run."""
    alike: dict[tuple[object, ...], list[RunHost]] = {}
    for host in run.hosts:
        kind = (host.interface, host.role, host.gpus, host.cpu_slots, host.settings, host.shares_disk)
        alike.setdefault(kind, []).append(host)
    return Table(_HOST_COLUMNS, tuple(map(_hosts, alike.values()))) if alike else None


def _hosts(hosts: Sequence[RunHost]) -> tuple[Cell, ...]:
    first = hosts[0]
    names = ", ".join(f"{host.name} ({host.address})" if host.name != host.address else host.name for host in hosts)
    network = "\n".join(f"{setting.name}={setting.value} ({setting.origin})" for setting in first.settings)
    return (
        Cell(names if first.shares_disk else f"{names}; without the run's disk", "text"),
        Cell(first.interface or ""),
        Cell(first.role or "any"),
        Cell(f"{first.gpus} GPUs each" if first.gpus else f"{first.cpu_slots} CPU slots each"),
        Cell(network or "nothing set", "text"),
    )
