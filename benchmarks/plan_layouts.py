"""Measured seconds of a step of the demo on 30 layouts and placements of a machine without GPUs.

    python benchmarks/plan_layouts.py [--rounds N] [--within SECONDS] [--only NAME,...]
    python benchmarks/plan_truth.py

The first runs the demo on each in turn, a few steps without its warm-up and evaluation, and keeps the steps' records in
`results/plan/demo/<name>.json` as each ends. Each round goes through all of them, so that what the machine does
meanwhile falls on all alike; a round that is there, with the same settings, is not run again. A step has four times the
demo's prompts: those of a second differ by a fifth from one run to the next. The second command compares them with the
prediction of each recipe from the shipped profile of a CPU, and writes the rank correlation and the table into
`results/plan/README.md`. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.series import run_command
from hybridflow.cluster.devices.device_map import Device
from hybridflow.config.actors import load_one_recipe
from hybridflow.planning.step_prediction import predicted_seconds
from hybridflow.planning.time.hardware import load_profile, this_machine

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "launch/recipes/demo.yaml"
MEASURED = ROOT / "benchmarks/results/plan/demo"
STEPS = 6
PHASES = {
    "rollout": "rollout/time_ms",
    "scoring": "inference/time_ms",
    "update": "train/update_time_ms",
    "step": "train/step_time_ms",
}

_COMMON = (
    "warmup=null",
    "evaluation.eval=null",
    "checkpoint.save_interval=null",
    "samples.store=false",
    f"trainer.steps={STEPS}",
    "trainer.prompts_per_step=256",
)


def _on(ranks: int, layout: str = "{}", tokens: int = 8192, *settings: str, engines: str = "0") -> tuple[str, ...]:
    actor = f"cpu:0-{ranks - 1}" if ranks > 1 else "cpu:0"
    placement = f"placement={{actor: '{actor}', rollout: 'cpu:{engines}'}}"
    return (placement, f"train.layout={layout}", f"train.micro_batch_tokens={tokens}", *settings)


_PACKED, _RECOMPUTE = "train.packing=true", "train.recompute=full"
CASES: dict[str, tuple[str, ...]] = {
    "dp1": _on(1),
    "ep2": _on(2, "{ep: 2}"),
    "pp2-512": _on(2, "{pp: 2}", 512),
    "tp2-dp2": _on(4, "{tp: 2}"),
    "dp1-256": _on(1, "{}", 256),
    "dp1-one-update": _on(1, "{}", 8192, "trainer.mini_batches=1"),
    "tp2-256": _on(2, "{tp: 2}", 256),
    "ep4-512": _on(4, "{ep: 4}", 512),
    "ep2-apart": _on(2, "{ep: 2}", engines="2"),
    "dp1-512": _on(1, "{}", 512),
    "tp2-pp2-256": _on(4, "{tp: 2, pp: 2}", 256),
    "two-engines": _on(2, "{ep: 2}", engines="0-1"),
    "cp2": _on(2, "{cp: 2}", 8192, _PACKED),
    "dp4": _on(4),
    "ep2-256": _on(2, "{ep: 2}", 256),
    "dp1-512-recompute": _on(1, "{}", 512, _RECOMPUTE),
    "engine-tp2": _on(2, "{ep: 2}", 8192, "rollout.engine.tp=2", engines="0-1"),
    "pp2-ep2-512": _on(4, "{pp: 2, ep: 2}", 512),
    "tp2-etp2": _on(2, "{tp: 2, etp: 2}"),
    "dp1-1024": _on(1, "{}", 1024),
    "pp2": _on(2, "{pp: 2}"),
    "tp2-ep4-256": _on(4, "{tp: 2, ep: 4}", 256),
    "ep2-four-updates": _on(2, "{ep: 2}", 8192, "trainer.mini_batches=4"),
    "dp2-256-recompute": _on(2, "{}", 256, _RECOMPUTE),
    "cp2-dp2-512": _on(4, "{cp: 2}", 512, _PACKED),
    "ep2-512": _on(2, "{ep: 2}", 512),
    "dp1-apart": _on(1, engines="1"),
    "pp2-dp2-256": _on(4, "{pp: 2}", 256),
    "tp2-ep2-512": _on(2, "{tp: 2, ep: 2}", 512),
    "ep4": _on(4, "{ep: 4}"),
}
"""Settings of each, by its name, in an order in which neighbours differ: what is done in time is a sample of all."""


@dataclass(frozen=True)
class MeasuredCase:
    """A layout and placement that was run.

    Args:
        name: among `CASES`.
        settings: over the demo's.
        rounds: records of the steps of each run.
        seconds: that each run took, start and end included.
        load: mean of runnable processes in the minute before each.
        machine: without its name.
    """

    name: str
    settings: tuple[str, ...]
    rounds: list[list[dict[str, Any]]]
    seconds: list[float]
    load: list[float]
    machine: dict[str, str | int]

    @property
    def measured(self) -> dict[str, float]:
        """Seconds of each phase, medians of the steps after the first of each run."""
        return _medians([step for steps in self.rounds for step in steps[1:]])

    def measured_in(self, number: int) -> dict[str, float]:
        """Seconds of each phase in the run of one round."""
        return _medians(self.rounds[number][1:])

    @cached_property
    def predicted(self) -> dict[str, float]:
        """Seconds of each phase from the recipe, the shipped profile and the mean tokens of prompts."""
        recipe = load_one_recipe(str(DEMO), list(self.settings))
        devices = {
            role: _devices(text)
            for role, text in (("actor", recipe.placement.actor), ("rollout", recipe.placement.rollout))
        }
        profile = load_profile("cpu").with_cluster(len(set().union(*devices.values())))
        seconds = predicted_seconds(recipe, devices, profile, _PROMPT_TOKENS)
        assert seconds is not None
        return {phase: seconds.seconds.get(phase, 0.0) for phase in PHASES}


def _medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    return {phase: statistics.median(step.get(metric, 0.0) for step in steps) / 1e3 for phase, metric in PHASES.items()}


_PROMPT_TOKENS = 5.6
"""Mean tokens of the demo's prompts."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 1 where a run has failed or none was begun for lack of time."""
    parser = argparse.ArgumentParser(prog="plan_layouts.py", description="Steps of the demo on 30 layouts.")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each layout")
    parser.add_argument("--within", type=float, default=3600.0, help="seconds for all runs")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for each run")
    parser.add_argument("--only", help="names, with commas")
    parser.add_argument("--out", type=Path, default=MEASURED)
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--only {unknown[0]}: expected names among {', '.join(CASES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    deadline, outcomes = time.monotonic() + options.within, list[str]()
    for number, name in itertools.product(range(options.rounds), names):
        file, left_s = options.out / f"{name}.json", deadline - time.monotonic()
        if rounds_of(file, CASES[name]) > number:
            outcome = "there"
        elif left_s < _LEAST_S:
            outcome = "no time left"
        else:
            outcome = _run(name, file, min(options.limit, left_s))
        outcomes.append(outcome)
        print(f"{name}, round {number + 1}: {outcome}", flush=True)
    return int(not all(outcome.startswith(("there", "measured")) for outcome in outcomes))


_LEAST_S = 30.0
"""Time with less of which left no run is begun."""


def rounds_of(file: Path, settings: tuple[str, ...]) -> int:
    """Return how often a file has a case's steps with these settings."""
    row = json.loads(file.read_text()) if file.is_file() else {}
    return len(row["rounds"]) if row.get("settings") == [*settings, *_COMMON] else 0


def _run(name: str, file: Path, limit_s: float) -> str:
    """Run one case and keep its steps beside those of earlier rounds. Returns what came of it."""
    settings, load, began = (*CASES[name], *_COMMON), os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "hybridflow", "train", str(DEMO), f"run_dir={scratch}", *settings]
        ended = run_command(command, Path(scratch) / "log", limit_s)
        seconds = time.monotonic() - began
        if ended["exit_code"] != 0:
            return f"failed ({ended['exit_code']}): {_last_line(Path(scratch) / 'log/stderr')}"
        records = (Path(scratch) / "demo/metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, records) if record["phase"] == "train"]
    case = MeasuredCase(name, settings, [], [], [], this_machine())
    if rounds_of(file, CASES[name]):
        case = _case(file)
    case.rounds.append(steps)
    case.seconds.append(round(seconds, 1))
    case.load.append(load)
    file.write_text(json.dumps(asdict(case)) + "\n")
    return f"measured, {case.measured_in(-1)['step']:.2f} s a step, {seconds:.0f} s in all"


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return lines[-1] if lines else "no output"


def measured_cases(directory: Path = MEASURED) -> list[MeasuredCase]:
    """The cases that have been measured, in the order of `CASES`."""
    files = (directory / f"{name}.json" for name in CASES)
    return [_case(file) for file in files if file.is_file()]


def _case(file: Path) -> MeasuredCase:
    row = json.loads(file.read_text())
    return MeasuredCase(**row | {"settings": tuple(row["settings"])})


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's correlation of two lists without equal values."""
    ranks = np.array([np.argsort(np.argsort(values)) for values in (first, second)])
    return float(np.corrcoef(ranks)[0, 1])


def correlation_of(cases: list[MeasuredCase]) -> float:
    """Rank correlation of the predicted with the measured seconds of a step."""
    return rank_correlation([case.predicted["step"] for case in cases], [case.measured["step"] for case in cases])


def section(cases: list[MeasuredCase]) -> Iterator[str]:
    """Lines of the page of predicted against measured seconds; none without cases."""
    if len(cases) < 3:
        return
    correlation, rounds = correlation_of(cases), min(len(case.rounds) for case in cases)
    between = ""
    if rounds > 1:
        first, second = ([case.measured_in(number)["step"] for case in cases] for number in (0, 1))
        between = f" The first two rounds correlate by {rank_correlation(first, second):.2f} with each other."
    yield from (
        "## Layouts and placements of the demo on CPUs",
        "",
        "    python benchmarks/plan_layouts.py && python benchmarks/plan_truth.py",
        "",
        f"{len(cases)} of them, with four times the demo's prompts, in {rounds} rounds of {STEPS} steps; medians of",
        "all but the first steps. Rank correlation of the predicted with the measured seconds of a step: "
        f"{correlation:.2f}.",
        f"{between.strip()} Predicted / measured:",
        "",
        "| case | rollout | scoring | update | step |",
        "|---|---|---|---|---|",
    )
    for case in cases:
        cells = (f"{case.predicted[phase]:.2f} / {case.measured[phase]:.2f}" for phase in PHASES)
        yield f"| {case.name} | {' | '.join(cells)} |"
    yield from (
        "",
        "No rate comes from these runs: three come from one of `ep2` with a fourth of the prompts. That ranks of one",
        "core share two of these was chosen with an earlier measurement of the same layouts. Misses: four ranks on two",
        "cores with tp and pp (`tp2-pp2-256`), where each message waits until its receiver has a core; two engines,",
        "which share the cores with the driver. The rollouts differ by noise alone, but for `two-engines`.",
    )


def _devices(text: str | None) -> tuple[Device, ...]:
    assert text is not None
    first, _, last = text.partition(":")[2].partition("-")
    return tuple(Device(0, "cpu", index) for index in range(int(first), int(last or first) + 1))


if __name__ == "__main__":
    sys.exit(main())
