"""Seconds and bytes of a weight transfer from the trainer to the engines.

Every engine's rank takes its weights once, from ranks that share the load evenly (`engine3d/reshard/plan/planner.py`).
A transfer takes as long as the busier of a sending and a receiving rank needs over its link:

    max(bytes of an engine's rank, bytes of all engines / ranks of the trainer) / (rate x share) + start

On the trainer's GPUs weights whose bytes are the same are shared and do not move. `benchmarks/reshard_plan.py` counts
the bytes of a plan exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine3d.dtypes import ITEMSIZES
from engine3d.layout import Layout
from engine3d.models import ModelSpec
from hybridflow.planning.time.generation import EngineShape, GenerationModel
from hybridflow.planning.time.hardware import Hardware

_LOCAL_RATE = 0.45
"""Rate of a copy within a GPU over that at which its kernels read or write (copy-rates/h200-x4.json)."""


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Cost of a transfer.

    Args:
        nbytes: that move, over all ranks.
        busiest: bytes of the busiest rank.
        network: True if they cross nodes.
        seconds: of the transfer.
    """

    nbytes: float
    busiest: float
    network: bool
    seconds: float


def transfer_cost(
    spec: ModelSpec, hardware: Hardware, layout: Layout, engines: EngineShape, *, colocated: bool, shared: bool = True
) -> TransferCost:
    """Predict the cost of a transfer.

    Args:
        spec: the model.
        hardware: of every rank.
        layout: of the trainer.
        engines: that take the weights.
        colocated: the engines are on the trainer's GPUs.
        shared: they may share its memory there (`rollout.weights.share`).
    """
    of_rank = GenerationModel(spec, hardware).weights(engines)
    if engines.fp8:
        shared = False
    if colocated:
        of_rank *= 1 - shared_share(spec, layout, engines) if shared else 1.0
    sent = of_rank * engines.ranks / layout.world_size
    busiest = max(of_rank, sent)
    ranks = layout.world_size if colocated else layout.world_size + engines.ranks
    across = ranks > hardware.gpus_per_node and not (colocated and layout.stage_size <= hardware.gpus_per_node)
    rate = hardware.network_rate if across else hardware.node_rate
    if colocated and layout.world_size == 1:
        rate = hardware.memory_rate * _LOCAL_RATE
    seconds = hardware.transfer_s + busiest / (rate * hardware.transfer_share)
    return TransferCost(of_rank * engines.ranks, busiest, across, seconds)


def shared_share(spec: ModelSpec, layout: Layout, engines: EngineShape) -> float:
    """Compute the share of an engine rank's weights that are in the memory of the trainer's rank on its GPU.

    Matrices of experts have the same bytes in both where both cut experts alike. Those of attention are laid out
    otherwise (`docs/weights.md`), the table of tokens is not where tp differs.
    """
    sizes = spec.sizes
    experts = sum(sizes.sparse) * sizes.experts * 3 * sizes.hidden * sizes.expert_ffn
    total = spec.parameter_count()
    dense = (total - experts) / engines.attention_tp
    local = dense + experts / engines.tp
    same = 0.0
    if layout.pp == 1 and layout.etp == 1 and layout.ep == engines.ep == engines.tp:
        same += experts / engines.tp
    if layout.pp == 1 and layout.tp == engines.attention_tp:
        same += dense * _DENSE_SHARED
    return same / local if local else 0.0


_DENSE_SHARED = 0.7
"""Share of dense weights that a colocated engine of the same tp shares (bytes moved in h200-4gpu-30b and memory/*)."""


def weight_bytes(spec: ModelSpec, dtype: str) -> int:
    """Count the bytes of a model's weights."""
    return spec.parameter_count() * ITEMSIZES[dtype]
