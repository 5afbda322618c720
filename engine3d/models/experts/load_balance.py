"""Losses of a model's routers, and the load of its experts, over the tokens of an update.

With T tokens in an update's sequences (prompts and last tokens included, padding not), E experts, k of them for each
token, and for token t the router's logits l_t and scores s_t (the softmax of the logits, or their sigmoid divided by
its sum), each layer of experts adds to the loss

    z:         coefficient * 1/T sum_t (log sum_i exp l_ti)^2
    sequence:  coefficient * sum_q T_q/T * E sum_i f_qi P_qi        over sequences q of T_q tokens
    update:    coefficient * E sum_i f_i P_i

where P_i is the mean of s_ti over the tokens of the sequence or of the update, and f_i the share of their k T choices
for expert i. The choices are the k highest scores, without the expert bias and without groups of experts.
Both balance losses are 1 where all experts are loaded alike.

Sources: z, Zoph et al. 2022, "ST-MoE", equation 5; sequence, DeepSeek-AI 2024, "DeepSeek-V3", equations 17 to 20, its
sequences weighted by their tokens; update, Fedus et al. 2022, "Switch Transformers", equations 4 to 6, over the batch
of an optimizer step, as Qiu et al. 2025, "Demons in the Detail", propose.

None of them depends on the layout, on micro-batches or on padding. f of the update must be known before the first
backward pass: `LoadBalance.counting` is a forward pass that counts it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine3d.collectives import all_reduce
from engine3d.models.experts.permutation import count_tokens

_SUMS = 3
"""Sums of a layer next to the load of its experts: the three losses, without their coefficients."""


@dataclass(frozen=True)
class RouterLosses:
    """Coefficients of the losses of every layer's router."""

    z: float = 0.0
    sequence: float = 0.0
    update: float = 0.0

    @property
    def any(self) -> bool:
        return bool(self.z or self.sequence or self.update)

    @staticmethod
    def of(config: Any) -> RouterLosses:
        """Read the coefficients of a TransformerConfig, in which balance losses are one or a list of them."""
        kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
        if isinstance(kinds, str):
            kinds, coefficients = [kinds], [coefficients]
        by_kind = dict(zip(kinds, coefficients, strict=True))
        return RouterLosses(
            z=config.moe_z_loss_coeff or 0.0,
            sequence=by_kind.get("seq_aux_loss", 0.0),
            update=by_kind.get("global_aux_loss", 0.0),
        )


@dataclass(frozen=True)
class Routing:
    """Statistics of the routers of all layers over the tokens of an update.

    Args:
        layers: numbers of the L layers that have experts, from 0.
        loads: L rows of E: tokens given to each expert, padding not counted. Experts are numbered as in files.
        biases: L rows of E: expert biases that these tokens were routed with; None for routers without.
        z, sequence, update: means over layers of the losses without their coefficients; None where those are 0.
    """

    layers: tuple[int, ...]
    loads: tuple[tuple[int, ...], ...]
    biases: tuple[tuple[float, ...], ...] | None = None
    z: float | None = None
    sequence: float | None = None
    update: float | None = None


class LoadBalance:
    """The losses and loads of the routers of one rank's pipeline stage; every rank of the model makes the same calls.

    Args:
        routers: of this rank's layers, `models.router.Router`s.
        losses: the coefficients.
        sparse: True for each layer of the complete model that has experts.
        experts: numbers of a layer's experts in HuggingFace files, in Megatron-Core's order.
        topk: experts of a token.
        biased: True for routers with an expert bias.
        device: where the routers compute.
        model_group: all ranks of the model.
        shard_group: the ranks that have shards of the same micro-batch.
    """

    def __init__(
        self,
        routers: Sequence[Any],
        losses: RouterLosses,
        *,
        sparse: Sequence[bool],
        experts: Sequence[int],
        topk: int,
        biased: bool,
        device: torch.device,
        model_group: dist.ProcessGroup,
        shard_group: dist.ProcessGroup,
    ) -> None:
        self.losses = losses
        self._routers = list(routers)
        self._layers = tuple(number for number, is_sparse in enumerate(sparse) if is_sparse)
        self._row = {number + 1: row for row, number in enumerate(self._layers)}  # Megatron-Core counts from 1
        self._experts, self._topk = len(experts), topk
        self._of_files = torch.tensor(experts).argsort()
        self._model_group, self._shard_group = model_group, shard_group
        # Loads and sums; biases, and the number of ranks that have them.
        self._columns = (len(experts), _SUMS, len(experts) + 1) if biased else (len(experts), _SUMS)
        self._seen = torch.zeros(len(self._layers), sum(self._columns), dtype=torch.float64, device=device)
        self._chosen = torch.zeros(len(self._layers), len(experts), dtype=torch.float64, device=device)
        self._tokens, self._sequences = 0.0, 0
        self._active = self._counting = False
        for router in self._routers:
            router.balance = self

    @property
    def is_recording(self) -> bool:
        """True while an update is computed, or its choices are counted."""
        return self._active or self._counting

    @contextlib.contextmanager
    def update(self, tokens: float, sequences: int) -> Iterator[None]:
        """Record an update's micro-batches in the block.

        Args:
            tokens: of the update on all ranks.
            sequences: the most of any of this rank's micro-batches.
        """
        self._tokens, self._sequences = tokens, sequences
        self._seen.zero_()
        self._active = True
        try:
            yield
        finally:
            self._active = False

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the chosen experts in a forward pass over the complete update, without gradients."""
        self._chosen.zero_()
        self._counting = True
        try:
            yield
        finally:
            self._counting = False
        all_reduce(self._chosen, dist.ReduceOp.SUM, self._model_group)

    def reset(self) -> None:
        """Reset the counts, because the micro-batches of this update, or of its forward pass, are computed again."""
        if self._active:
            self._seen.zero_()
        if self._counting:
            self._chosen.zero_()

    def route(
        self,
        layer: int,
        logits: Tensor,
        routing: Tensor,
        sequences: Tensor,
        scores: Callable[[], tuple[Tensor, Tensor]],
    ) -> Tensor | None:
        """Record the choices of a layer's router for a micro-batch.

        Args:
            layer: its number, from 1.
            logits: (t, E) of this rank's tokens.
            routing: (t, E) bool, the experts that each is given to.
            sequences: (t,) the number of each token's sequence in the micro-batch; -1 for padding.
            scores: gives (t, E) choices and (t, E) scores for balance losses.

        Returns:
            The layer's loss of these tokens, a term of the sum over all ranks and micro-batches; None without losses.
        """
        row = self._row[layer]
        if self._counting:
            count_tokens(scores()[0], sequences, self._chosen[row])
            return None
        if not torch.is_grad_enabled():
            return None  # the forward pass of layers that are computed again
        seen, sums = self._seen[row].split(self._columns)[:2]
        count_tokens(routing, sequences, seen)
        if not self.losses.any:
            return None
        real, terms = sequences >= 0, []
        if self.losses.z:
            z = logits.float().logsumexp(dim=-1).square().where(real, 0.0).sum() / self._tokens
            sums[0] += z.detach()
            terms.append(self.losses.z * z)
        if self.losses.sequence or self.losses.update:
            choices, values = scores()
            terms.append((values * self._weights(row, choices & real[:, None], values.detach(), sequences)).sum())
        return torch.stack(terms).sum()

    def _weights(self, row: int, choices: Tensor, values: Tensor, sequences: Tensor) -> Tensor:
        """(t, E) float32: factors of the scores in the sum of the balance losses.

        The backward pass keeps these and the scores alone.
        """
        scale = (sequences >= 0)[:, None] * (self._experts / self._tokens)
        weights = torch.zeros_like(values)
        for index, coefficient in ((1, self.losses.sequence), (2, self.losses.update)):
            if coefficient:
                shares = self._of_sequences(choices, sequences) if index == 1 else self._of_update(row)
                self._seen[row, self._experts + index] += (values * (scale * shares)).sum()
                weights += coefficient * scale * shares
        return weights

    def _of_sequences(self, choices: Tensor, sequences: Tensor) -> Tensor:
        """(t, E) float32: the share of the choices of each token's sequence that fell on each expert."""
        counts = torch.zeros(self._sequences + 1, self._experts, device=choices.device)  # padding's is the last row
        where = torch.where(sequences >= 0, sequences, self._sequences).long()
        counts.index_add_(0, where, choices.float())
        all_reduce(counts, dist.ReduceOp.SUM, self._shard_group)
        return (counts / counts.sum(dim=1, keepdim=True).clamp(min=1.0))[where]

    def _of_update(self, row: int) -> Tensor:
        """(E,) float32: the share of the choices of the update that fell on each expert."""
        counts = self._chosen[row]
        return (counts / counts.sum().clamp(min=1.0)).float()

    @torch.no_grad()
    def finish(self) -> Routing:
        """Sum the records of the update's micro-batches over ranks: one reduction, one copy to the host."""
        biased = len(self._columns) > 2
        for router in self._routers if biased else ():
            *_, biases = self._seen[self._row[router.layer_number]].split(self._columns)
            biases[:-1] = router.expert_bias
            biases[-1] = 1.0
        all_reduce(self._seen, dist.ReduceOp.SUM, self._model_group)
        loads, sums, *biases = self._seen.cpu().split(self._columns, dim=1)
        z, sequence, update = sums.mean(dim=0).tolist()
        return Routing(
            self._layers,
            self._rows(loads.long()),
            self._rows(biases[0][:, :-1] / biases[0][:, -1:]) if biased else None,
            z if self.losses.z else None,
            sequence if self.losses.sequence else None,
            update if self.losses.update else None,
        )

    def _rows(self, values: Tensor) -> tuple[tuple[Any, ...], ...]:
        """Return (L, E) values with experts numbered as in files."""
        return tuple(map(tuple, values[:, self._of_files].tolist()))

    @torch.no_grad()
    def move_biases(self, rate: float) -> None:
        """Move expert biases by the load of the finished update: auxiliary-loss-free load balancing.

        The bias of an expert below the mean load goes up by `rate`, others go down, as at the end of a step of
        DeepSeek-V3 (section 2.1.2). The bias takes part in the choice of experts, not in their weights.
        """
        for router in self._routers:
            loads = self._seen[self._row[router.layer_number], : self._experts]
            router.expert_bias += rate * torch.sign(loads.mean() - loads).to(router.expert_bias)
