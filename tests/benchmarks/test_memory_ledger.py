"""The ledger beside what was measured, from figures that were made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import memory
from hybridflow.cluster.devices.device_map import Device
from hybridflow.config.recipe import load_recipe
from hybridflow.metrics.device_samples import DeviceSample
from hybridflow.metrics.timeline import TimelineSpan
from hybridflow.planning.memory.ledger import GpuMemory, MemoryLedger, MemoryPhase
from hybridflow.report.run_data import RunData, read_run
from hybridflow.rundir.file_names import RECIPE
from tests.support.ledgers import equal_engines_once

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RUNS = [path.parent for path in sorted(RESULTS.rglob("devices.jsonl"))]
# Of runs whose engines had caches of the step's size and not of the GPU's: as their logs say.
CACHE_TOKENS = dict.fromkeys(("offload/stay", "offload/leave"), 345_480) | dict.fromkeys(
    ("h200-2and2-one-step-apart/run", "h200-2and2-one-step-apart/stream-run"), 1_083_528
)
# Other engines of a model that a quicker run has too: seconds of each ledger.
FURTHER = (
    *("h200-2and2-one-step-apart/stream-run", "memory/two-gpus-30b"),
    *("h200-4gpu-30b/even-run", "h200-4gpu-30b/five-steps-run"),
)
SHORT = ("h200-4gpu-30b/first-run", "memory/moe-pp2")
"""Runs of `make test`: a large model on four GPUs, and a small one in two stages."""
# What libraries and CUDA take of a GPU is one figure for all models, and too much for small ones.
LEAST = 4.2e9


def _run() -> RunData:
    """Two steps; in the first the optimizer's state is not there yet. The second GPU holds more than the first."""
    spans = [TimelineSpan("rollout", 0, "commit_weights", at - 0.1, at) for at in (0.0, 100.0, 200.0)]
    for begin in (0.0, 100.0):
        spans.append(TimelineSpan("rollout", 0, "generate", begin + 10, begin + 30))
        spans += [TimelineSpan("actor", rank, "update", begin + 40, begin + 70) for rank in (0, 1)]
    sizes = [(5, 1), (20, 20), (50, 95), (110.5, 30), (120, 70), (131, 90), (150, 80), (160, 60)]
    samples = [
        DeviceSample(at, "node", gpu, 50.0, (size + gpu) * 10**9, 400.0, 1000.0) for at, size in sizes for gpu in (0, 1)
    ]
    return RunData("run", {}, spans=sorted(spans, key=lambda span: span.begin), samples=samples)


def test_a_phase_is_measured_once_the_first_step_is_over() -> None:
    assert memory.peaks(_run()) == {"rollout": 71 * 10**9, "update of actor": 81 * 10**9}


def test_every_phase_that_was_seen_is_compared_and_the_worst_moment_of_all() -> None:
    phases = (
        MemoryPhase("rollout", {"KV cache": 10 * 10**9}, ""),
        MemoryPhase("infer of actor", {"logits": 10**9}, ""),
        MemoryPhase("update of actor", {"gradients": 17 * 10**9}, ""),
    )
    alike = (Device(0, "cuda", 0), Device(0, "cuda", 1))
    gpus = (GpuMemory(alike, {"actor weights": 64 * 10**9}, phases, 100),)
    by_phase = {
        comparison.phase: comparison for comparison in memory.compare(_run(), MemoryLedger(gpus, 10**11, (), 10, 10))
    }
    assert by_phase.keys() == {"rollout", "update of actor", "most"}
    assert by_phase["rollout"].error == pytest.approx(74 / 71 - 1)
    assert by_phase["update of actor"].error == 0
    assert (by_phase["most"].foreseen, by_phase["most"].measured) == (81 * 10**9, 96 * 10**9)


def test_a_phase_is_measured_on_the_gpus_that_have_it() -> None:
    where = {"rollout": {0}, "update of actor": {1}}
    assert memory.peaks(_run(), where) == {"rollout": 70 * 10**9, "update of actor": 81 * 10**9}


@pytest.fixture(scope="module")
def quick_ledgers() -> Iterator[None]:
    with equal_engines_once():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ledgers")
@pytest.mark.parametrize(
    "directory",
    [
        pytest.param(
            path, id=name, marks=pytest.mark.release if name in FURTHER else () if name in SHORT else pytest.mark.long
        )
        for path in RUNS
        for name in [str(path.relative_to(RESULTS))]
    ],
)
def test_what_gpus_held_in_runs_that_were_kept_is_foreseen(directory: Path) -> None:
    run = read_run(directory)
    tokens = 1024 + load_recipe(directory / RECIPE).rollout.sampling.max_new_tokens  # as step.py makes prompts
    cache = CACHE_TOKENS.get(str(directory.relative_to(RESULTS)))
    ledger = memory._ledger(directory, run, sequence_tokens=tokens, gpu_gb=150.75, cache_tokens=cache)
    comparisons = memory.compare(run, ledger)
    assert comparisons
    for comparison in comparisons:
        assert abs(comparison.foreseen - comparison.measured) < max(0.07 * comparison.measured, LEAST), comparison
