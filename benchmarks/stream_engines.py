"""Rollouts as a stream beside the batch call, with two real engines and a trainer on a CPU.

    python benchmarks/stream_engines.py --repeats 3 --output stream-engines.json

Each way of rolling out is a run of its own, in turn, as often as `--repeats` says. The model has learned nothing and
does not learn, so that responses have the same lengths in every run: each token ends one with a probability of about
one in 32, and the longest of a step is several times the mean. Prints a table: tokens that were learned from in a
second, from the step `--skip` on, and as a ratio to the batch call of the same turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reshard_plan import versions
from hybridflow.metrics import names as metrics

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "launch/recipes/stream.yaml"
PROMPTS, SAMPLES = 32, 4
COMMON = (
    "warmup=null",
    "model.create.config.max_position_embeddings=512",
    "train.layout.ep=1",
    "train.optimizer.lr=1e-12",
    "train.optimizer.warmup_steps=0",
    "rollout.sampling.max_new_tokens=240",
    "rollout.engine.max_running_requests=16",
    f"rollout.samples_per_prompt={SAMPLES}",
    f"trainer.prompts_per_step={PROMPTS}",
    "evaluation.eval.interval=null",
    "trainer.export=false",
    "placement.actor=cpu:0",
    "placement.rollout=cpu:1-2",
)
BATCH = "batch call"
_CALL = ("rollout.stream=null", "algorithm.correction=null")
WAYS: dict[str, tuple[str, ...]] = {
    BATCH: (*_CALL, "trainer.max_staleness=0"),
    "batch call, a step ahead": (*_CALL, "trainer.max_staleness=1"),
    "stream, staleness 0": ("trainer.max_staleness=0",),
    "stream, staleness 1": ("trainer.max_staleness=1",),
    "stream, staleness 4": ("trainer.max_staleness=4",),
}
_LIMIT_S = 900.0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="stream_engines.py", description="A stream beside the batch call.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=6, help="first steps that are not measured")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    parser.add_argument("--output", type=Path, help="file for one JSON object")
    options = parser.parse_args()
    if options.skip >= options.steps:
        parser.error(f"--skip: {options.skip} of {options.steps} steps, expected fewer")
    by_mode: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    with tempfile.TemporaryDirectory() as directory:
        for turn in range(options.repeats):
            for number, way in enumerate(options.ways):
                records = _run(way, Path(directory), f"run-{turn}-{number}", options.steps)
                by_mode[way].append(measured(records[options.skip :]))
                print(f"{turn}: {way}: {by_mode[way][-1]}", file=sys.stderr, flush=True)
    print("\n".join(table(by_mode)))
    if options.output is not None:
        machine = f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"
        conditions = {"machine": machine, "versions": versions()}
        options.output.write_text(
            json.dumps({"steps": options.steps, "skip": options.skip, "runs": by_mode} | conditions) + "\n"
        )
    return 0


def _run(way: str, directory: Path, name: str, steps: int) -> list[dict[str, Any]]:
    """The records of a run's steps. Raises RuntimeError if it fails."""
    settings = [
        RECIPE,
        *COMMON,
        *WAYS[way],
        f"trainer.steps={steps}",
        f"name={name}",
        f"run_dir={directory}",
        "overwrite=true",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "hybridflow", "train", *settings],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1"} | os.environ,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
        start_new_session=True,
    )
    if done.returncode:
        raise RuntimeError(f"{way}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    lines = (directory / name / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["phase"] == "train"]


def measured(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Tokens in a second and seconds of a step, over these steps; the share of them that the trainer waited."""
    seconds = sum(record[metrics.TRAIN_STEP_TIME] for record in records) / 1e3
    tokens = sum(record[metrics.ROLLOUT_RESPONSE_LENGTH] for record in records) * PROMPTS * SAMPLES
    stats = {"tokens_per_s": tokens / seconds, "step_s": seconds / len(records)}
    if all(metrics.STREAM_WAIT_SHARE in record for record in records):
        times = [record[metrics.TRAIN_STEP_TIME] for record in records]  # a share of a long step counts for more
        for figure, name in (
            ("trainer_wait_share", metrics.STREAM_WAIT_SHARE),
            ("engines_busy_share", metrics.STREAM_BUSY),
        ):
            stats[figure] = statistics.fmean([record[name] for record in records], times)
    return stats


def table(by_mode: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[str]:
    """A line for each way: medians, and the ratio to the batch call of the same turn with the lowest and highest."""
    yield "| | tokens/s | seconds of a step | beside the batch call |"
    yield "|---|---|---|---|"
    for way, runs in by_mode.items():
        tokens, step = (statistics.median(run[name] for run in runs) for name in ("tokens_per_s", "step_s"))
        ratios = [
            run["tokens_per_s"] / of["tokens_per_s"] for run, of in zip(runs, by_mode.get(BATCH, ()), strict=False)
        ]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        yield f"| {way} | {tokens:.0f} | {step:.2f} | {ratio} |"


if __name__ == "__main__":
    sys.exit(main())
