"""A trainer of random weights on the ranks that torchrun started, and random sequences for it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine3d.layout import Layout
from engine3d.platform import platform
from engine3d.training.config import LayoutConfig, TrainConfig
from engine3d.training.engine import TrainEngine
from engine3d.training.forward import TokenOutputs
from engine3d.training.sequences import Sequences


def random_engine(
    config: dict[str, Any], layout: Layout, *, embedding_std: float = 0.02, **settings: Any
) -> TrainEngine:
    """An engine whose weights are drawn from a normal distribution on each rank, norms being 1.

    Args:
        config: the model's config.json.
        layout: of as many ranks as torchrun started.
        embedding_std: of the embeddings; wide ones keep tokens different in all layers, which then use all experts.
        settings: of a TrainConfig, but for the layout.
    """
    sizes = LayoutConfig(tp=layout.tp, pp=layout.pp, ep=layout.ep, etp=layout.etp, cp=layout.cp)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        engine = TrainEngine(Path(directory), TrainConfig(layout=sizes, **settings), layout, load=False)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            wide = embedding_std if "word_embeddings" in name else 0.02
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, wide)
    engine.optimizer.reload_model_params()
    return engine


def random_sequences(engine: TrainEngine, tokens: int, length: int) -> Sequences:
    """This rank's part of `tokens` random tokens over all ranks, in sequences of `length`.

    Column `weights` is one over all tokens.
    """
    count = tokens // length // engine.layout.dp
    drawn = torch.randint(engine.spec.vocab_size, (count * length,))
    weights = torch.full(drawn.shape, 1 / tokens)
    return Sequences(drawn, torch.full((count,), length), {"weights": weights})


def train_on(engine: TrainEngine, sequences: Sequences) -> None:
    """One update towards likelier tokens."""

    def loss(outputs: TokenOutputs, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        assert outputs.logprobs is not None
        return -(outputs.logprobs * columns["weights"]).sum(), None

    engine.update(sequences, loss)


def timed(action: Callable[[], Any]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    platform.synchronize()
    started = time.perf_counter()
    action()
    platform.synchronize()
    dist.barrier()
    platform.synchronize()
    return time.perf_counter() - started


def leads() -> bool:
    """True if this is the rank that prints."""
    return int(os.environ.get("RANK", "0")) == 0


def most[T: (int, float)](value: T) -> T:
    """The largest of all ranks."""
    return max(of_all(value))


def of_all[T: (int, float)](value: T) -> list[T]:
    """Gather the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def say(text: str) -> None:
    """A line of progress, once."""
    if leads():
        print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
