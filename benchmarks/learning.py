"""Learning curves of the algorithms' recipes, over several seeds.

    python benchmarks/learning.py launch/recipes/demo.yaml launch/recipes/remax.yaml --seeds 1 2 3 --jobs 2
    python benchmarks/learning.py launch/recipes/stream.yaml --name stale-4 --set trainer.max_staleness=4 --results DIR
    python benchmarks/learning.py --draw
    python benchmarks/learning.py --table --results DIR

The first runs the recipes, each with each seed and an evaluation every `--eval-interval` steps, `--jobs` runs at a
time, and keeps what they learned in `results/learning/<recipe>/seed-<N>.json`; of a recipe with several actors in
`<recipe>.<actor>`, of one with held-out sets in `<recipe>.<set>`; of episodes the mean reward of each step. The second
does so for a variant of a recipe, which is kept by a name of its own. The third draws every curve that is kept into
`docs/algorithms/curves/<recipe>.svg`, beside GRPO's; the last prints a table of all that is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hybridflow.config.actors import load_recipes
from hybridflow.report.drawing import draw
from hybridflow.report.page import svg
from hybridflow.report.plots import Band, Line, LinePlot

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/learning"
CURVES = ROOT / "docs/algorithms/curves"
BESIDE = "demo"
"""The recipe that the others are drawn beside: GRPO's."""

_FIGURES = {
    "eval/accuracy": "held-out accuracy",
    "eval/reward_mean": "mean reward of held-out prompts",
    "eval/score_mean": "mean score of held-out prompts",
    "eval/preference_accuracy": "share of held-out preferences that became likelier",
}
"""Label of a curve by its metric. A curve shows the first of these that a run has."""
_OF_EPISODES = "reward/environment/mean"
"""Metric of a run of episodes, which evaluates nothing."""
_OF_A_SET = re.compile(r"eval/([^/]+)/mean@\d+")
_LIMIT_S = 3600.0
_COLOURS = {"--ink": "#444444", "--rule": "#cccccc", "--series-0": "#1f77b4", "--series-1": "#999999"}
_PACKAGES = ("torch", "megatron-core", "sglang", "ray")


@dataclass(frozen=True)
class Learned:
    """Learning curve of a run.

    Args:
        recipe: the name of its file, and that of the actor behind a dot if it has several, or that of the held-out set.
        seed: of the run.
        evaluations: step and figure of each evaluation; of episodes those of each step.
        figure: its metric.
        rewards: mean reward of each step from 1 on; empty where nothing is generated.
        seconds: that the run took, start and end included.
        command: that repeats it.
        machine: processors and memory.
        versions: of the packages, by name.
    """

    recipe: str
    seed: int
    evaluations: list[tuple[int, float]]
    figure: str
    rewards: list[float]
    seconds: float
    command: str
    machine: str
    versions: dict[str, str]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="learning.py", description="Learning curves of recipes.")
    parser.add_argument("recipes", type=Path, nargs="*", help="recipes to run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--eval-interval", type=int, default=20, metavar="STEPS")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of every run")
    parser.add_argument("--directory", type=Path, default=Path("runs/learning"), help="of the runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where what was learned is kept")
    parser.add_argument("--name", help="that one recipe is kept by, with --set; its own without")
    parser.add_argument("--draw", action="store_true", help="draw every curve that is kept")
    parser.add_argument("--table", action="store_true", help="print what every recipe that is kept has learned")
    options = parser.parse_args()
    if not (options.recipes or options.draw or options.table):
        parser.error("nothing to do, expected recipes, --draw or --table")
    if options.name is not None and len(options.recipes) != 1:
        parser.error(f"--name with {len(options.recipes)} recipes, expected one")
    failed = 0
    if options.recipes:
        jobs = [(recipe, seed) for seed in options.seeds for recipe in options.recipes]

        def one(job: tuple[Path, int]) -> bool:
            kept_by = options.name or job[0].stem
            return _run(*job, kept_by, options.directory, options.results, options.eval_interval, options.set)

        with ThreadPoolExecutor(options.jobs) as pool:
            failed = sum(not succeeded for succeeded in pool.map(one, jobs))
    if options.draw:
        for path in draw_curves(options.results, CURVES):
            print(path)
    if options.table:
        print("\n".join(table(options.results)))
    return int(failed > 0)


def _run(
    recipe: Path, seed: int, kept_by: str, directory: Path, results: Path, interval: int, settings: Sequence[str]
) -> bool:
    """Train, and keep what was learned; whether that succeeded."""
    name = f"{kept_by}-{seed}"
    sets = dict.fromkeys(name for settings in load_recipes(recipe).values() for name in settings.sets)
    intervals = (f"evaluation.{held_out}.interval={interval}" for held_out in sets)
    arguments = [str(recipe), f"seed={seed}", *intervals, "trainer.export=false", *settings]
    log = directory / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("w") as file:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "hybridflow",
                "train",
                *arguments,
                f"name={name}",
                f"run_dir={directory}",
                "overwrite=true",
            ],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
            timeout=_LIMIT_S,
            check=False,
            start_new_session=True,
        )
    seconds = time.monotonic() - began
    if done.returncode:
        print(f"{name}: exit code {done.returncode} after {seconds:.0f} s; {log}", flush=True)
        return False
    command = " ".join(["hybridflow train", *arguments])
    for result in (
        learned(metrics, learner, seed, seconds, command, figure)
        for run, metrics in learners(directory / name, kept_by).items()
        for learner, figure in evaluation_values(metrics, run).items()
    ):
        learner = result.recipe
        path = results / learner / f"seed-{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(result)) + "\n")
        ends = [figure for _, figure in (result.evaluations[0], result.evaluations[-1])]
        print(f"{learner}-{seed}: {result.figure} {ends[0]:.3f} -> {ends[1]:.3f} in {seconds:.0f} s", flush=True)
    return True


def learners(run: Path, recipe: str) -> dict[str, Path]:
    """The metrics of a run by what learned: the recipe, or each of its actors as `<recipe>.<actor>`."""
    if (single := run / "metrics.jsonl").exists():
        return {recipe: single}
    return {f"{recipe}.{path.parent.name}": path for path in sorted(run.glob("*/metrics.jsonl"))}


def evaluation_values(path: Path, learner: str) -> dict[str, str]:
    """Return the metrics of a run's evaluations that are kept, each by the name that it is kept by.

    Raises:
        ValueError: there is no evaluation, or one of nothing that is drawn.
    """
    records = [json.loads(line) for line in path.read_text().splitlines()]
    first = next((record for record in records if record["phase"] == "eval"), None)
    if first is None and any(_OF_EPISODES in record for record in records):
        return {learner: _OF_EPISODES}
    if first is None:
        raise ValueError(f"{path}: no evaluation, expected at least one")
    if metric := next((name for name in _FIGURES if name in first), None):
        return {learner: metric}
    if of_sets := {f"{learner}.{match[1]}": match[0] for name in first if (match := _OF_A_SET.fullmatch(name))}:
        return of_sets
    expected = ", ".join([*_FIGURES, "eval/SET/mean@K"])
    raise ValueError(f"{path}: evaluations of {', '.join(first)}, expected one of {expected}")


def learned(path: Path, recipe: str, seed: int, seconds: float, command: str, figure: str) -> Learned:
    """Read one metric's curve from a run's metrics. The other arguments are those of what is returned."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    phase = "train" if figure == _OF_EPISODES else "eval"
    evaluations = [record for record in records if record["phase"] == phase and figure in record]
    return Learned(
        recipe=recipe,
        seed=seed,
        evaluations=[(record["step"], record[figure]) for record in evaluations],
        figure=figure,
        rewards=[record["reward/mean"] for record in records if record["phase"] == "train" and "reward/mean" in record],
        seconds=seconds,
        command=command,
        machine=f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, no GPU used",
        versions={"CPython": platform.python_version()} | {name: version(name) for name in _PACKAGES},
    )


def read(results: Path, recipe: str) -> list[Learned]:
    """Read the curves that are kept of a recipe, by seed."""
    return [Learned(**json.loads(path.read_text())) for path in sorted((results / recipe).glob("seed-*.json"))]


def curve(runs: Sequence[Learned]) -> Band:
    """Mean, lowest and highest figure over the seeds at each evaluation that all have; `label` says how many."""
    steps = sorted(set.intersection(*(({step for step, _ in run.evaluations}) for run in runs)))
    values = np.array([[_by_step(run)[step] for step in steps] for run in runs])
    seeds = f"{len(runs)} seeds" if len(runs) > 1 else "1 seed"
    return Band(seeds, np.array(steps, dtype=float), values.min(axis=0), values.max(axis=0))


def _by_step(run: Learned) -> dict[float, float]:
    return dict(run.evaluations)


def _mean(label: str, runs: Sequence[Learned]) -> Line:
    band = curve(runs)
    values = np.array([[_by_step(run)[int(step)] for step in band.x] for run in runs])
    return Line(label, band.x, values.mean(axis=0))


def table(results: Path) -> Iterator[str]:
    """Yield the results of every recipe that is kept, as table rows: means over seeds, with lowest and highest."""
    yield "| | seeds | first evaluation | last evaluation | seconds of a run |"
    yield "|---|---|---|---|---|"
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        runs = read(results, folder.name)
        ends = [[run.evaluations[end][1] for run in runs] for end in (0, -1)]
        first, last = (f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})" for values in ends)
        seconds = np.mean([run.seconds for run in runs])
        yield f"| {folder.name} | {len(runs)} | {first} | {last} | {seconds:.0f} |"


def draw_curves(results: Path, curves: Path) -> Iterator[Path]:
    """Draw every recipe that is kept; the files."""
    curves.mkdir(parents=True, exist_ok=True)
    beside = read(results, BESIDE)
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        runs = read(results, folder.name)
        lines = [_mean(folder.name, runs)]
        if beside and folder.name != BESIDE and beside[0].figure == runs[0].figure:
            lines.append(_mean("grpo", beside))
        plot = LinePlot(
            name=f"learning-{folder.name}",
            title=folder.name,
            y_label=(_FIGURES | {_OF_EPISODES: "mean reward of episodes"}).get(runs[0].figure, runs[0].figure),
            lines=tuple(lines),
            band=curve(runs),
        )
        path = curves / f"{folder.name}.svg"
        drawn = svg(draw(plot, legend=True))
        path.write_text(re.sub(r"var\((--[a-z0-9-]+)\)", lambda variable: _COLOURS[variable[1]], drawn) + "\n")
        yield path


if __name__ == "__main__":
    sys.exit(main())
