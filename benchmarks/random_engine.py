"""A trainer of random weights on the ranks that torchrun started, and random sequences for it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine3d.layout import Layout
from engine3d.models.files.weights import rank_parameters
from engine3d.models.rules import LocalParameter
from engine3d.platform import platform
from engine3d.training.config import LayoutConfig, TrainConfig
from engine3d.training.engine import TrainEngine
from engine3d.training.passes.forward import TokenOutputs
from engine3d.training.passes.sequences import Sequences
from engine3d.training.update import UpdateResult


def random_engine(
    config: dict[str, Any], layout: Layout, *, embedding_std: float = 0.02, **settings: Any
) -> TrainEngine:
    """An engine whose weights are drawn from a normal distribution (`fill`), norms being 1.

    Args:
        config: the model's config.json.
        layout: of as many ranks as torchrun started.
        embedding_std: of the embeddings; wide ones keep tokens different in all layers, which then use all experts.
        settings: of a TrainConfig, but for the layout.
    """
    names = ("tp", "pp", "ep", "etp", "cp", "vpp")
    stages = None if layout.stages is None else list(layout.stages)
    sizes = LayoutConfig(**{name: getattr(layout, name) for name in names}, stages=stages)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        engine = TrainEngine(Path(directory), TrainConfig(layout=sizes, **settings), layout, load=False)
    parameters = rank_parameters(engine.module, engine.spec, layout, engine.coordinates)
    weights = [(local, tensor.data) for local, tensor in parameters if not local.buffer]
    fill(weights, 0, lambda name: None if "norm" in name else embedding_std if "embed_tokens" in name else 0.02)
    engine.optimizer.reload_model_params()
    return engine


def fill(
    parameters: Iterable[tuple[LocalParameter, torch.Tensor]],
    seed: int,
    deviation: Callable[[str], float | None] = lambda _: 0.02,
) -> None:
    """Draw weights from a normal distribution, alike on all ranks that hold the same elements.

    Args:
        parameters: of a rank, each with its rule.
        seed: of the weights.
        deviation: standard deviation of a HuggingFace tensor; None for ones.
    """
    with torch.no_grad():
        for local, tensor in parameters:
            tensor.zero_()  # rows of a padded vocabulary
            for tensor_slice in local.slices:
                view = tensor[tuple(slice(*edges) for edges in tensor_slice.local_box)]
                if (std := deviation(tensor_slice.hf_name)) is None:
                    view.fill_(1.0)
                    continue
                digest = hashlib.blake2b(
                    f"{seed} {tensor_slice.hf_name} {tensor_slice.hf_box}".encode(), digest_size=7
                ).digest()
                generator = torch.Generator(tensor.device).manual_seed(int.from_bytes(digest, "little"))
                view.normal_(0.0, std, generator=generator)
    platform.synchronize()


def random_sequences(engine: TrainEngine, tokens: int, length: int) -> Sequences:
    """This rank's part of `tokens` random tokens over all data-parallel ranks, in sequences of `length`.

    Ranks of one model have the same. Column `weights` is one over all tokens.
    """
    count = tokens // length // engine.layout.dp
    generator = torch.Generator().manual_seed(engine.coordinates.dp)
    drawn = torch.randint(engine.spec.vocab_size, (count * length,), generator=generator)
    weights = torch.full(drawn.shape, 1 / tokens)
    return Sequences(drawn, torch.full((count,), length), {"weights": weights})


def train_on(engine: TrainEngine, sequences: Sequences) -> UpdateResult:
    """One update towards likelier tokens. Its `loss_outputs` are the losses of micro-batches."""

    def loss(outputs: TokenOutputs, columns: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        assert outputs.logprobs is not None
        loss = -(outputs.logprobs * columns["weights"]).sum()
        return loss, loss.detach()

    return engine.update(sequences, loss)


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
