"""A trainer of random weights on the ranks that torchrun started, and random sequences for it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine3d.layout import Layout
from engine3d.platform import platform
from engine3d.training.config import LayoutConfig, TrainConfig
from engine3d.training.engine import TrainEngine
from engine3d.training.sequences import Sequences


def random_engine(config: dict[str, Any], layout: Layout, scratch: Path, **settings: Any) -> TrainEngine:
    """An engine whose weights are drawn from a normal distribution on each rank, norms being 1.

    Args:
        config: the model's config.json.
        layout: of as many ranks as torchrun started.
        scratch: a directory to be made, and removed again; seen by all ranks.
        settings: of a TrainConfig, but for the layout.
    """
    if leads():
        scratch.mkdir(parents=True, exist_ok=True)
        partial = scratch / "config.json.partial"
        partial.write_text(json.dumps(config))
        partial.rename(scratch / "config.json")
    while not (scratch / "config.json").exists():
        time.sleep(0.1)
    sizes = LayoutConfig(tp=layout.tp, pp=layout.pp, ep=layout.ep, etp=layout.etp, cp=layout.cp)
    engine = TrainEngine(scratch, TrainConfig(layout=sizes, **settings), layout, load=False)
    dist.barrier()
    if leads():
        shutil.rmtree(scratch, ignore_errors=True)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02)
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
    engine.update(sequences, lambda outputs, columns: (-(outputs.logprobs * columns["weights"]).sum(), None))


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
    """Whether this is the rank that prints."""
    return int(os.environ.get("RANK", "0")) == 0
