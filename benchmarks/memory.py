"""Accuracy of the memory ledger: predicted against measured memory of GPUs.

    python benchmarks/memory.py RUN_DIRECTORY... --sequence-tokens 2048 [--cache-tokens 345480]

compares the ledger of each run's recipe with the most that NVML saw of its GPUs in each phase, once the first step was
over; prints a line a phase, and last one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reshard_plan import Parser, versions
from engine3d.errors import UserError
from hybridflow.cluster.devices.device_map import Node
from hybridflow.config.recipe import load_recipe
from hybridflow.metrics import names as metrics
from hybridflow.metrics.timeline import TimelineSpan, step_ends
from hybridflow.planning.checks.placement import planned_devices
from hybridflow.planning.memory.device import GENERATE
from hybridflow.planning.memory.estimate import foresee, recipe_specs
from hybridflow.planning.memory.ledger import MemoryLedger
from hybridflow.report.run_data import RunData, read_run
from hybridflow.rundir.file_names import RECIPE

_CALLS = {"logprobs": "infer", "values": "infer", "update": "update", "update_values": "update"}


@dataclass(frozen=True)
class Comparison:
    """A phase of a run on the GPU that held the most in it.

    Args:
        phase: by its name in the ledger.
        foreseen, measured: bytes of a GPU.
    """

    phase: str
    foreseen: int
    measured: int

    @property
    def error(self) -> float:
        """Predicted minus measured memory, as a share of the measured."""
        return self.foreseen / self.measured - 1


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = Parser(prog="memory.py", description="The memory ledger against NVML.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIRECTORY")
    parser.add_argument("--sequence-tokens", type=int, required=True, help="of the longest prompt with its response")
    parser.add_argument(
        "--cache-tokens", type=int, help="that an engine said it has room for; all that fit if left out"
    )
    parser.add_argument("--gpu-gb", type=float, default=150.75, help="memory of each GPU, in 1e9 bytes")
    try:
        options = parser.parse_args(arguments)
        by_run = {}
        for directory in options.runs:
            run = read_run(directory)
            ledger = _ledger(directory, run, options.sequence_tokens, options.gpu_gb, options.cache_tokens)
            by_run[str(directory)] = (run, compare(run, ledger))
    except UserError as error:
        print(f"memory.py: {error}", file=sys.stderr)
        return 2
    for name, (_, comparisons) in by_run.items():
        print(name)
        for comparison in comparisons:
            numbers = (
                f"{comparison.foreseen / 1e9:>8.1f} GB foreseen {comparison.measured / 1e9:>8.1f} GB measured "
                f"{comparison.error:>+7.1%}"
            )
            print(f"  {comparison.phase:<22}{numbers}")
    print(
        json.dumps(
            {"runs": [_measurements(name, *run) for name, run in by_run.items()], "versions": versions()}, indent=2
        )
    )
    return 0


def _ledger(
    directory: Path, run: RunData, sequence_tokens: int, gpu_gb: float, cache_tokens: int | None = None
) -> MemoryLedger:
    """Compute the ledger of the run's recipe, on as many nodes and GPUs as were sampled."""
    recipe = load_recipe(directory / RECIPE)
    gpus = {(sample.node, sample.gpu) for sample in run.samples}
    nodes = sorted({node for node, _ in gpus})
    if not nodes:
        raise UserError(f"{directory}: no samples of GPUs; expected a run on GPUs")
    cluster = [Node(node, gpus=1 + max(gpu for name, gpu in gpus if name == node), cpu_slots=0) for node in nodes]
    devices = planned_devices(recipe.device_maps, recipe.placement, cluster)
    assert devices is not None
    return foresee(
        recipe,
        devices,
        recipe_specs(recipe),
        gpu_bytes=round(gpu_gb * 1e9),
        sequence_tokens=sequence_tokens,
        cache_tokens=cache_tokens,
    )


def compare(run: RunData, ledger: MemoryLedger) -> list[Comparison]:
    """Each phase of the ledger that was seen, and the worst moment of all."""
    foreseen: dict[str, int] = defaultdict(int)
    where: dict[str, set[int]] = defaultdict(set)
    for gpu in ledger.gpus:
        for phase in gpu.phases:
            foreseen[phase.name] = max(foreseen[phase.name], gpu.total(phase))
            where[phase.name] |= {device.index for device in gpu.devices}
    measured = peaks(run, where)
    comparisons = [Comparison(name, size, measured[name]) for name, size in foreseen.items() if name in measured]
    return [
        *comparisons,
        Comparison("most", max(foreseen.values()), max(sample.memory_bytes for sample in run.samples)),
    ]


def peaks(run: RunData, where: Mapping[str, set[int]] | None = None) -> dict[str, int]:
    """The most that a GPU held in each phase after the first step, by the phase's name in the ledger.

    Args:
        run: on one host.
        where: GPUs of each phase, as other roles may be at work beside it; all that were sampled if None, or if the
            run saw its GPUs under other numbers (`CUDA_VISIBLE_DEVICES`).
    """
    sampled = {sample.gpu for sample in run.samples}
    on = {name: gpus & sampled or sampled for name, gpus in (where or {}).items()}
    begin = min(step_ends(run.spans)[1:2], default=0.0)
    working = [(span, name) for span in run.spans if span.begin >= begin and (name := _phase(span)) is not None]
    largest: dict[str, int] = defaultdict(int)
    for sample in run.samples:
        for span, name in working:
            if span.begin <= sample.time <= span.end and sample.gpu in on.get(name, sampled):
                largest[name] = max(largest[name], sample.memory_bytes)
    return dict(largest)


def _phase(span: TimelineSpan) -> str | None:
    if span.method == "generate":
        return GENERATE
    return f"{_CALLS[span.method]} of {span.role}" if span.method in _CALLS else None


def _measurements(name: str, run: RunData, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    counters = (metrics.ACTOR_GPU_MEMORY, metrics.ACTOR_GPU_RESERVED)
    return {
        "run": name,
        "phases": {
            comparison.phase: {
                "foreseen_bytes": comparison.foreseen,
                "measured_bytes": comparison.measured,
                "error": comparison.error,
            }
            for comparison in comparisons
        },
        "of_the_actor_mb": {key: max(series.values) for key in counters if (series := run.series(key)) is not None},
    }


if __name__ == "__main__":
    sys.exit(main())
