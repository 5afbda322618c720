"""Parallel sizes of engines: Algorithm 2 of the HybridFlow paper (arXiv 2409.19256), for the rollout role."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from engine3d.dtypes import ITEMSIZES
from engine3d.errors import UserError, amount
from engine3d.layout import Layout
from engine3d.memory.overhead import device_overhead, engine_overhead
from engine3d.memory.serving import PREFIX_TOKENS, prefix_of_a_token, prompt_of_a_token, prompt_tokens
from engine3d.models import ModelSpec
from engine3d.rollout.config import RolloutConfig
from hybridflow.planning.memory.device import rank_workspace
from hybridflow.planning.time.generation import EngineShape, GenerationModel, RolloutCost
from hybridflow.planning.time.hardware import Hardware
from hybridflow.planning.time.phases import rollout_costs
from hybridflow.planning.time.transfer import shared_share
from hybridflow.planning.time.workload import Workload

ENGINE_SHARE = 0.9
"""Share of a GPU's memory that weights, KV cache and workspace of an engine may take."""

_MOST_TP = 64
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
        reading: bytes of a rank while it reads prompts.
        memory_share: least `mem_fraction_static` with which SGLang makes that KV cache.
    """

    shape: EngineShape
    cost: RolloutCost
    stream: float
    cache_tokens: int
    weights: int
    cache: int
    workspace: int
    reading: int
    memory_share: float = 0.0


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
        engine: settings that no search changes.
        gpus: the ranks are on GPUs.
        accepts: refuses engines that may not be proposed on some GPUs, with a UserError.
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
        engine: RolloutConfig | None = None,
        gpus: bool = True,
        accepts: Callable[[EngineShape], None] = lambda shape: None,
    ) -> None:
        self._work = work
        self._hardware = hardware
        self._base = base
        self._attention_dp = attention_dp
        self._beside = beside
        self._expert_parallel = expert_parallel
        self._only = only
        self._engine = engine or RolloutConfig()
        self._gpus = gpus
        self._accepts = accepts
        self._refusal: UserError | None = None
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
        if not choices and self._refusal is not None:
            raise UserError(self.refusal(gpus))
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

    def refusal(self, gpus: int) -> str:
        """The line that says that no engines may be proposed on some GPUs."""
        reason = f"passes the checks, such as {self._refusal}" if self._refusal is not None else "has a prompt for each"
        return f"{gpus} GPUs for engines: no engine {reason}"

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
                        shape = self._shape(tp, ep, attention_dp, gpus // tp)
                        if self._is_accepted(shape):
                            yield shape
            tp *= 2

    def _is_accepted(self, shape: EngineShape) -> bool:
        try:
            self._accepts(shape)
        except UserError as error:
            self._refusal = self._refusal or error
            return False
        return True

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
        config = engine_config(self._engine, shape)
        workspace = engine_overhead(on_gpu=self._gpus) + rank_workspace(config, spec, on_gpu=self._gpus)
        left = ENGINE_SHARE * self._hardware.memory - device_overhead(on_gpu=self._gpus) - beside - weights - workspace
        left -= self._reading(config, prompt_tokens(config, self._hardware.memory))
        of_token = self._model.cache_of_a_token(shape)
        needed = shape.requests * work.longest_sequence
        tokens = min(needed, int(max(0.0, left) // of_token) * shape.attention_dp)
        if tokens < min(needed, _LEAST_TOGETHER * shape.attention_dp * work.longest_sequence):
            return None
        cost, stream = rollout_costs(work, self._hardware, shape, tokens)
        reading = self._reading(config, tokens // shape.attention_dp)
        cache = of_token * tokens // shape.attention_dp
        return EngineChoice(shape, cost, stream, tokens, weights, cache, workspace, reading)

    def _reading(self, config: RolloutConfig, cache_tokens: int) -> int:
        """Count the bytes of a rank while it reads prompts, with a KV cache of some tokens."""
        sizes, itemsize = self._work.actor.spec.sizes, ITEMSIZES[config.dtype]
        prompts = min(prompt_tokens(config, self._hardware.memory), cache_tokens)
        prefixes = min(cache_tokens, PREFIX_TOKENS)
        of_prompts = prompts * prompt_of_a_token(sizes, config.tp, config.ep, itemsize)
        return of_prompts + prefixes * prefix_of_a_token(sizes, config.attention_tp, itemsize)


def engine_config(engine: RolloutConfig, shape: EngineShape) -> RolloutConfig:
    """Return settings of engines with the sizes of a shape."""
    return engine.model_copy(
        update={
            "tp": shape.tp,
            "ep": shape.ep,
            "attention_dp": shape.attention_dp,
            "max_running_requests": shape.requests,
            "peer_collectives": shape.peers,
            "local_experts_only": shape.local_experts_only,
        }
    )


def _divides(spec: ModelSpec, tp: int) -> bool:
    sizes = spec.sizes
    return sizes.heads % tp == 0 and (sizes.groups % tp == 0 or tp % sizes.groups == 0) and sizes.vocabulary % tp == 0
