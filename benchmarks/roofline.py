"""Lower bound of decoding times, the time in which a GPU reads the memory: the bound of `rollout.py`.

In each step a rank reads its weights once, and keys and values of all tokens of the responses that are under way. Both
are much more than what it computes with them, so that a step takes at least their bytes over the rate at which the GPU
reads (the memory roofline; Williams, Waterman and Patterson, 2009, CACM 52(4)).
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.reshard_plan import Rollout
from engine3d.memory import serving_by_rank
from engine3d.models import ModelSpec
from engine3d.platform import platform
from engine3d.reshard.describe.shards import Location
from engine3d.rollout.config import RolloutConfig

_COPIED_BYTES, _COPIES = 4 << 30, 20
_ON_A_CPU = 64 << 20
_LIMIT_S = 120.0


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes that a rank reads in the mean step of a round.

    Args:
        weights: of all layers, of as many experts as the requests' tokens are sent to, and of the output layer.
        cache: of keys and values.
    """

    weights: float
    cache: float

    @property
    def step(self) -> float:
        return self.weights + self.cache


def decode_bytes(
    spec: ModelSpec,
    rollout: Rollout,
    config: RolloutConfig,
    *,
    requests: int,
    prompt: int,
    response: int,
    samples: int = 1,
) -> DecodeBytes:
    """Count the bytes of the rank that holds most, while all requests of an engine are decoded together.

    Routers that send each token to any experts with the same probability, as those of trained models nearly do and
    those of random weights with `model.create.embedding_std`, leave an expert without a token with probability
    (1 - k/E)^n. The table of embeddings is not read but for a few rows.

    Args:
        spec: the model.
        rollout: sizes of an engine.
        config: of each engine.
        requests: of an engine.
        prompt, response: tokens of each request.
        samples: requests that have a prompt in common, which is read once.
    """
    locations = [Location("0", f"cuda:{rank}") for rank in range(rollout.tp)]
    serving = max(serving_by_rank(spec, config, locations), key=lambda rank: rank.weights)
    sizes, itemsize = spec.sizes, _itemsize(config)
    table = 0 if spec.sizes.tied else spec.vocab_size * sizes.hidden * itemsize // config.attention_tp
    of_experts = itemsize if config.precision is None else 1  # their scales are few
    experts = 3 * sizes.hidden * sizes.expert_ffn * sizes.experts * of_experts // rollout.tp
    sparse = sum(sizes.is_sparse(layer) for layer in range(sizes.layers))
    idle = (1 - sizes.experts_per_token / sizes.experts) ** requests if sparse else 0.0
    tokens = requests / config.attention_dp * (prompt / samples + (response + 1) / 2)
    return DecodeBytes(
        weights=serving.weights - table - sparse * experts * idle, cache=tokens * serving.cache_of_a_token
    )


def _itemsize(config: RolloutConfig) -> int:
    import torch

    size: int = getattr(torch, config.dtype).itemsize
    return size


def memory_bandwidth() -> float:
    """Bytes a second that the device reads and writes while it copies one large block to another.

    In a process of its own, which leaves no memory taken on a GPU.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender,))
    process.start()
    sender.close()
    try:
        if not receiver.poll(_LIMIT_S):
            raise SystemExit(f"roofline.py: the memory's bandwidth was not measured within {_LIMIT_S:.0f} s")
        bandwidth: float = receiver.recv()
        return bandwidth
    except EOFError:
        raise SystemExit(
            "roofline.py: the process that measures bandwidth has ended; what it printed is above"
        ) from None
    finally:
        process.kill()
        process.join()


def _measure(sender: Any) -> None:
    import torch

    device = torch.device("cuda" if platform.gpus else "cpu")
    source = torch.ones(_COPIED_BYTES if platform.gpus else _ON_A_CPU, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_COPIES):
        started = time.perf_counter()
        target.copy_(source)
        if platform.gpus:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    sender.send(2 * source.nbytes / statistics.median(seconds))
