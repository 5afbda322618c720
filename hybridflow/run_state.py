"""What the driver knows between two steps: all that the steps to come depend on, beside the state of the roles."""

from __future__ import annotations

import base64
import dataclasses
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine3d.errors import UserError
from hybridflow.batch import RolloutBatch
from hybridflow.batch_files import read_batch, write_batch

DRIVER = "driver.json"


@dataclass(frozen=True)
class RandomState:
    """The states of this process's random number generators, as JSON holds them."""

    python: list[Any]
    numpy: list[Any]
    torch: str

    @classmethod
    def capture(cls) -> RandomState:
        """Those of now."""
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return cls(
            python=[version, list(words), gauss],
            numpy=[name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
            torch=base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        )

    @staticmethod
    def seed(seed: int) -> None:
        """Start all of them from one seed."""
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def restore(self) -> None:
        """Go on with them."""
        version, words, gauss = self.python
        random.setstate((version, tuple(words), gauss))
        name, keys, position, has_gauss, cached = self.numpy
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(self.torch)), dtype=torch.uint8))


@dataclass(frozen=True)
class RunState:
    """The driver's state after a step, its transfer of weights and its evaluation.

    Args:
        step: steps that were done.
        policy_version: of the weights that the rollout engines serve.
        samples_drawn: ids of samples that were given out, those of evaluations included.
        sampler: `PromptSampler.state_dict()` of the training prompts.
        updates: optimizer steps of the training steps, skipped ones included.
        steps_without_update: steps in a row whose gradients were not finite.
        accuracy_before: on the held-out prompts, before the first step.
        accuracy_after: at the last evaluation.
        random: of the driver's generators.
        run: identity of the run that was saved.
        inputs: what identifies the files that the run was given, by the setting that names them.
        buffer: rollout batches that the driver holds for later steps.
        algorithm: what the algorithm's controllers have learned, such as the KL coefficient or the Lagrange multiplier:
            numbers by name, by the name of the controller.
    """

    step: int
    policy_version: int
    samples_drawn: int
    sampler: dict[str, int]
    updates: int
    steps_without_update: int
    accuracy_before: float
    accuracy_after: float
    random: RandomState
    run: str
    inputs: dict[str, str]
    buffer: tuple[RolloutBatch, ...] = ()
    algorithm: dict[str, dict[str, float]] = field(default_factory=dict)

    def write(self, directory: Path) -> list[Path]:
        """Write driver.json and a file for each batch; their paths."""
        batches = [directory / f"buffer-{number:05d}.safetensors" for number in range(len(self.buffer))]
        for path, batch in zip(batches, self.buffer, strict=True):
            write_batch(path, batch)
        facts = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "buffer"}
        facts |= {"random": dataclasses.asdict(self.random), "buffer": [path.name for path in batches]}
        (directory / DRIVER).write_text(json.dumps(facts, indent=1) + "\n")
        return [directory / DRIVER, *batches]

    @classmethod
    def read(cls, directory: Path) -> RunState:
        """What `write` wrote; in a checkpoint of format 1 the algorithm had no state.

        Raises:
            UserError: it is not there, or not what this version writes.
        """
        path = directory / DRIVER
        try:
            facts = json.loads(path.read_text())
            batches = tuple(read_batch(directory / name) for name in facts.pop("buffer"))
            return cls(**facts | {"random": RandomState(**facts["random"]), "buffer": batches})
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not the state of a run's driver: {' '.join(str(error).split())}") from None
