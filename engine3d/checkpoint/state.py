"""State of one rank of a model: weights, moments, steps and random states.

The distributed optimizer cuts every buffer of parameters evenly over data-parallel ranks, wherever a parameter begins.
What a rank holds of a parameter is therefore a range of its elements in row-major order; `flat_chunks` says which
elements of the HuggingFace model they are, and so the state is the same whatever the layout.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from engine3d.models.files.weights import rank_parameters
from engine3d.models.rules import LocalParameter
from engine3d.training.optimizer import buffer_optimizers

if TYPE_CHECKING:
    from engine3d.training.engine import TrainEngine

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
COMMON_KEY = "common_state"
"""Key of what belongs to no tensor in dist_checkpointing: steps, and the layout that was saved."""
RANDOM_KEY = "random"
"""Every rank's random states."""
MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")


def key_of(kind: Kind, hf_name: str) -> str:
    """The name of a tensor in a checkpoint."""
    return f"{kind}/{hf_name}"


@dataclass
class ParameterShard:
    """Shard of one parameter on a rank: its elements [start, stop) as float32 master and moments, or all of it.

    Args:
        local: what the parameter is.
        parameter: in the model.
        start, stop: elements that this rank keeps; all of them where there is no optimizer.
        optimizer: Megatron-Core's, that owns them; None for buffers and for models that are not trained.
        where: `TrainEngine.where`: what is away from the device is read where it is.
    """

    local: LocalParameter
    parameter: Tensor
    start: int
    stop: int
    optimizer: Any
    where: Callable[[Tensor], Tensor]

    @property
    def main(self) -> Tensor:
        """(stop - start,) what the inner optimizer updates: the float32 master, or where it keeps that itself the
        model's own elements."""
        group, order = self.optimizer.model_param_group_index_map[self.parameter]
        main: Tensor = self.optimizer.optimizer.param_groups[group]["params"][order]
        return main.data

    @property
    def moments(self) -> dict[str, Tensor]:
        """The inner optimizer's tensors of this parameter; empty before its first step."""
        group, order = self.optimizer.model_param_group_index_map[self.parameter]
        main = self.optimizer.optimizer.param_groups[group]["params"][order]
        return self.optimizer.optimizer.state.get(main, {})  # type: ignore[no-any-return]

    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of state to save."""
        return ("weight", *MOMENTS) if self.optimizer is not None and self.moments else ("weight",)

    def dtype(self, kind: Kind) -> torch.dtype:
        """Dtype of what `read` returns."""
        if self.optimizer is None:
            return self.parameter.dtype
        return torch.float32 if kind == "weight" else self.moments[kind].dtype

    def read(self, kind: Kind, offset: int, length: int) -> Tensor:
        """(length,) elements from `offset` of the shard. A view where memory holds them as they are."""
        elements = slice(offset, offset + length)
        if self.optimizer is None:
            return self.where(self.parameter.detach()).view(-1)[elements]
        if kind != "weight":
            return self.where(self.moments[kind]).view(-1)[elements]
        master = self.moments.get("master_param")
        if master is None:
            return self.where(self.main).view(-1)[elements].float()
        if master.dtype == torch.int16:
            values = self.where(self.main).view(-1)[elements]
            lower = self.where(master).view(-1)[elements]  # may be in host memory
            return join_remainder(values, lower.to(values.device))
        return self.where(master).view(-1)[elements]

    def weight_tensors(self) -> tuple[Tensor, ...]:
        """(stop - start,) tensors that the weight is kept in, as they lie: one, or Transformer Engine's two halves."""
        if self.optimizer is None:
            return (self.where(self.parameter.detach()).view(-1),)
        master = self.moments.get("master_param")
        kept = [self.main] if master is None else [master]
        if master is not None and master.dtype == torch.int16:
            kept.insert(0, self.main)
        return tuple(self.where(tensor).view(-1) for tensor in kept)

    def target(self, kind: Kind) -> Tensor:
        """(stop - start,) where a loaded kind goes; to be followed by `accept` once it is filled."""
        if self.optimizer is None:
            return self.parameter.detach().view(-1)
        if kind != "weight":
            return self.moments[kind].view(-1)
        master = self.moments.get("master_param", self.main)
        if master.dtype == torch.float32:
            return master.view(-1)
        return torch.empty(self.stop - self.start, dtype=torch.float32, device=self.main.device)

    def accept(self, weight: Tensor) -> None:
        """Bring the model's own elements, and what else is kept of them, to a loaded master weight."""
        if self.optimizer is None:
            return
        values = self.parameter.detach().view(-1)[self.start : self.stop]
        master = self.moments.get("master_param")
        if master is not None and master.dtype == torch.int16:
            high, low = split_remainder(weight)
            values.copy_(high)
            master.view(-1).copy_(low)
        else:
            values.copy_(weight)  # in float32 the master is the model's own elements


def allocate_moments(inner: Any, main: Tensor, *, step: int) -> None:
    """Allocate a parameter's moments in one of PyTorch's optimizers."""
    if hasattr(inner, "initialize_state"):  # Transformer Engine's FusedAdam counts steps in the group
        inner.initialize_state(main, inner.store_param_remainders and main.dtype == torch.bfloat16)
    else:
        inner.state[main] = {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.zeros_like(main),
            "exp_avg_sq": torch.zeros_like(main),
        }


def join_remainder(high: Tensor, low: Tensor) -> Tensor:
    """float32 numbers from Transformer Engine's two halves: bfloat16, rounded to nearest, and the lower 16 bits.

    Rounding up shows as a negative lower half (`multi_tensor/adam.cu`, parameter remainders).
    """
    upper = high.view(torch.int16).int() - (low < 0).int()
    return ((upper << 16) | (low.int() & 0xFFFF)).view(torch.float32)


def split_remainder(full: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `join_remainder`: bfloat16 and int16."""
    bits = full.contiguous().view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int32)
    low = torch.where(low >= 1 << 15, low - (1 << 16), low).to(torch.int16)
    upper = ((bits >> 16) + (low < 0).int()).to(torch.int16)
    return upper.view(torch.bfloat16), low


def parameter_shards(engine: TrainEngine) -> list[ParameterShard]:
    """Everything that this rank holds, in the order of the model's rules."""
    owners: dict[Tensor, Any] = {}
    for optimizer in _optimizers(engine):
        owners |= dict.fromkeys(optimizer.model_param_gbuf_map, optimizer)
    shards = []
    for local, parameter in rank_parameters(engine.weighted, engine.trained, engine.layout, engine.coordinates):
        optimizer = owners.get(parameter)
        if optimizer is not None:
            owned = optimizer._get_model_param_range_map(parameter)["param"]
            shards.append(ParameterShard(local, parameter, owned.start, owned.end, optimizer, engine.where))
        elif local.buffer or engine.optimizer is None:
            shards.append(ParameterShard(local, parameter, 0, parameter.numel(), None, engine.where))
    return shards


def writes(shard: ParameterShard) -> bool:
    """True if this rank, of all that hold the same elements, saves them."""
    return shard.local.primary if shard.optimizer is not None else shard.local.owner


def _optimizers(engine: TrainEngine) -> Iterator[Any]:
    return chain.from_iterable(map(buffer_optimizers, engine.optimizers))


def optimizer_step(engine: TrainEngine) -> int:
    """Steps that this rank's optimizer has made since it was started; 0 where it holds nothing."""
    steps = [0]
    for optimizer in _optimizers(engine):
        inner = optimizer.optimizer
        steps += [int(group["step"]) for group in inner.param_groups if "step" in group]
        steps += [int(state["step"]) for state in inner.state.values() if "step" in state]
    return max(steps)


def set_optimizer_step(engine: TrainEngine, step: int) -> None:
    """Set the step of Transformer Engine's optimizers, which count it in the group."""
    for optimizer in _optimizers(engine):
        if hasattr(optimizer.optimizer, "initialize_state"):
            for group in optimizer.optimizer.param_groups:
                group["step"] = step


def random_states() -> dict[str, Any]:
    """All random states of this process that training may draw from."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    _, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the states that `random_states` returned."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    random.setstate(states["python"])
    keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    get_cuda_rng_tracker().set_states(states["tracker"])
