"""Linear layers with adapters: of Megatron-Core, of Transformer Engine, and its grouped ones of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import Module, Parameter

from engine3d.models.experts.fused_experts import Weights
from engine3d.models.experts.grouped_gemm import are_adjacent, grouped_linear, stacked_view
from engine3d.models.lora.spec import module_name, weight_name
from engine3d.models.rules import LocalParameter
from engine3d.platform import platform


class Switch(Protocol):
    """State that all adapters of a model share."""

    enabled: bool
    """True if adapters add to the outputs of their layers."""

    @property
    def scale(self) -> float:
        """Factor of their outputs."""


class AdaptedLinear:
    """A linear layer with its adapter. The layer itself computes as it does without.

    Args:
        switch: of the model's adapters.
        linear: the layer.
        first: A of the layer, or of each of its experts.
        second: B likewise.

    Attributes:
        rows: ranges of B's rows (adapter, start, stop); None for the adapter of rows without one.
        group: ranks that the layer is cut over.
        partial: complete tensors of which each rank's gradient is a summand.
        pairs: A and B of the layer, or of each of its experts.
        weights: of the layer, as many.
    """

    def __init__(
        self, switch: Switch, linear: Any, first: Sequence[LocalParameter], second: Sequence[LocalParameter]
    ) -> None:
        self.switch, self.linear = switch, linear
        self.group = linear._tp_group if hasattr(linear, "_tp_group") else linear.tp_group
        self._cut = _cut(linear)
        ranks, explicit = self.group.size(), getattr(linear, "explicit_expert_comm", False)
        # Transformer Engine's layer that is not cut has no such attribute, and its ranks see parts of a sequence too.
        self._sequence = bool(linear.config.sequence_parallel if self._cut is None else linear.sequence_parallel)
        # The dispatcher of tokens gathers inputs and sums outputs of experts, as it does around the layer.
        self._split = ranks > 1 and self._cut is not None and not explicit
        self.weights = [getattr(linear, weight_name(local.name).rpartition(".")[2]) for local in first]
        # The last expert first, so that experts ascend in memory (`models.transformer_engine_modules`).
        a = [self._register(local, 1 if self._cut == "columns" else None) for local in reversed(first)]
        b = [self._register(local, 0 if self._cut == "rows" else None) for local in reversed(second)]
        self.pairs = list(zip(reversed(a), reversed(b), strict=True))
        partial: list[Tensor] = {"rows": a, "columns": b, None: a + b}[self._cut]
        self.partial = partial if ranks > 1 and (self._sequence or explicit) else []
        # Without it where all rows belong to one adapter, as they always do where inputs are cut.
        owners = _owners(first[0], second[0])
        self._mask = owners.to(self.weights[0]) if owners.shape[1] > 1 or not bool(owners.all()) else None
        self.rows = _rows(owners)
        self._norm = _norm(linear)
        linear.register_forward_hook(self._add)

    def _register(self, local: LocalParameter, cut: int | None) -> Tensor:
        """Give the layer a parameter. `cut`: the dimension that is cut over ranks."""
        weight = self.weights[0]
        parameter: Any = Parameter(torch.zeros(local.shape, dtype=weight.dtype, device=weight.device))
        parameter.allreduce = getattr(weight, "allreduce", True)
        # By it Megatron-Core counts a tensor once in the norm of gradients.
        parameter.tensor_model_parallel = cut is not None or self.group.size() == 1
        parameter.partition_dim = -1 if cut is None else cut
        parameter.partition_stride = 1
        # Transformer Engine's own `register_parameter` notes how to initialise it.
        Module.register_parameter(self.linear, _last(local), parameter)
        return parameter  # type: ignore[no-any-return]

    def _add(self, linear: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
        """Add the adapter's output, in the parallel state of the layer's."""
        if not self.switch.enabled:
            return None
        return outputs[0] + self.switch.scale * self.output(*inputs), outputs[1]

    def output(self, x: Tensor) -> Tensor:
        """Compute B A x."""
        [(a, b)] = self.pairs
        latent = F.linear(x if self._norm is None else self._norm(x), a)
        if self._split and self._cut == "rows":
            if self._sequence:
                latent = gather_from_sequence_parallel_region(latent, group=self.group)
            else:
                latent = copy_to_tensor_model_parallel_region(latent, group=self.group)
        elif self._split:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self._sequence
                else reduce_from_tensor_model_parallel_region
            )
            latent = reduce(latent, group=self.group)
        return F.linear(latent, self.masked(b))

    def masked(self, b: Tensor) -> Tensor:
        """B, (out, adapters * rank): each row has its elements in the columns of its adapter."""
        if self._mask is None:
            return b
        return (b[:, None, :] * self._mask[:, :, None]).flatten(1)

    def product(self, number: int) -> Tensor:
        """B A of one of the weights, in float32 and of its shape."""
        a, b = self.pairs[number]
        return self.masked(b).detach().float() @ a.detach().float()


class AdaptedExperts(AdaptedLinear):
    """A grouped linear layer of experts, each with its adapter."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._blocks: set[tuple[object, ...]] = set()

    def output(self, x: Tensor, counts: list[int]) -> Tensor:  # type: ignore[override]
        """Compute B A x of each token (tokens, in) by the adapter of its expert, of which each has `counts`."""
        a, b = (self._together(list(tensors), x.dtype) for tensors in zip(*self.pairs, strict=True))
        if a is None or b is None:
            by_expert = zip(x.split(counts), self.pairs, strict=True)
            return torch.cat([F.linear(F.linear(tokens, a), self.masked(b)) for tokens, (a, b) in by_expert])
        latent = grouped_linear(x, counts, a.values, a.gradients, a.parameter)
        outputs, rank = [], b.values.shape[2]
        for adapter, start, stop in self.rows:
            if adapter is None:
                outputs.append(x.new_zeros(len(x), stop - start))
                continue
            tokens = latent[:, adapter * rank : (adapter + 1) * rank].contiguous()
            gradients = None if b.gradients is None else b.gradients[:, start:stop]
            outputs.append(grouped_linear(tokens, counts, b.values[:, start:stop], gradients, b.parameter))
        return torch.cat(outputs, dim=1)

    def _together(self, tensors: list[Tensor], dtype: torch.dtype) -> Weights | None:
        """A or B of all experts as one tensor; None where they are not adjacent in memory, or no kernel takes them."""
        first: Any = tensors[0]
        gradients: Any = [getattr(end, "main_grad", None) for end in (first, tensors[-1])]
        trained = torch.is_grad_enabled()
        if trained and gradients[0] is None:
            return None
        # Addresses that were checked to be one block: a check of each expert takes as long as some kernels.
        addresses = (dtype, *(end.data_ptr() for end in (first, tensors[-1], *(gradients if trained else ()))))
        if addresses not in self._blocks:
            kernel = getattr(self.linear, "has_kernel", None)
            if kernel is None or not kernel(dtype, first) or not are_adjacent(tensors):
                return None
            if trained and not are_adjacent([getattr(tensor, "main_grad") for tensor in tensors]):  # noqa: B009
                return None
            self._blocks.add(addresses)
        return Weights(
            stacked_view(first, len(tensors)),
            stacked_view(gradients[0], len(tensors)) if trained else None,
            first,
        )


def _last(local: LocalParameter) -> str:
    return local.name.rpartition(".")[2]


def _cut(linear: Any) -> Literal["rows", "columns"] | None:
    """Dimension of a layer's weight that is cut over its ranks, if any."""
    by_rows: tuple[type, ...] = (ColumnParallelLinear,)
    by_columns: tuple[type, ...] = (RowParallelLinear,)
    if platform.has_transformer_engine:
        from engine3d.models.transformer_engine_modules import COLUMN_PARALLEL, ROW_PARALLEL

        by_rows, by_columns = by_rows + COLUMN_PARALLEL, by_columns + ROW_PARALLEL
    return "rows" if isinstance(linear, by_rows) else "columns" if isinstance(linear, by_columns) else None


def _norm(linear: Any) -> Callable[[Tensor], Tensor] | None:
    """The norm that a layer of Transformer Engine begins with, which its output does not show."""
    if not hasattr(linear, "layer_norm_weight"):
        return None
    from engine3d.models.transformer_engine_modules import rms_norm

    return lambda x: rms_norm(x, linear.layer_norm_weight, linear.eps)


def _owners(first: LocalParameter, second: LocalParameter) -> Tensor:
    """(rows of B, adapters): 1 where the row belongs to the adapter."""
    order = {module_name(region.hf_name): number for number, region in enumerate(first.slices)}
    owners = torch.zeros(second.shape[0], len(order))
    for region in second.slices:
        start, stop = region.local_box[0]
        owners[start:stop, order[module_name(region.hf_name)]] = 1
    return owners


def _rows(owners: Tensor) -> list[tuple[int | None, int, int]]:
    """Ranges of rows (adapter, start, stop) of `_owners`."""
    numbers = torch.where(owners.any(1), owners.argmax(1), -1).tolist()
    ranges, start = [], 0
    for adapter, rows in groupby(numbers):
        stop = start + len(list(rows))
        ranges.append((None if adapter < 0 else adapter, start, stop))
        start = stop
    return ranges
