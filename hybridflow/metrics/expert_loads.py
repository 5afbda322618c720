"""Load of the experts of a run's models: metrics of each step, and the matrices of some steps in a file.

`expert_loads.jsonl` has one JSON object a step with the loads of every expert of every layer. It never has more than
`MOST_STEPS`: once it is full, only steps that are multiples of a power of two stay, at most half as many, and later
steps are added again. A step takes 8/3 bytes for each expert of each layer, and as much again for expert biases.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine3d.errors import UserError
from engine3d.input_files import parse_json
from hybridflow.metrics.names import UpdateNames
from hybridflow.metrics.sinks.files import begin_lines
from hybridflow.rundir.atomic_files import AppendedFile, replace_file, whole_lines

if TYPE_CHECKING:
    from engine3d.models.experts.load_balance import Routing

MOST_STEPS = 64
"""Steps in the file at most."""
_STORED = np.dtype("<f2")


@dataclass(frozen=True)
class ExpertLoads:
    """Load of the experts of a model over the tokens of a step's updates.

    Args:
        layers: numbers of the L layers that have experts, from 0.
        loads: (L, E) float64, tokens given to each expert over the mean of its layer.
        biases: (L, E) float64, expert biases in the last update less the mean of their layer; None for routers without.
    """

    layers: tuple[int, ...]
    loads: NDArray[np.float64]
    biases: NDArray[np.float64] | None = None

    @staticmethod
    def of(updates: Sequence[Routing]) -> ExpertLoads | None:
        """Sum the loads of a step's updates; None for a model without experts."""
        if not updates:
            return None
        biases = None
        if updates[-1].biases is not None:
            biases = np.asarray(updates[-1].biases, dtype=np.float64)
            biases = biases - biases.mean(axis=1, keepdims=True)
        tokens = np.asarray([update.loads for update in updates], dtype=np.float64).sum(axis=0)
        return ExpertLoads(updates[-1].layers, _relative(tokens), biases)

    @property
    def entropies(self) -> NDArray[np.float64]:
        """(L,) entropy of the load of each layer's experts over that of an even load; 1 for a single expert."""
        experts = self.loads.shape[1]
        shares = self.loads / np.maximum(self.loads.sum(axis=1, keepdims=True), 1e-9)
        logarithms = np.log(np.where(shares > 0, shares, 1.0))
        return -(shares * logarithms).sum(axis=1) / math.log(experts) if experts > 1 else np.ones(len(shares))

    @property
    def dead(self) -> NDArray[np.int64]:
        """(L,) experts of each layer without a token."""
        return (self.loads == 0).sum(axis=1)


def routing_metrics(updates: Sequence[Routing], names: UpdateNames) -> dict[str, float]:
    """Compute the metrics of routers in the updates of a step; none for a model without experts."""
    step = ExpertLoads.of(updates)
    if step is None:
        return {}
    relative = [_relative(np.asarray(update.loads, dtype=np.float64)) for update in updates]
    # By sum(), which is compensated for floats: numpy adds with other last bits.
    highest = [
        sum(loads) / len(updates) for loads in zip(*(layers.max(axis=1).tolist() for layers in relative), strict=True)
    ]
    worst, entropies = highest.index(max(highest)), step.entropies
    values = {
        names.expert_load_max: highest[worst],
        names.expert_load_max_layer: float(step.layers[worst]),
        names.expert_load_max_mean: sum(highest) / len(highest),
        names.expert_load_min: min(float(loads.min()) for loads in relative),
        names.expert_load_entropy: float(entropies.mean()),
        names.expert_load_entropy_min: float(entropies.min()),
        names.dead_experts: float(step.dead.sum()),
    }
    if step.biases is not None:
        spreads = np.ptp(step.biases, axis=1)
        values[names.expert_bias_spread] = float(spreads.max())
        values[names.expert_bias_spread_mean] = float(spreads.mean())
    losses = {
        names.router_z_loss: [update.z for update in updates],
        names.sequence_balance_loss: [update.sequence for update in updates],
        names.update_balance_loss: [update.update for update in updates],
    }
    for name, values_of_updates in losses.items():
        present = [value for value in values_of_updates if value is not None]
        if present:
            values[name] = sum(present) / len(present)
    return values


def _relative(tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """(L, E) tokens of each expert over the mean of its layer."""
    relative: NDArray[np.float64] = tokens / np.maximum(tokens.mean(axis=1, keepdims=True), 1e-9)
    return relative


@dataclass(frozen=True)
class StepLoads:
    """Expert loads of one step of a phase, by role."""

    phase: str
    step: int
    models: Mapping[str, ExpertLoads]


class ExpertLoadSink:
    """One JSON object a line: phase, step, and by role the layers, the experts of each, and their loads and biases.

    Matrices are float16, little-endian, by layer, in base64. A run that resumes drops what it will make again, as
    `JsonlSink` does. There is no file before the first record.
    """

    def __init__(self, path: Path, resume_from_step: int | None) -> None:
        begin_lines(path, resume_from_step)
        self._path = path
        self._steps = [_step(line) for line in whole_lines(path)] if path.exists() else []
        self._file: AppendedFile | None = None

    def write(self, record: StepLoads) -> None:
        """Write the loads of a step.

        Raises:
            OSError: it could not.
        """
        if len(self._steps) >= MOST_STEPS:
            self._thin()
        if self._file is None:
            self._file = AppendedFile(self._path)
        models = {role: _fields(loads) for role, loads in record.models.items()}
        self._file.add(json.dumps({"phase": record.phase, "step": record.step, "models": models}) + "\n")
        self._steps.append(record.step)

    def _thin(self) -> None:
        """Keep the steps that are multiples of the smallest power of two which leaves at most half of the most."""
        stride = 2
        while sum(step % stride == 0 for step in self._steps) > MOST_STEPS // 2:
            stride *= 2
        lines = zip(self._steps, whole_lines(self._path), strict=True)
        replace_file(self._path, "".join(f"{line}\n" for step, line in lines if step % stride == 0))
        self._steps = [step for step in self._steps if step % stride == 0]
        self.close()

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_expert_loads(path: Path) -> list[StepLoads]:
    """Read the expert loads of a run, in the order of steps.

    Raises:
        UserError: naming the file and the line that has none.
    """
    steps = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            fields = parse_json(line)
            models = {str(role): _loads(model) for role, model in fields["models"].items()}
            steps.append(StepLoads(str(fields["phase"]), int(fields["step"]), models))
        except (ValueError, KeyError, AttributeError, TypeError):
            expected = "expected an object with phase, step and models"
            raise UserError(f"{path}:{number}: {line[:60]!r} has no expert loads, {expected}") from None
    return steps


def _step(line: str) -> int:
    return int(parse_json(line)["step"])


def _fields(model: ExpertLoads) -> dict[str, Any]:
    fields = {"layers": model.layers, "experts": model.loads.shape[1], "loads": _encoded(model.loads)}
    return fields if model.biases is None else fields | {"biases": _encoded(model.biases)}


def _loads(fields: Mapping[str, Any]) -> ExpertLoads:
    layers = tuple(int(layer) for layer in fields["layers"])
    shape = len(layers), int(fields["experts"])
    biases = fields.get("biases")
    return ExpertLoads(layers, _decoded(fields["loads"], shape), None if biases is None else _decoded(biases, shape))


def _encoded(values: NDArray[np.float64]) -> str:
    return base64.b64encode(values.astype(_STORED).tobytes()).decode()


def _decoded(text: str, shape: tuple[int, int]) -> NDArray[np.float64]:
    return np.frombuffer(base64.b64decode(text, validate=True), _STORED).astype(np.float64).reshape(shape)
