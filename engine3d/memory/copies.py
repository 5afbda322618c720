"""Memory of a model's rank for copies of its weights and of experts' tokens, which stays as long as the model."""

from __future__ import annotations

from dataclasses import dataclass

from engine3d.dtypes import ITEMSIZES
from engine3d.layout import Coordinates, Layout
from engine3d.memory.resident import merged_bytes, quantised_bytes
from engine3d.memory.working import peer_memory
from engine3d.models.family import ModelSpec
from engine3d.models.precision import Precision
from engine3d.training.config import TrainConfig


@dataclass(frozen=True, slots=True)
class CopiedBytes:
    """Bytes of a rank next to its parameters and its optimizer.

    Args:
        tokens: of experts, into which other ranks copy.
        quantised: weights in fp8, for engines.
        operands: quantised weights that stay from a forward pass until its backward pass.
        merged: weights with their adapters, for engines.
    """

    tokens: int = 0
    quantised: int = 0
    operands: int = 0
    merged: int = 0

    @property
    def total(self) -> int:
        return self.tokens + self.quantised + self.operands + self.merged


def copied_by_rank(
    spec: ModelSpec,
    layout: Layout,
    at: Coordinates,
    config: TrainConfig,
    *,
    tokens: int,
    serves: bool,
    engine_precision: Precision | None,
    transformer_engine: bool = True,
) -> CopiedBytes:
    """Predict the copies that the rank at `at` has.

    Args:
        spec: the model.
        layout: must pass the model's `check_layout`.
        at: the rank.
        config: dtype, precision, adapters, dispatcher.
        tokens: of the largest micro-batch of any call.
        serves: engines have the model's weights.
        engine_precision: of these.
        transformer_engine: true if the model is built from Transformer Engine's layers.
    """
    quantised = operands = 0
    if (serves and engine_precision is not None) or config.precision is not None:
        nbytes = quantised_bytes(spec, layout, at, transformer_engine=transformer_engine)
        quantised = nbytes if serves and engine_precision is not None else 0
        if config.precision is not None:
            # Transformer Engine has values and their transpose, a CPU the dequantised ones.
            operands = nbytes * (2 if transformer_engine else ITEMSIZES[config.dtype])
    merged = 0
    if serves and config.lora is not None and config.lora.engine == "merged":
        merged = merged_bytes(spec, layout, at, config, transformer_engine=transformer_engine)
    return CopiedBytes(peer_memory(spec, layout, config, tokens=tokens), quantised, operands, merged)
