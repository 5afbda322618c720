"""Routing replay: tokens are given to the experts that another forward pass gave them to.

The weights of a token's experts are of the live router's logits, so that the router has a gradient. Where a layer's
route of a token is missing, the live router chooses.

Each position of a micro-batch has a row in tables on the device. Its number passes through the model together with the
number of the position's sequence (`encode`). A layer so reads the row of the position that it computes, whichever
micro-batches are in flight and however often the layer is computed. Megatron-Core's `RouterReplay` has one list of
routes for all models of a process, and takes them in the order of forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine3d.collectives import all_reduce
from engine3d.models.experts.routes import RouteFormat, TokenRoutes

_ROW_SHIFT = 32
_SEQUENCE_MASK = (1 << _ROW_SHIFT) - 1


def encode(rows: Tensor, sequences: Tensor) -> Tensor:
    """Join numbers of rows and of sequences (from -1) in one int64 each."""
    return (rows.long() << _ROW_SHIFT) | (sequences.long() + 1)


def decode(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows, int64, and the sequences, int32, that `encode` joined."""
    return positions >> _ROW_SHIFT, ((positions & _SEQUENCE_MASK) - 1).int()


@dataclass(frozen=True)
class ReplayStats:
    """Comparison of an update's routes with what its live routers chose.

    Args:
        decisions: tokens with a token after them, times layers with experts.
        missing: decisions without a complete route.
        different: decisions with a route whose experts are not those that the live router chose.
    """

    decisions: int
    missing: int
    different: int


class RoutingReplay:
    """Routes of the layers of one rank, of the micro-batches in flight.

    Args:
        routes: format of the model's routes.
        layers: of this rank that have experts, numbered from 0 in the complete model, ascending.
        hf_experts: number in the HuggingFace model of each of Megatron's experts.
        device: where the routers compute.
        model_group: all ranks of the model.
    """

    def __init__(
        self,
        routes: RouteFormat,
        layers: Sequence[int],
        hf_experts: Sequence[int],
        *,
        device: torch.device,
        model_group: dist.ProcessGroup,
    ) -> None:
        self.routes, self.layers, self.device = routes, tuple(layers), device
        numbers = [routes.layers.index(layer) for layer in self.layers]
        self.columns = torch.tensor(
            [number * routes.topk + index for number in numbers for index in range(routes.topk)], dtype=torch.int64
        )
        """(c,) int64: columns of this rank's layers among those of the model."""
        self._hf_experts = self._experts = None
        if list(hf_experts) != list(range(routes.experts)):
            self._hf_experts = torch.tensor(hf_experts, device=device)
            self._experts = self._hf_experts.argsort()
        self._model_group = model_group
        self._given: Tensor | None = None
        self._recorded: Tensor | None = None
        self._counted = torch.zeros(0, dtype=torch.bool, device=device)
        self._counts = torch.zeros(len(self.layers), 3, dtype=torch.int64, device=device)
        self._replays = False

    def check(self, routes: TokenRoutes, batches: Iterable[Tensor], name: Callable[[int], str]) -> None:
        """Refuse routes that are not of this model's format, in this rank's layers.

        Args:
            routes: of sequences.
            batches: (n,) int64 numbers of tokens, -1 for none: those that this rank computes.
            name: of a sequence by its number, for errors.

        Raises:
            UserError: names the sequence.
        """

        def locate(tokens: Tensor, row: int) -> tuple[str, int]:
            sequence, token = routes.locate(int(tokens[row]))
            return name(sequence), token

        for sequence, rows in enumerate(routes.samples):
            self.routes.check_shape(rows.shape, getattr(torch, rows.dtype.name), name(sequence))
        of_rank = replace(self.routes, layers=self.layers)
        for tokens in batches:
            of_rank.check_entries(routes.read(tokens, self.columns), partial(locate, tokens))

    @property
    def is_active(self) -> bool:
        """True while routes are replayed, compared or recorded."""
        return self._given is not None or self._recorded is not None

    def begin(self, rows: int, *, given: bool, replays: bool, records: bool) -> None:
        """Allocate tables for a pass.

        Args:
            rows: of the tables.
            given: True if the pass has routes.
            replays: True to route by them; else they are compared with what the routers choose.
            records: True to record what the routers choose.
        """
        shape, dtype = (rows, len(self.columns)), self.routes.dtype
        self._given = torch.full(shape, self.routes.missing, dtype=dtype, device=self.device) if given else None
        self._recorded = torch.empty(shape, dtype=dtype, device=self.device) if records else None
        self._counted = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self._replays = replays
        self.reset()

    def end(self) -> None:
        """Free the tables. The counts stay."""
        self._given = self._recorded = None
        self._counted = self._counted.new_zeros(0)

    def reset(self) -> None:
        """Reset the counts, because the micro-batches of the pass are computed again."""
        self._counts.zero_()

    def put(self, first: int, routes: Tensor | None, counted: Tensor) -> None:
        """Write the rows of a micro-batch.

        Args:
            first: number of its first row.
            routes: (n, c) routes of its positions; None where there are none.
            counted: (n,) bool: positions whose decisions are counted.
        """
        rows = slice(first, first + len(counted))
        self._counted[rows] = counted
        if self._given is not None and routes is not None:
            self._given[rows] = routes

    def recorded(self, first: int, count: int) -> Tensor:
        """(count, c) recorded routes, from row `first` on."""
        assert self._recorded is not None
        return self._recorded[first : first + count]

    @torch.no_grad()
    def choose(self, layer: int, rows: Tensor, live: Tensor, *, counts: bool) -> Tensor:
        """Choose the experts of a layer's tokens.

        Args:
            layer: its number, from 0.
            rows: (t,) int64 row of each token.
            live: (t, k) int64 experts that the router chose, in Megatron's numbering.
            counts: True to count the decisions.

        Returns:
            (t, k) int64: `live` itself where nothing is replayed.
        """
        number = self.layers.index(layer)
        columns = slice(number * self.routes.topk, (number + 1) * self.routes.topk)
        if self._recorded is not None:
            recorded = live if self._hf_experts is None else self._hf_experts[live]
            self._recorded[:, columns][rows] = recorded.to(self.routes.dtype)
        if self._given is None:
            return live
        given = self._given[:, columns][rows].long()
        known = ((given >= 0) & (given < self.routes.experts)).all(dim=1)
        if self._experts is not None:
            given = self._experts[given.clamp(0, self.routes.experts - 1)]
        different = known & ~(given[:, :, None] == live[:, None, :]).any(dim=2).all(dim=1)
        if counts:
            counted = self._counted[rows]
            decisions = (counted, counted & ~known, counted & different)
            self._counts[number] += torch.stack([mask.sum() for mask in decisions])
        return torch.where(different[:, None], given, live) if self._replays else live

    def finish(self) -> ReplayStats:
        """Sum the counts of the pass over ranks."""
        counts = self._counts.sum(dim=0)
        all_reduce(counts, dist.ReduceOp.SUM, self._model_group)
        return ReplayStats(*map(int, counts.tolist()))


class LayerReplay:
    """The routes of one layer, in place of Megatron-Core's `RouterReplay`.

    Args:
        replay: of the model.
        router: of the layer.
    """

    def __init__(self, replay: RoutingReplay, router: Any) -> None:
        self._replay, self._router = replay, router

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers, (t, k) each, of the experts of each token. `scores`: (t, E)."""
        values, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._router.rows is None or not self._replay.is_active:
            return values, live
        rows = self._router.rows.transpose(0, 1).reshape(-1)
        # Without gradients it may be the forward pass of a layer that is computed again, which must not count twice.
        counts = torch.is_grad_enabled()
        experts = self._replay.choose(self._router.layer_number - 1, rows, live, counts=counts)
        return (values, live) if experts is live else (scores.gather(1, experts), experts)
