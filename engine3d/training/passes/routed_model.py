"""A model whose tokens are routed by given routes, or whose routes are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine3d.collectives import all_gather
from engine3d.errors import UserError
from engine3d.models.experts.routes import RouteFormat, TokenRoutes
from engine3d.models.experts.routing_replay import RoutingReplay, encode
from engine3d.platform import platform
from engine3d.training.megatron.build import BuiltModel
from engine3d.training.passes.sequences import MicroBatch, Sequences

_GATHERED_TOKENS = 1 << 16
"""Tokens whose recorded routes pass between stages at a time."""


class RoutePass:
    """Routes of one pass. All ranks of the model make the same calls.

    Args:
        replay: tables of the model.
        batches: micro-batches of the pass, in host memory.
        lengths: (N,) int64 tokens of each of this data-parallel rank's sequences.
        routes: of these sequences; None without. The rank reads those of its own positions and layers.
        name: of a sequence by its number, for errors.
        slots: most micro-batches that are in flight on this rank.
        replays: True to route by them.
        records: True to record what the routers choose.
        groups: over which the positions of a micro-batch are sharded.
        keeps: True on the rank of these that keeps recorded routes.
        shards: tensor-parallel ranks that have a chunk of each micro-batch's positions; 1 where each has all.
        shard: this rank of them.

    Raises:
        UserError: routes of another model, or that are no routes.
    """

    def __init__(
        self,
        replay: RoutingReplay,
        batches: Sequence[MicroBatch],
        lengths: Tensor,
        routes: TokenRoutes | None,
        *,
        name: Callable[[int], str],
        slots: int,
        replays: bool,
        records: bool,
        groups: Sequence[dist.ProcessGroup] = (),
        keeps: bool = True,
        shards: int = 1,
        shard: int = 0,
    ) -> None:
        self._replay, self._routes, self._records = replay, routes, records
        self._groups, self._keeps = groups, keeps
        ends = lengths.cumsum(0)
        self._count = int(lengths.sum())
        self._tokens = [_tokens(batch, ends - lengths).chunk(shards, dim=1)[shard] for batch in batches]
        self._is_last = torch.zeros(self._count, dtype=torch.bool)
        self._is_last[ends - 1] = True
        if routes is not None:
            replay.check(routes, (tokens.flatten() for tokens in self._tokens), name)
        self._slots = min(slots, len(batches))
        self._slot_rows = max(tokens.numel() for tokens in self._tokens)
        self._recorded: dict[int, tuple[Tensor, Tensor]] = {}
        replay.begin(self._slots * self._slot_rows, given=routes is not None, replays=replays, records=records)

    def positions(self, number: int, sequences: Tensor) -> Tensor:
        """Write a micro-batch's routes into its rows. Return its positions as they pass through the model.

        Args:
            number: of the micro-batch.
            sequences: (b, s) int32 on the device: sequence of each position, of this tensor-parallel rank's chunk or of
                all that this context-parallel rank has.

        Returns:
            (b, s) int64: row and sequence of each position, see `routing_replay.encode`.
        """
        tokens, first = self._tokens[number], self._first_row(number)
        flat, device = tokens.flatten(), self._replay.device
        is_real = flat >= 0
        counted = is_real & ~self._is_last[flat]
        routes = None if self._routes is None else _moved(self._routes.read(flat, self._replay.columns), device)
        self._replay.put(first, routes, _moved(counted, device))
        rows = torch.arange(first, first + len(flat), device=device).view(tokens.shape)
        return encode(rows.repeat(1, sequences.shape[1] // tokens.shape[1]), sequences)

    def record(self, number: int) -> None:
        """Copy the routes of a micro-batch, which the model has just computed, to host memory."""
        if not self._records:
            return
        flat = self._tokens[number].flatten()
        tokens, device = _moved(flat, self._replay.device), self._replay.device
        rows = self._replay.recorded(self._first_row(number), len(flat)).view(torch.uint8)  # NCCL has no int16
        for group in self._groups:
            tokens, rows = (torch.cat(all_gather(tensor, group)) for tensor in (tokens, rows))
        if self._keeps:
            copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=device.type == "cuda") for t in (tokens, rows)]
            for copy, tensor in zip(copies, (tokens, rows), strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._recorded[number] = copies[0], copies[1]

    def collect(self, stages: dist.ProcessGroup) -> Tensor | None:
        """Gather the recorded routes of all layers on the last pipeline stage. A call of the ranks that keep them.

        Args:
            stages: group of the pipeline stages.

        Returns:
            (T, columns) routes, on the last stage alone.
        """
        platform.synchronize()
        replay, routes = self._replay, self._replay.routes
        width = len(replay.columns)
        recorded = torch.empty(self._count, width, dtype=routes.dtype)
        for tokens, rows in self._recorded.values():
            is_real = tokens >= 0
            recorded[tokens[is_real]] = rows.view(routes.dtype)[is_real]
        has_layer = torch.zeros(routes.columns, dtype=torch.uint8)
        has_layer[replay.columns] = 1
        columns = [mask.nonzero()[:, 0].cpu() for mask in all_gather(has_layer.to(replay.device), stages)]
        rank, last = dist.get_rank(stages), dist.get_world_size(stages) - 1
        result = routes.empty(self._count) if rank == last else None
        if result is not None:
            result[:, replay.columns] = recorded
        if last == 0:
            return result
        widest = max(map(len, columns))
        for start in range(0, self._count, _GATHERED_TOKENS):
            rows = torch.full((min(_GATHERED_TOKENS, self._count - start), widest), routes.missing, dtype=routes.dtype)
            rows[:, :width] = recorded[start : start + len(rows)]
            rows = rows.to(replay.device).view(torch.uint8)
            into = [torch.empty_like(rows) for _ in columns] if rank == last else None
            dist.gather(rows, into, group=stages, group_dst=last)
            for of_stage, stage_rows in zip(columns, into or (), strict=False):
                assert result is not None
                result[start : start + len(rows), of_stage] = stage_rows.cpu().view(routes.dtype)[:, : len(of_stage)]
        return result

    def _first_row(self, number: int) -> int:
        """First row of a micro-batch. Those in flight have rows of their own."""
        return number % self._slots * self._slot_rows


def _tokens(batch: MicroBatch, starts: Tensor) -> Tensor:
    """(b, s) int64: number of each position's token among those of the sequences; -1 for padding.

    Args:
        starts: (N,) first token of each sequence.
    """
    if not batch.indices:
        return torch.full_like(batch.position_ids, -1)
    first = starts[torch.tensor(batch.indices)][batch.sequences.long().clamp(min=0)]
    return (first + batch.position_ids).where(batch.sequences >= 0, -1)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    # A copy from other memory waits for all queued work.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class RoutedModel(BuiltModel):
    """A model with the routes of its passes. The arguments are those of `TrainEngine`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replay: RoutingReplay | None = None
        self._routes: RoutePass | None = None
        if self.spec.sizes.experts:
            from engine3d.models.experts.router import routing_replay

            numbering = self.spec.expert_numbering(self.layout)
            self._replay = routing_replay(self.module, RouteFormat.of(self.spec.sizes), numbering)

    @contextmanager
    def _routed(
        self,
        sequences: Sequences,
        batches: list[MicroBatch],
        *,
        records: bool = False,
        forward_only: bool = True,
    ) -> Iterator[None]:
        """Give a pass its routes, or record them.

        Args:
            sequences: of the pass, with their routes if there are any.
            batches: their micro-batches.
            records: True to record what routers choose.
            forward_only: False for a pass with gradients.

        Raises:
            UserError: routes of another model, or that are no routes.
        """
        if sequences.routes is None and not records:
            yield
            return
        if self._replay is None:
            raise UserError(f"routes: {self.spec.family.architecture} has no experts, expected no routes")
        from megatron.core import parallel_state

        sharded = self.megatron.sequence_parallel
        groups = [self._tp_group] if sharded else []
        if self.layout.cp > 1:
            groups.append(parallel_state.get_context_parallel_group())
        # A micro-batch is in flight from the first chunk's forward pass to its backward pass, or the last one's.
        in_flight = max(first for first, *_ in self.layout.in_flight(self.coordinates.pp))
        self._routes = RoutePass(
            self._replay,
            batches,
            sequences.lengths,
            sequences.routes,
            name=sequences.name,
            slots=self.layout.micro_batch_group if forward_only else in_flight,
            replays=self.config.routing_replay != "none",
            records=records,
            groups=groups,
            keeps=not (self.coordinates.tp or self.coordinates.cp),
            shards=self.layout.tp if sharded else 1,
            shard=self.coordinates.tp if sharded else 0,
        )
        try:
            yield
        finally:
            self._routes = None
            self._replay.end()

    def _collect_routes(self) -> Tensor | None:
        """(T, c) recorded routes on the last stage's first tensor- and context-parallel rank."""
        from megatron.core import parallel_state

        if self._routes is None or self.coordinates.tp or self.coordinates.cp:
            return None
        return self._routes.collect(parallel_state.get_pipeline_model_parallel_group())
