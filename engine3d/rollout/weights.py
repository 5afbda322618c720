"""What a directory of safetensors holds, so that an update that does not fit is refused before an engine is touched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine3d.errors import UserError

Shapes = dict[str, tuple[int, ...]]

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The tensors that an engine's model is loaded from.

    Args:
        shapes: of every one, by name.
        layers: how many the model has.
        predict_layers: how many more a checkpoint may have, which predict further tokens and which SGLang leaves out.
        tied: whether the head is the embedding.
    """

    shapes: Shapes
    layers: int
    predict_layers: int
    tied: bool

    @classmethod
    def of(cls, directory: Path, config: Mapping[str, Any]) -> ModelTensors:
        """What a model directory has; `config` is what its config.json says. Raises UserError naming a file."""
        model = cls(
            shapes={},
            layers=config.get("num_hidden_layers", 0),
            predict_layers=config.get("num_nextn_predict_layers") or 0,
            tied=config.get("tie_word_embeddings", False),
        )
        found = tensor_shapes(directory)
        return replace(model, shapes={name: shape for name, shape in found.items() if not model.ignores(name)})

    def ignores(self, name: str) -> bool:
        """Whether SGLang passes over a tensor that checkpoints of this model may have."""
        if name == "lm_head.weight":
            return self.tied
        layer = _LAYER.match(name)
        return layer is not None and self.layers <= int(layer[1]) < self.layers + self.predict_layers


def tensor_shapes(directory: Path) -> Shapes:
    """The shape of every tensor in a directory's *.safetensors, from their headers. Raises UserError naming a file."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{directory} holds no *.safetensors")
    shapes: Shapes = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is not a whole safetensors file: {error}") from error
    return shapes


def check_weights_fit(directory: Path, expected: ModelTensors) -> None:
    """Check that a directory holds tensors of the expected names and shapes: all of them, and no others.

    Those that SGLang leaves out do not count. SGLang's own loader keeps the old value of a tensor that is missing, and
    says nothing.
    """
    found = tensor_shapes(directory)
    for name, shape in expected.shapes.items():
        if name not in found:
            raise UserError(f"{directory} lacks the tensor {name} of shape {list(shape)}")
        if found[name] != shape:
            raise UserError(f"{directory}: tensor {name} has shape {list(found[name])}; the engine has {list(shape)}")
    extra = [name for name in found.keys() - expected.shapes.keys() if not expected.ignores(name)]
    if extra:
        raise UserError(f"{directory} holds the tensor {min(extra)}, which the engine's model has not")
