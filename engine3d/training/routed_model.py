"""A model whose tokens are routed by given routes, or whose routes are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from engine3d.errors import UserError
from engine3d.models.experts.routes import RouteFormat
from engine3d.models.experts.routing_replay import RoutingReplay
from engine3d.training.build import BuiltModel
from engine3d.training.route_pass import RoutePass
from engine3d.training.sequences import MicroBatch, Sequences


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
