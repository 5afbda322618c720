"""Time of complete steps by phase.

    python benchmarks/step.py launch/recipes/qwen3-30b-a3b-4xh200.yaml --directory runs/step

runs a recipe on prompts of one length, prints a line for each phase of a step with its seconds and its share, and last
one JSON object; draws what each GPU did meanwhile into the directory.

Rewards are drawn from the text of a response: those of a task would all be 0 for a model of random weights, and so
would be its gradients, which a GPU multiplies with less power.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reshard_plan import Parser, versions
from engine3d.errors import UserError
from hybridflow.config.initial_model import initial_tokenizer
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.data.tasks import Example
from hybridflow.metrics import names as metrics
from hybridflow.metrics.device_samples import DeviceSample
from hybridflow.metrics.timeline import TimelineSpan, step_ends
from hybridflow.report.run_data import RunData, read_run

_RUN = "run"
_REWARD = Path(__file__).with_name("drawn_reward.py")
_OFFLOAD, _ONLOAD = "offload", "onload"
_MEMORY = {"offload": _OFFLOAD, "onload": _ONLOAD}
_PHASES = {
    "rollout": metrics.ROLLOUT_TIME,
    "rewards": metrics.REWARD_LATENCY,
    "log-probs": metrics.INFERENCE_TIME,
    "training": metrics.TRAIN_UPDATE_TIME,
    "weight transfer": metrics.SYNC_TIME,
}
_AT_WORK = {
    "generate": "rollout",
    "update": "training",
    "update_values": "training",
    "logprobs": "log-probs",
    "values": "log-probs",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right, and the run's where it fails."""
    parser = Parser(prog="step.py", description="Seconds and share of each phase of a step.")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe")
    parser.add_argument("--directory", type=Path, required=True, help="for the run; must not be there")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of each prompt, in characters")
    parser.add_argument("--steps", type=int, default=4, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before those")
    parser.add_argument("--made", action="store_true", help="measure the run that is in the directory, ended or not")
    try:
        options = parser.parse_intermixed_args(arguments)
        recipe, settings = _settings(options)
        ran = 0 if options.made else _run(options.recipe, settings)
        if ran:
            return ran
        run = read_run(options.directory / _RUN)
        if len(step_ends(run.spans)) < 2 + options.warm_up:
            raise UserError(f"{options.directory / _RUN}: no step has ended after the {options.warm_up} that warm up")
    except UserError as error:
        print(f"step.py: {error}", file=sys.stderr)
        return 2
    steps = measure(run, options.warm_up)
    for line in lines(steps):
        print(line)
    command = " ".join(["benchmarks/step.py", *(arguments if arguments is not None else sys.argv[1:])])
    tokens = options.prompt_tokens + recipe.rollout.sampling.max_new_tokens
    print(
        json.dumps(
            {"command": command, "most_tokens": tokens} | measurements(steps) | {"versions": versions()}, indent=2
        )
    )
    if run.samples:
        draw(run, options.directory)
    return 0


def _run(recipe: Path, settings: Sequence[str]) -> int:
    return subprocess.run(
        [sys.executable, "-m", "hybridflow", "train", str(recipe), *settings], stdout=sys.stderr
    ).returncode


def _settings(options: argparse.Namespace) -> tuple[Recipe, list[str]]:
    """The recipe, and the overrides of a run of it on prompts that are made here."""
    if options.prompt_tokens < 8 or options.steps < 1 or options.warm_up < 0:
        raise UserError("expected --prompt-tokens of at least 8, --steps of at least 1 and --warm-up of at least 0")
    if options.directory.exists() and not options.made:
        raise UserError(f"--directory: {options.directory} is there already")
    count = options.steps + options.warm_up
    settings = [
        "warmup=null",
        f"run_dir={options.directory}",
        f"name={_RUN}",
        f"trainer.steps={count}",
        "data.source=jsonl",
        f"data.jsonl.train_path={options.directory / 'train.jsonl'}",
        f"data.jsonl.eval_path={options.directory / 'eval.jsonl'}",
        f"reward.functions=[{{name: drawn, path: '{os.path.relpath(_REWARD)}:score'}}]",
        *options.overrides,
    ]
    recipe = load_recipe(options.recipe, settings)
    if options.made:
        return recipe, settings
    alphabet = _alphabet(recipe)
    options.directory.mkdir(parents=True)
    for name, size in (("train", count * recipe.trainer.prompts_per_step), ("eval", 64)):
        examples = prompts(size, options.prompt_tokens, seed=name, alphabet=alphabet)
        text = "".join(json.dumps({"prompt": example.prompt, "answer": example.answer}) + "\n" for example in examples)
        (options.directory / f"{name}.jsonl").write_text(text)
    return recipe, settings


def _alphabet(recipe: Recipe) -> str:
    """Printable characters that are a token each; none where the tokenizer knows those of sums alone."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer, _ = initial_tokenizer(recipe.model, Path(scratch))
    printable = [chr(code) for code in range(32, 127)]
    try:
        return "".join(
            character for character in printable if len(tokenizer.encode(character, add_special_tokens=False)) == 1
        )
    except Exception:  # the tokenizer's own, of a character that it has not
        return ""


def prompts(count: int, characters: int, *, seed: str, alphabet: str = "") -> list[Example]:
    """Sums, each after so many characters: random ones of the alphabet, or as many solved sums where there is none.

    Tokens that are as different as those of texts, so that routers use experts as evenly.
    """
    generator = random.Random(seed)
    examples = []
    for _ in range(count):
        left, right = generator.randrange(100), generator.randrange(100)
        text = f"{left}+{right}="
        if alphabet:
            text = "".join(generator.choices(alphabet, k=max(0, characters - len(text)))) + text
        while len(text) < characters:
            first, second = generator.randrange(100), generator.randrange(100)
            text = f"{first}+{second}={first + second}={text}"
        examples.append(Example(text[-characters:], str(left + right)))
    return examples


@dataclass(frozen=True)
class Steps:
    """Measurements of some steps: means over steps, and rates over their whole time.

    Args:
        seconds: of a whole step.
        phases: seconds of each phase; what overlaps in time counts in both.
        overlap: seconds in which rollout and training went on at the same time.
        device_throughput: tokens of prompts and responses, a second and device.
        mfu: of training; None where the speed of the devices is not known.
        devices: figures of the GPUs by metric name; none without GPUs.
        peak_bytes: most memory of a GPU in each phase; none without GPUs.
    """

    seconds: float
    phases: dict[str, float]
    overlap: float
    device_throughput: float
    mfu: float | None
    devices: dict[str, float]
    peak_bytes: dict[str, int]


def measure(run: RunData, warm_up: int) -> Steps:
    """Measure a run's steps after the first `warm_up`."""
    seconds = _mean(run, metrics.TRAIN_STEP_TIME, warm_up) / 1000
    phases = {phase: _mean(run, name, warm_up) / 1000 for phase, name in _PHASES.items()}
    phases["weight transfer"] -= _mean(run, metrics.SYNC_VERIFY_TIME, warm_up) / 1000  # a proof, where it is asked for
    bounds = list(pairwise(step_ends(run.spans)))[warm_up:]
    # A turn begins with memory: the engines' within the rollout, the first of the others' within what comes after it.
    moved = _memory_seconds(run.spans, bounds)
    after = "log-probs" if phases["log-probs"] else "training"
    for (role, kind), duration in moved.items():
        phases["rollout" if (role == "rollout") == (kind == _ONLOAD) else after] -= duration
    for name in (_OFFLOAD, _ONLOAD):
        phases[name] = sum(duration for (_, kind), duration in moved.items() if kind == name)
    overlap = _overlap(run.spans, bounds)
    phases["everything else"] = max(0.0, seconds - sum(phases.values()) + overlap)
    within = [sample for sample in run.samples if bounds and bounds[0][0] <= sample.time <= bounds[-1][1]]
    rates = (metrics.DEVICE_UTILISATION, metrics.DEVICE_POWER)
    used = (*rates, metrics.DEVICE_MEMORY, metrics.DEVICE_ENERGY)
    mfu = _over_time(run, metrics.TRAIN_MFU, warm_up, metrics.TRAIN_UPDATE_TIME)
    return Steps(
        seconds=seconds,
        phases=phases,
        overlap=overlap,
        device_throughput=_over_time(run, metrics.STEP_DEVICE_THROUGHPUT, warm_up),
        mfu=mfu if run.series(metrics.TRAIN_MFU) else None,
        devices={
            name: (_over_time if name in rates else _mean)(run, name, warm_up) for name in used if run.series(name)
        },
        peak_bytes=_peaks(within, run.spans),
    )


def _mean(run: RunData, name: str, warm_up: int) -> float:
    """Return the mean of a metric over the steps after the first `warm_up`; 0 if it was not logged."""
    series = run.series(name)
    if series is None:
        return 0.0
    values = [value for step, value in zip(series.steps, series.values, strict=True) if step > warm_up]
    return fmean(values) if values else 0.0


def _over_time(run: RunData, name: str, warm_up: int, time: str = metrics.TRAIN_STEP_TIME) -> float:
    """A rate or share over all the time of the steps after the first, in which long steps count for more.

    Args:
        run: the run.
        name: of the rate of each step.
        warm_up: steps that are left out.
        time: name of the time of each step that it is a rate of.
    """
    rates, times = run.series(name), run.series(time)
    if rates is None or times is None:
        return 0.0
    seconds = dict(zip(times.steps, times.values, strict=True))
    steps = [
        (value, seconds[step])
        for step, value in zip(rates.steps, rates.values, strict=True)
        if step > warm_up and step in seconds
    ]
    total = sum(time for _, time in steps)
    return float(sum(value * time for value, time in steps) / total) if total else 0.0


def _memory_seconds(
    spans: Iterable[TimelineSpan], bounds: Sequence[tuple[float, float]]
) -> dict[tuple[str, str], float]:
    """Seconds a step, of the slowest rank, in which each role gave memory back or took it back."""
    slowest: dict[tuple[int, str, str], float] = defaultdict(float)
    for span in spans:
        if span.method in _MEMORY:
            for number, (begin, end) in enumerate(bounds):
                if begin <= span.begin < end:
                    key = (number, span.role, _MEMORY[span.method])
                    slowest[key] = max(slowest[key], span.end - span.begin)
    totals: dict[tuple[str, str], float] = defaultdict(float)
    for (_, role, kind), seconds in slowest.items():
        totals[role, kind] += seconds / len(bounds)
    return totals


def _overlap(spans: Iterable[TimelineSpan], bounds: Sequence[tuple[float, float]]) -> float:
    """Seconds a step in which an engine generated while a model learned."""
    if not bounds:
        return 0.0
    edges: list[tuple[float, str, int]] = []
    working, both, since = {"rollout": 0, "training": 0}, 0.0, 0.0
    for span in spans:
        kind = _AT_WORK.get(span.method, "")
        if kind in working and bounds[0][0] <= span.begin < bounds[-1][1]:
            edges += [(span.begin, kind, 1), (span.end, kind, -1)]
    for time, kind, change in sorted(edges):
        both += (time - since) * all(working.values())
        since = time
        working[kind] += change
    return both / len(bounds)


def _peaks(samples: Sequence[DeviceSample], spans: Sequence[TimelineSpan]) -> dict[str, int]:
    peaks: dict[str, int] = defaultdict(int)
    working = [(span.begin, span.end, _AT_WORK[span.method]) for span in spans if span.method in _AT_WORK]
    for sample in samples:
        now = {phase for begin, end, phase in working if begin <= sample.time <= end} or {"everything else"}
        for phase in now:
            peaks[phase] = max(peaks[phase], sample.memory_bytes)
    return dict(peaks)


def lines(steps: Steps) -> list[str]:
    """A line a phase: its seconds, and its share of a step."""
    return [
        f"{phase:<18}{seconds:>9.3f} s {seconds / steps.seconds:>7.1%}"
        for phase, seconds in (*steps.phases.items(), ("step", steps.seconds))
    ]


def measurements(steps: Steps) -> dict[str, Any]:
    """The same as one JSON object, and what only it has."""
    busy = steps.phases["rollout"] + steps.phases["training"] - steps.overlap
    return {
        "step_s": steps.seconds,
        "phases_s": steps.phases,
        "rollout_during_training_s": steps.overlap,
        "neither_rollout_nor_training": 1 - busy / steps.seconds,
        "tokens_per_s_per_device": steps.device_throughput,
        "bound_tokens_per_s_per_device": steps.device_throughput * steps.seconds / busy,
        "mfu_of_training": steps.mfu,
        "devices": steps.devices,
        "peak_memory_bytes": steps.peak_bytes,
    }


def draw(run: RunData, directory: Path) -> list[Path]:
    """A picture for each GPU: its utilisation, power and memory over time, and which phase was on."""
    from matplotlib.figure import Figure

    colours = {"rollout": "tab:blue", "training": "tab:orange", "log-probs": "tab:green"}
    rows = (
        ("utilisation, %", lambda sample: sample.utilisation),
        ("power, W", lambda sample: sample.power_w),
        ("memory, GB", lambda sample: sample.memory_bytes / 1e9),
    )
    began = min(sample.time for sample in run.samples)
    paths: list[Path] = []
    for node, gpu in sorted({(sample.node, sample.gpu) for sample in run.samples}):
        device_samples = sorted(
            (sample for sample in run.samples if (sample.node, sample.gpu) == (node, gpu)),
            key=lambda sample: sample.time,
        )
        figure = Figure(figsize=(14, 7), layout="constrained")
        for axes, (label, value) in zip(figure.subplots(len(rows), sharex=True), rows, strict=True):
            axes.plot(
                [sample.time - began for sample in device_samples],
                [value(sample) for sample in device_samples],
                color="black",
                lw=1,
            )
            for span in run.spans:
                if span.method in _AT_WORK and span.rank == 0:
                    colour = colours[_AT_WORK[span.method]]
                    axes.axvspan(span.begin - began, span.end - began, color=colour, alpha=0.15, lw=0)
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds; blue: rollout, orange: training, green: log-probs")
        paths.append(directory / f"gpu-{len(paths)}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


if __name__ == "__main__":
    sys.exit(main())
