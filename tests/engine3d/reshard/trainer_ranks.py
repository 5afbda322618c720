"""Megatron-Core ranks in processes of their own that do what a test asks of them, one request after another."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine3d.layout import Layout
from engine3d.reshard.shards import Place
from engine3d.training.config import LayoutConfig, TrainConfig
from tests.engine3d.distributed import run_distributed

_LIMIT_S = 120.0


class TrainerRanks:
    """All ranks of a world; `call` runs a method of `Trainer` on each of them."""

    def __init__(self, directory: Path, world_size: int) -> None:
        self._directory, self.world_size = directory, world_size
        self._number = 0
        self.failure: BaseException | None = None

    def call(self, method: str, *per_rank: Sequence[Any], **same: Any) -> list[Any]:
        """Call a method with the rank's entry of each list, and return what each rank returned."""
        self._number += 1
        for rank in range(self.world_size):
            request = (method, [values[rank] for values in per_rank], same)
            _write(self._directory / f"request-{self._number}-{rank}", request)
        return [self._answer(self._directory / f"answer-{self._number}-{rank}") for rank in range(self.world_size)]

    def _answer(self, path: Path) -> Any:
        end = time.monotonic() + _LIMIT_S
        while not path.exists():
            if self.failure is not None:
                raise self.failure
            assert time.monotonic() < end, f"no {path.name} after {_LIMIT_S} s"
            time.sleep(0.002)
        return pickle.loads(path.read_bytes())


@contextmanager
def trainer_ranks(model: Path, world_size: int, scratch: Path) -> Iterator[TrainerRanks]:
    """Ranks that serve requests until the block ends. `scratch`: a directory for what goes between them."""
    ranks = TrainerRanks(scratch, world_size)

    def run() -> None:
        try:
            run_distributed(_serve, world_size, model, scratch, timeout_s=600.0)
        except BaseException as error:  # raised by the next call
            ranks.failure = error

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ranks
    finally:
        if ranks.failure is None:
            ranks.call("stop")
        thread.join()
    if ranks.failure is not None:
        raise ranks.failure


class Trainer:
    """What a rank can be asked for."""

    def __init__(self, model: Path) -> None:
        self._model, self._rank = model, int(os.environ["RANK"])
        self._engine: Any = None
        self._sender: Any = None

    def build(self, place: Place, *, sizes: dict[str, int], dtype: str = "float32") -> Any:
        """Build the model on a layout and share its weights."""
        from engine3d.training.engine import TrainEngine

        if self._engine is not None:
            self._sender.close()
            self._engine.close()
        config = TrainConfig(layout=LayoutConfig(**sizes), dtype=dtype)
        layout = Layout.of_world(int(os.environ["WORLD_SIZE"]), **sizes)
        self._engine = TrainEngine(self._model, config, layout)
        self._sender = self._engine.weight_sender(f"actor rank {self._rank}", self._rank, place)
        return self._sender.share()

    def connect(self, order: Any) -> None:
        self._sender.connect(order)

    def send(self, *, version: int) -> Any:
        return self._sender.send(version)

    def change(self, *, seed: int) -> None:
        """Give every weight another value, the same on all ranks that hold it."""
        from engine3d.models.weights import rank_parameters

        engine = self._engine
        with torch.no_grad():
            for local, tensor in rank_parameters(engine._module, engine.spec, engine.layout, engine.coordinates):
                for piece in local.pieces:
                    shape = engine.spec.hf_shape(piece.hf_name)
                    generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(piece.hf_name.encode()))
                    whole = 0.2 * torch.randn(shape, generator=generator)
                    taken = whole[tuple(slice(*edges) for edges in piece.hf_box)]
                    tensor.data[tuple(slice(*edges) for edges in piece.local_box)].copy_(taken)

    def export(self, *, directory: Path) -> None:
        self._engine.export(directory)

    def stop(self) -> None:
        pass


def _serve(model: Path, scratch: Path) -> None:
    rank, trainer = int(os.environ["RANK"]), Trainer(model)
    number, method = 0, ""
    while method != "stop":
        number += 1
        path = scratch / f"request-{number}-{rank}"
        while not path.exists():
            time.sleep(0.002)
        method, arguments, same = pickle.loads(path.read_bytes())
        _write(scratch / f"answer-{number}-{rank}", getattr(trainer, method)(*arguments, **same))


def _write(path: Path, value: Any) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(pickle.dumps(value))
    partial.rename(path)
