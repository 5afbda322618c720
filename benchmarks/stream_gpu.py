"""Rollouts as a stream beside the batch call on GPUs, with long-tailed lengths.

    python benchmarks/stream_gpu.py launch/recipes/h200-2x2-one-step-apart.yaml --directory runs/ways [key=value ...]

Each way of rolling out is a run of its own, in turn, on the same prompts, for a recipe whose tokens are characters. The
length of a prompt says how long its responses are (`rollout.adaptive_sampling`): sixteen lengths of the published
distribution (`response_lengths.py`), the longest brought to `--longest` tokens. All responses to a prompt are equally
long. The weights do not learn.

Prints a table. Steps are measured after `--skip` of a run, and up to the last one while prompts are drawn: what is
learned from in the last `trainer.max_staleness` steps was begun before, and nothing is begun for later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reshard_plan import Parser, versions
from benchmarks.response_lengths import LONGEST, PUBLISHED, Lengths
from hybridflow.metrics import names as metrics

BATCH = "batch"
_CALL = ("rollout.stream=null", "algorithm.correction=null")
_POLICIES = ("continue", "resend", "wait")
WAYS: dict[str, tuple[tuple[str, ...], int]] = {
    BATCH: (_CALL, 0),
    "ahead": (_CALL, 1),
    **{f"stream-{staleness}": (("rollout.stream={on_new_weights: recompute}",), staleness) for staleness in (0, 1, 4)},
    **{f"stream-1-{policy}": ((f"rollout.stream={{on_new_weights: {policy}}}",), 1) for policy in _POLICIES},
}
"""Settings of each way, and the staleness that it is given."""
_KINDS = 16
_SHORTEST_PROMPT, _BETWEEN = 64, 8
_REWARD = Path(__file__).with_name("drawn_reward.py")


def main() -> int:
    """Run the command line; the exit code is that of the first run that fails."""
    parser = Parser(prog="stream_gpu.py", description="A stream beside the batch call on GPUs.")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe")
    parser.add_argument("--directory", type=Path, required=True, help="for the runs; must not be there")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=8, help="first steps that are not measured")
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--task", choices=list(PUBLISHED), default="math", help="whose published lengths there are")
    parser.add_argument("--longest", type=int, default=3800, help="tokens of the longest responses")
    options = parser.parse_intermixed_args()
    if options.skip + max(WAYS[way][1] for way in options.ways) >= options.steps:
        parser.error(f"--skip: {options.skip} of {options.steps} steps, expected fewer")
    try:
        options.directory.mkdir(parents=True)
    except FileExistsError:
        parser.error(f"--directory: {options.directory} is there already")
    write_prompts(options.directory / "train.jsonl", options.steps * options.prompts)
    write_prompts(options.directory / "eval.jsonl", _KINDS)
    by_mode: dict[str, dict[str, float]] = {}
    for way in options.ways:
        command = [sys.executable, "-m", "hybridflow", "train", str(options.recipe), *settings(way, options)]
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        if done.returncode:
            return done.returncode
        lines = (options.directory / way / "metrics.jsonl").read_text().splitlines()
        records = [record for line in lines if (record := json.loads(line))["phase"] == "train"]
        steps = records[options.skip : len(records) - WAYS[way][1]]
        by_mode[way] = measured(steps, options.prompts * options.samples)
    print("\n".join(table(by_mode)))
    command_line = " ".join(["benchmarks/stream_gpu.py", *sys.argv[1:]])
    print(json.dumps({"command": command_line, "ways": by_mode, "versions": versions()}))
    return 0


def settings(way: str, options: argparse.Namespace) -> list[str]:
    """The overrides of the recipe for a way."""
    rows = ", ".join(
        f"{{prompt_tokens: {prompt + _BETWEEN // 2}, max_new_tokens: {tokens}}}"
        for prompt, tokens in kinds(options.task, options.longest)
    )
    of_way, staleness = WAYS[way]
    return [
        "warmup=null",
        f"run_dir={options.directory}",
        f"name={way}",
        f"trainer.steps={options.steps}",
        f"trainer.prompts_per_step={options.prompts}",
        f"trainer.max_staleness={staleness}",
        "evaluation.eval.before_train=false",
        "evaluation.eval.interval=null",
        f"evaluation.eval.prompts={_KINDS}",
        "trainer.export=false",
        "train.optimizer.lr=1e-12",
        "data.source=jsonl",
        f"data.jsonl.train_path={options.directory / 'train.jsonl'}",
        f"data.jsonl.eval_path={options.directory / 'eval.jsonl'}",
        f"reward.functions=[{{name: drawn, path: '{os.path.relpath(_REWARD)}:score'}}]",
        f"rollout.samples_per_prompt={options.samples}",
        f"rollout.adaptive_sampling=[{rows}]",
        "rollout.sampling.max_new_tokens=16",
        "rollout.sampling.ignore_eos=true",
        *of_way,
        *options.overrides,
    ]


def kinds(task: str, longest: int) -> list[tuple[int, int]]:
    """Return each kind's characters of a prompt and tokens of a response. Every kind has as many prompts."""
    lengths = Lengths(task, seed=1)
    tokens = [max(2, round(lengths.at((kind + 0.5) / _KINDS) * longest / LONGEST)) for kind in range(_KINDS - 1)]
    return [
        (_SHORTEST_PROMPT + _BETWEEN * kind, response_tokens) for kind, response_tokens in enumerate([*tokens, longest])
    ]


def write_prompts(path: Path, count: int) -> None:
    """Prompts of all kinds in turn, as JSON lines."""
    generator = random.Random(path.name)
    with path.open("w") as file:
        for number in range(count):
            characters = _SHORTEST_PROMPT + _BETWEEN * (number % _KINDS)
            text = "".join("+" if index % 3 == 0 else str(generator.randrange(10)) for index in range(characters))
            file.write(json.dumps({"prompt": text, "answer": "0"}) + "\n")


def measured(records: Sequence[Mapping[str, Any]], responses: int) -> dict[str, float]:
    """Return tokens in a second, seconds of a step and shares of its time, over steps of `responses` responses each."""
    seconds = sum(record[metrics.TRAIN_STEP_TIME] for record in records) / 1e3
    tokens = sum(record[metrics.ROLLOUT_RESPONSE_LENGTH] for record in records) * responses
    stats = {"tokens_per_s": tokens / seconds, "step_s": seconds / len(records)}
    for figure, name in (
        ("engines_busy_share", metrics.STREAM_BUSY),
        ("trainer_wait_share", metrics.STREAM_WAIT_SHARE),
    ):
        if steps := [record for record in records if name in record]:
            times = [record[metrics.TRAIN_STEP_TIME] for record in steps]  # a share of a long step counts for more
            stats[figure] = statistics.fmean([record[name] for record in steps], times)
    return stats


def table(by_mode: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """A line for each way, with the ratio to the batch call."""
    yield "| | tokens/s | beside the batch call | seconds of a step | engines busy | the trainer waits |"
    yield "|---|---|---|---|---|---|"
    for way, stats in by_mode.items():
        ratio = f"{stats['tokens_per_s'] / by_mode[BATCH]['tokens_per_s']:.2f}" if BATCH in by_mode else ""
        shares = [
            f"{100 * stats[name]:.0f} %" if name in stats else ""
            for name in ("engines_busy_share", "trainer_wait_share")
        ]
        yield (
            " | ".join([f"| {way}", f"{stats['tokens_per_s']:.0f}", ratio, f"{stats['step_s']:.2f}", *shares]) + " |"
        )


if __name__ == "__main__":
    sys.exit(main())
