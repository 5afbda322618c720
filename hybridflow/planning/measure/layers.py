"""Seconds of layers on processors: passes of tiny Megatron-Core models, with more and less of what they depend on.

A pass takes, for each layer, time of its own and time for each token; with packing, time for each sequence; with tensor
parallelism, time for each exchange. Each is the difference of two measurements over what differs between them.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine3d.layout import Layout
from engine3d.models import initialise_random, model_spec
from engine3d.training.config import LayoutConfig, TrainConfig
from engine3d.training.passes.forward import TokenOutputs
from engine3d.training.passes.sequences import Sequences
from hybridflow.planning.measure.ranks import on_ranks, seconds_together
from hybridflow.planning.measure.rates import MeasuredRate, seconds_of
from hybridflow.planning.time.hardware import Hardware
from hybridflow.planning.time.training import Batch, CostModel

_LAYERS, _TOKENS, _FEW, _MANY = 2, 8, 16, 256
"""Layers of a model, tokens of a sequence, and sequences: few, whose tokens take little, and many."""
_EXCHANGES = 4
"""Exchanges of tensor parallelism in a layer's forward pass, as `CostModel` counts them."""
_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 64,
}
_SPARSE = _CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def measured_layers(ranks: int, hardware: Hardware) -> dict[str, MeasuredRate]:
    """Measure forward passes and updates of tiny models on processors.

    Args:
        ranks: 1 measures no exchanges.
        hardware: this machine's rates of multiplications and memory.

    Returns:
        Rates by their name in `Hardware`.

    Raises:
        UserError: the ranks did not end in time.
    """
    return layer_rates(on_ranks(_passes, 1), on_ranks(_split_passes, 2) if ranks > 1 else None, hardware)


def layer_rates(
    passes: dict[str, float], split: dict[str, float] | None, hardware: Hardware
) -> dict[str, MeasuredRate]:
    """Compute the rates of `measured_layers` from measured seconds.

    Args:
        passes: of forward passes and updates, by model and micro-batches.
        split: of forward passes with tensor parallelism; None without.
        hardware: this machine's rates of multiplications and memory.
    """
    apart = {name: (passes[f"{name} apart"] - passes[f"{name} few"]) / (_FEW - 1) for name in ("dense", "sparse")}
    of = f"a model of {_LAYERS} layers and width {_CONFIG['hidden_size']}"
    origin = f"measured, micro-batches of {_TOKENS} tokens through {of}"
    layer, sparse = (MeasuredRate(apart[name] / _LAYERS, origin) for name in ("dense", "sparse"))
    # A step's updates take longer than its forward passes: what they share is that of updates.
    backward = max(0.1, (passes["update apart"] - passes["update few"]) / (_FEW - 1) / apart["sparse"] - 1)
    tokens = (passes["update many"] - passes["update few"]) / (_MANY - _FEW)
    packed = (passes["update packed"] - passes["update many"]) / (_MANY * _LAYERS) / (1 + backward)
    rates = {
        "backward": MeasuredRate(backward, f"{origin}, updates and forward passes"),
        "layer_s": layer,
        "sparse_layer_s": sparse,
        "unfused_layer_s": sparse,
        "sequence_s": MeasuredRate(
            max(0.0, packed), f"measured, updates of {_MANY} packed sequences of {_TOKENS} tokens and padded ones, {of}"
        ),
        "passes": MeasuredRate(
            _share_of_passes(tokens, replace(hardware, backward=backward)),
            f"measured, updates of {_MANY} and {_FEW} sequences of {_TOKENS} tokens, {of}",
        ),
    }
    if split is not None:
        exchanges = (split["apart"] - split["few"]) / (_FEW - 1) - apart["sparse"]
        rates["message_s"] = MeasuredRate(
            max(1e-6, exchanges) / (_EXCHANGES * _LAYERS), f"measured, {of} with tp of 2 and without"
        )
    return rates


def _share_of_passes(seconds: float, hardware: Hardware) -> float:
    """Share of the memory's rate with which other kernels explain a sequence's seconds in an update."""
    costs = CostModel(model_spec(_SPARSE), replace(hardware, passes=1.0))
    config = TrainConfig(dtype="float32", packing=False)
    few, many = (costs.passes(Layout(), config, Batch(count, _TOKENS, count)) for count in (_FEW, _MANY))
    linear, experts, attention, memory = (
        (getattr(many, kind) - getattr(few, kind)) / (_MANY - _FEW)
        for kind in ("linear", "experts", "attention", "memory")
    )
    return memory / max(seconds - linear - experts - attention, memory)


def _passes() -> dict[str, float]:
    """Processor seconds of forward passes and updates on one rank."""
    seconds = {}
    for name, config in (("dense", _CONFIG), ("sparse", _SPARSE)):
        seconds[f"{name} few"] = _seconds(config, _FEW, _FEW)
        seconds[f"{name} apart"] = _seconds(config, _FEW, 1)
    seconds["update many"] = _seconds(_SPARSE, _MANY, _MANY, update=True)
    seconds["update packed"] = _seconds(_SPARSE, _MANY, _MANY, packing=True, update=True)
    seconds["update few"] = _seconds(_SPARSE, _FEW, _FEW, update=True)
    seconds["update apart"] = _seconds(_SPARSE, _FEW, 1, update=True)
    return seconds


def _split_passes() -> dict[str, float]:
    """Seconds of forward passes with tensor parallelism."""
    return {
        "few": _seconds(_SPARSE, _FEW, _FEW, tp=2),
        "apart": _seconds(_SPARSE, _FEW, 1, tp=2),
    }


def _seconds(
    config: dict[str, Any], sequences: int, together: int, *, tp: int = 1, packing: bool = False, update: bool = False
) -> float:
    """Measure the seconds of a forward pass or an update over sequences, some together in a micro-batch."""
    from engine3d.training.engine import TrainEngine

    layout = LayoutConfig(tp=tp)
    train = TrainConfig(layout=layout, dtype="float32", micro_batch_tokens=together * _TOKENS, packing=packing)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        initialise_random(model_spec(config), directory, seed=1, dtype=torch.float32)
        engine = TrainEngine(directory, train, layout.layout(tp), trainable=update)
    tokens = torch.arange(sequences * _TOKENS) % config["vocab_size"]
    batch = Sequences(tokens, torch.full((sequences,), _TOKENS))

    def operation() -> object:
        return engine.update(batch, _loss) if update else engine.logprobs(batch)

    try:
        return seconds_of(operation) if tp == 1 else seconds_together(operation)
    finally:
        engine.close()


def _loss(outputs: TokenOutputs, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    assert outputs.logprobs is not None
    loss = -outputs.logprobs.mean()
    return loss, loss.detach()
