"""Parallel sizes of engines: Algorithm 2 of the HybridFlow paper (arXiv 2409.19256), for the rollout role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine3d.errors import UserError, amount
from engine3d.layout import Layout
from engine3d.memory.overhead import CONTEXT_BYTES, DRIVER_BYTES, engine_workspace
from engine3d.models import ModelSpec
from hybridflow.planning.time.generation import EngineShape, GenerationModel, RolloutCost
from hybridflow.planning.time.hardware import Hardware
from hybridflow.planning.time.phases import rollout_costs
from hybridflow.planning.time.transfer import shared_share
from hybridflow.planning.time.workload import Workload

ENGINE_SHARE = 0.9
"""Share of a GPU's memory that weights, KV cache and workspace of an engine may take."""

_MOST_TP = 64
_GRAPHS = 32
"""CUDA graphs of decoding that an engine of many requests captures."""
_LEAST_TOGETHER = 4
"""Requests of the longest sequence that a KV cache must hold."""


@dataclass(frozen=True)
class EngineChoice:
    """Engines that fit.

    Args:
        shape: of each.
        cost: of a rollout.
        stream: seconds of a rollout without its tail.
        cache_tokens: of the KV cache of each engine.
        weights: bytes of a rank's weights, without those that it shares with the actor.
        cache: bytes of a rank's KV cache.
        workspace: bytes of a rank next to these, without the driver's.
    """

    shape: EngineShape
    cost: RolloutCost
    stream: float
    cache_tokens: int
    weights: int
    cache: int
    workspace: int


class EngineSearch:
    """Engines of a model on some GPUs.

    Searched are tp, with experts cut over all of an engine's ranks or as tensors, and data parallelism of attention.

    Args:
        work: of a step.
        hardware: of every rank.
        base: features of the engines that stay as they are.
        attention_dp: it may be above 1.
        beside: layout of an actor on the same GPUs, whose weights engines may share; None without.
        expert_parallel: only engines whose tp and ep are this; any if None.
        only: the only engines; any if None.
    """

    def __init__(
        self,
        work: Workload,
        hardware: Hardware,
        base: EngineShape,
        *,
        attention_dp: bool = True,
        beside: Layout | None = None,
        expert_parallel: int | None = None,
        only: EngineShape | None = None,
    ) -> None:
        self._work = work
        self._hardware = hardware
        self._base = base
        self._attention_dp = attention_dp
        self._beside = beside
        self._expert_parallel = expert_parallel
        self._only = only
        self._model = GenerationModel(work.actor.spec, hardware)

    def best(self, gpus: int, beside: int = 0, *, stream: bool = False) -> EngineChoice:
        """Choose the fastest engines.

        Args:
            gpus: of all engines.
            beside: bytes of each GPU that others have while the engines generate.
            stream: the seconds of a stream decide.

        Raises:
            UserError: none fits.
        """
        choices = [self.fitted(shape, beside) for shape in self.shapes(gpus)]
        fitting = [choice for choice in choices if choice is not None]
        if not fitting:
            least = min(
                (self._model.weights(shape) for shape in self.shapes(gpus)), default=self._model.weights(self._base)
            )
            raise UserError(
                f"{gpus} GPUs of {amount(self._hardware.memory, 1)} for engines: no engine fits (its weights take at "
                f"least {amount(round(least), 1)} of each, next to {amount(beside, 1)} of others and a KV cache for "
                f"sequences of {self._work.longest_sequence:,} tokens); expected more or larger GPUs"
            )
        return min(fitting, key=lambda choice: choice.stream if stream else choice.cost.seconds)

    def least_seconds(self, gpus: int, *, stream: bool = False) -> float | None:
        """Predict the seconds of the fastest engines if their memory had no end; None if none has these ranks."""
        return min((self._unbounded_seconds(shape, stream) for shape in self.shapes(gpus)), default=None)

    def _unbounded_seconds(self, shape: EngineShape, stream: bool) -> float:
        cost, of_stream = rollout_costs(self._work, self._hardware, shape, shape.requests * self._work.longest_sequence)
        return min(cost.seconds, of_stream) if stream else cost.seconds

    def shapes(self, gpus: int) -> Iterator[EngineShape]:
        """Yield the engines that fill some GPUs, each with a prompt at least."""
        sizes = self._work.actor.spec.sizes
        if self._only is not None:
            if self._expert_parallel in (None, self._only.ep):
                yield self._only
            return
        tp = 1
        while tp <= min(gpus, _MOST_TP):
            if gpus % tp == 0 and _divides(self._work.actor.spec, tp) and gpus // tp <= self._work.prompts:
                for ep in {1, tp} if sizes.experts and sizes.experts % tp == 0 else {1}:
                    if self._expert_parallel not in (None, ep):
                        continue
                    for attention_dp in {1, tp} if self._attention_dp else {1}:
                        yield self._shape(tp, ep, attention_dp, gpus // tp)
            tp *= 2

    def _shape(self, tp: int, ep: int, attention_dp: int, engines: int) -> EngineShape:
        base, work = self._base, self._work
        requests = -(-work.prompts // engines) * work.samples
        if base.cascade:
            requests = min(requests, 1024 * attention_dp)
        return replace(
            base,
            tp=tp,
            ep=ep,
            attention_dp=attention_dp,
            engines=engines,
            requests=min(requests, 4096),
            peers=base.peers and attention_dp > 1,
            local_experts_only=base.local_experts_only and ep > 1,
        )

    def fitted(self, shape: EngineShape, beside: int) -> EngineChoice | None:
        """Return engines with their KV cache and cost; None where they do not fit next to others."""
        work, spec = self._work, self._work.actor.spec
        weights = round(self._model.weights(shape))
        if self._beside is not None:
            weights = round(weights * (1 - shared_share(spec, self._beside, shape)))
        workspace = CONTEXT_BYTES + engine_workspace(
            requests=-(-shape.requests // shape.attention_dp),
            vocabulary=spec.vocab_size,
            layers=spec.sizes.layers,
            graphs=_GRAPHS,
            tp=shape.tp,
        )
        left = ENGINE_SHARE * self._hardware.memory - DRIVER_BYTES - beside - weights - workspace
        of_token = self._model.cache_of_a_token(shape)
        needed = shape.requests * work.longest_sequence
        tokens = min(needed, int(max(0.0, left) // of_token) * shape.attention_dp)
        if tokens < min(needed, _LEAST_TOGETHER * shape.attention_dp * work.longest_sequence):
            return None
        cost, stream = rollout_costs(work, self._hardware, shape, tokens)
        cache = of_token * tokens // shape.attention_dp
        return EngineChoice(shape, cost, stream, tokens, weights, cache, workspace)


def _divides(spec: ModelSpec, tp: int) -> bool:
    sizes = spec.sizes
    return sizes.heads % tp == 0 and (sizes.groups % tp == 0 or tp % sizes.groups == 0) and sizes.vocabulary % tp == 0
