"""Seconds in which engines generate the responses of a step.

A decoding step reads the weights once and the keys and values of all requests (the memory roofline; Williams, Waterman
and Patterson, 2009, CACM 52(4)), as `benchmarks/roofline.py` counts them:

    weights / rate + expert FLOPs / peak + keys and values / rate + layers x (launches + exchanges)

and takes at least as long as the scheduler needs. A router that sends tokens to any experts alike leaves an expert
without a token with probability (1 - k/E)^n. A prompt is read once for all its samples. Requests start as others end,
up to the limit of the engine or of its KV cache: the tail, in which few requests are left, follows from the lengths.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from engine3d.dtypes import ITEMSIZES
from engine3d.memory.serving import cache_of_a_token
from engine3d.models import ModelSpec
from engine3d.training.flops import pair_flops
from hybridflow.planning.time.hardware import Hardware

_GROUPS = 64
"""Groups of requests of the same length that an engine's requests are simulated by."""
_FP8_WEIGHTS = 0.55
"""Bytes of weights in fp8 with their scales over those in bf16, matrices and what stays in bf16 together."""
_EXPERT_PASSES = 3.0
"""Passes over the rows of tokens' experts next to their products: activation, permutation, sums (the same)."""
_SAMPLING_PASSES = 40.0
"""Passes over float32 logits by SGLang's own sampling and log-probs; one with `fused_sampling`
(h200-1gpu-12-layers.json, h200-2gpu-48-layers.json less a decoding step's kernels)."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Parallel sizes and features of each engine.

    Args:
        tp, ep, attention_dp: as in `rollout.engine`.
        engines: number of them.
        requests: most that an engine runs at once.
        cascade: reads the pages that requests share once.
        peers: exchanges by kernels that write into other ranks' memory.
        fused_sampling, local_experts_only: as in `rollout.engine`.
        fp8: weights are in fp8.
        dtype: of weights.
        cache_itemsize: bytes of an element of the KV cache.
        graphs: decoding is captured in CUDA graphs.
        recomputes: requests of a stream read their tokens again whenever there are new weights.
    """

    tp: int = 1
    ep: int = 1
    attention_dp: int = 1
    engines: int = 1
    requests: int = 256
    cascade: bool = False
    peers: bool = False
    fused_sampling: bool = False
    local_experts_only: bool = False
    fp8: bool = False
    dtype: str = "bfloat16"
    cache_itemsize: int = 2
    graphs: bool = True
    recomputes: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.engines

    @property
    def attention_tp(self) -> int:
        """Ranks that share a request's attention."""
        return self.tp // self.attention_dp

    def __str__(self) -> str:
        """Return the sizes above 1 and the number of engines."""
        sizes = {"tp": self.tp, "ep": self.ep, "attention_dp": self.attention_dp}
        text = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "tp=1"
        return f"{self.engines} x ({text})"


@dataclass(frozen=True, slots=True)
class RolloutCost:
    """Seconds of a rollout, on the engine that ends last.

    Args:
        prefill: reading prompts.
        weights: reading weights in decoding steps, with what is computed with them.
        cache: reading keys and values.
        exchange: exchanges of an engine's ranks.
        launches: of kernels and of the scheduler, and what each layer takes without bytes.
        tail: of these the seconds in which fewer than half of the engine's requests run.
        steps: decoding steps.
    """

    prefill: float
    weights: float
    cache: float
    exchange: float
    launches: float
    tail: float
    steps: int

    @property
    def seconds(self) -> float:
        return self.prefill + self.weights + self.cache + self.exchange + self.launches


@dataclass(frozen=True)
class GenerationModel:
    """Costs of generation with a model.

    Args:
        spec: the model.
        hardware: of every rank.
    """

    spec: ModelSpec
    hardware: Hardware

    def weights(self, shape: EngineShape) -> float:
        """Count the bytes of weights of a rank."""
        experts, attention, mlps, head = self._elements
        elements = experts / shape.tp + attention / shape.attention_tp + mlps / shape.tp + 2 * head / shape.attention_tp
        return elements * ITEMSIZES[shape.dtype] * self._weights_share(shape)

    def cache_of_a_token(self, shape: EngineShape) -> int:
        """Count the bytes of keys and values of a token on a rank that has it."""
        return cache_of_a_token(self.spec.sizes, shape.attention_tp, shape.cache_itemsize)

    def step(self, shape: EngineShape, requests: float, tokens: float, shared: float = 0.0) -> dict[str, float]:
        """Predict the seconds of a decoding step by kind.

        Args:
            shape: of the engine.
            requests: of the engine.
            tokens: of all its requests together, with the prompts.
            shared: of these the tokens that others have too: their first copy is not among them.
        """
        hardware, sizes, itemsize = self.hardware, self.spec.sizes, ITEMSIZES[shape.dtype]
        experts, attention, mlps, head = self._elements
        quantised = self._weights_share(shape)
        touched = 1 - (1 - sizes.experts_per_token / sizes.experts) ** requests if sizes.experts else 0.0
        read = experts * touched / shape.tp * itemsize * quantised / (hardware.memory_rate * hardware.decode_read)
        dense = attention / shape.attention_tp + mlps / shape.tp + head / shape.attention_tp
        read += dense * itemsize * quantised / (hardware.memory_rate * hardware.decode_linear)
        flops = 2 * requests * experts * sizes.experts_per_token / max(1, sizes.experts) / shape.tp
        flops += 2 * requests / shape.attention_dp * dense
        of_token = self.cache_of_a_token(shape) / shape.attention_dp / (hardware.memory_rate * hardware.decode_read)
        cache = (tokens - shared) * of_token
        cache += shared * of_token * (_CASCADE_READS if shape.cascade else _SHARED_READS)
        rows = requests * sizes.experts_per_token * sum(sizes.sparse) * (sizes.hidden + 3 * sizes.expert_ffn)
        read += _EXPERT_PASSES * rows / (shape.ep if shape.local_experts_only else 1) * itemsize / hardware.memory_rate
        logits = (
            requests / shape.attention_dp * sizes.vocabulary * 4 * (1.0 if shape.fused_sampling else _SAMPLING_PASSES)
        )
        read += logits / hardware.memory_rate
        exchange = self._exchange(shape, requests) if shape.tp > 1 else 0.0
        launches = sizes.layers * hardware.decode_layer_s * (1.0 if shape.graphs else _EAGER)
        kinds = {"weights": read + flops / hardware.flops, "cache": cache, "exchange": exchange, "launches": launches}
        least = hardware.decode_host_s + hardware.decode_request_s * requests
        kinds["launches"] += max(0.0, least - sum(kinds.values()))
        return kinds

    def prompt_s(self, shape: EngineShape, tokens: float) -> float:
        """Predict the seconds in which an engine reads a prompt of as many tokens, among others."""
        hardware, sizes = self.hardware, self.spec.sizes
        experts, attention, mlps, _ = self._elements
        dense = 2 * tokens * (attention + mlps) / hardware.linear_rate(sizes.hidden)
        active = experts * sizes.experts_per_token / max(1, sizes.experts)
        routed = 2 * tokens * active / (hardware.flops * hardware.experts)
        scores = pair_flops(sizes) * tokens**2 / (hardware.flops * hardware.attention)
        return (dense + routed + scores) / shape.tp

    def _exchange(self, shape: EngineShape, requests: float) -> float:
        """Predict the seconds of a decoding step's exchanges: two in each layer, of all requests' hidden states."""
        hardware, sizes = self.hardware, self.spec.sizes
        nbytes = (shape.tp - 1) / shape.tp * requests * sizes.hidden * ITEMSIZES[shape.dtype]
        start, rate = hardware.nccl_s, hardware.nccl_small_rate
        if shape.peers:
            start, rate = hardware.peers_s, hardware.peers_rate
        if shape.tp > hardware.gpus_per_node:
            rate = min(rate, hardware.network_rate)
        return sizes.layers * 2 * (start + nbytes / rate)

    def rollout(
        self, shape: EngineShape, prompts: int, samples: int, prompt: float, lengths: Sequence[float], limit: float
    ) -> RolloutCost:
        """Predict the seconds of a rollout.

        Args:
            shape: of the engines.
            prompts: of the step, over all engines.
            samples: responses to each prompt.
            prompt: mean tokens of a prompt.
            lengths: of responses, as any number of equally frequent values.
            limit: tokens that the KV cache of an engine holds.
        """
        of_engine = -(-prompts // shape.engines) * samples
        mean = sum(lengths) / len(lengths)
        most = max(1, min(shape.requests, of_engine, int(limit // max(1.0, prompt / samples + mean))))
        totals = {"weights": 0.0, "cache": 0.0, "exchange": 0.0, "launches": 0.0}
        tail, steps = 0.0, 0
        for duration, running, tokens in self._segments(of_engine, most, prompt, lengths):
            shared = running * prompt * (1 - 1 / samples)
            kinds = self.step(shape, running, tokens, min(shared, tokens))
            for kind, seconds in kinds.items():
                totals[kind] += duration * seconds
            tail += duration * sum(kinds.values()) * (running < most / 2)
            steps += round(duration)
        prefill = -(-prompts // shape.engines) * self.prompt_s(shape, prompt) + of_engine * self.hardware.decode_start_s
        return RolloutCost(prefill=prefill, tail=tail, steps=steps, **totals)

    @staticmethod
    def _segments(
        requests: int, most: int, prompt: float, lengths: Sequence[float]
    ) -> list[tuple[float, float, float]]:
        """Divide a rollout of an engine into segments without a start or an end of a request.

        Returns:
            Of each its decoding steps, the requests that run, and their tokens in its middle.
        """
        groups = min(_GROUPS, requests)
        size = requests / groups
        ordered = sorted(lengths)
        stride = max(1, round(groups * 0.618)) | 1
        while math.gcd(stride, groups) > 1:
            stride += 1
        # Lengths come in an order that has long and short ones at all times.
        waiting = [ordered[int((index * stride % groups + 0.5) / groups * len(ordered))] for index in range(groups)]
        waiting.reverse()
        running: list[tuple[float, float]] = []  # end, start
        now, starts, slots = 0.0, 0.0, max(1, int(most / size))
        segments = []
        while waiting or running:
            while waiting and len(running) < slots:
                heapq.heappush(running, (now + waiting.pop(), now))
                starts += now
            duration = running[0][0] - now
            generated = len(running) * (now + duration / 2) - starts
            segments.append((duration, size * len(running), size * (len(running) * prompt + generated)))
            now = running[0][0]
            while running and running[0][0] <= now:
                starts -= heapq.heappop(running)[1]
        return segments

    def _weights_share(self, shape: EngineShape) -> float:
        """Bytes of weights over those without fp8."""
        return 1 - (1 - _FP8_WEIGHTS) * self._quantised_share if shape.fp8 else 1.0

    @cached_property
    def _quantised_share(self) -> float:
        """Elements of matrices in fp8 over those of all that a model in fp8 has so without `train.fp8`."""
        in_fp8, without = (
            sum(prod(tensor.shape) for tensor in spec.hf_tensors.values() if tensor.fp8)
            for spec in (self.spec, replace(self.spec, unquantised=frozenset()))
        )
        return in_fp8 / without if without else 1.0

    @cached_property
    def _elements(self) -> tuple[float, float, float, float]:
        """Elements of all experts, of attention, of other MLPs with routers, and of the table of tokens."""
        sizes = self.spec.sizes
        sparse = sum(sizes.sparse)
        experts = sparse * sizes.experts * 3 * sizes.hidden * sizes.expert_ffn
        mlps = (sizes.layers - sparse) * 3 * sizes.hidden * sizes.ffn
        mlps += sparse * (3 * sizes.hidden * sizes.shared_ffn + sizes.hidden * sizes.experts)
        head = sizes.vocabulary * sizes.hidden
        total = sum(self.spec.rules.layer_costs)  # multiplications of a token, by which attention is what is left
        attention = total - sparse * sizes.experts_per_token * 3 * sizes.hidden * sizes.expert_ffn - mlps
        return float(experts), float(attention), float(mlps), float(head)


_SHARED_READS = 0.6
"""Reads of memory for tokens of prompts that several requests share, over their bytes: the rest comes from the L2 cache
(attention of h100-2gpu-24-layers-samples-kernels.txt)."""
_CASCADE_READS = 0.31
"""The same with cascade attention, whose time is that of products and of the call (results/cascade-attention: 66 us for
256 requests that share 1,024 tokens, 18 us for 32)."""
_EAGER = 8.0
"""Time of launches without CUDA graphs over that with them; not measured."""
