"""Megatron-Core ranks in processes of their own that do what a test asks of them, one request after another."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine3d.errors import EngineError
from engine3d.layout import Layout
from engine3d.models.lora.config import LoraConfig
from engine3d.models.precision import NOTHING_LEFT_OUT, Fp8Settings, Precision
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.describe.shards import Location
from engine3d.training.config import LayoutConfig, TrainConfig
from tests.support.distributed import run_distributed

_LIMIT_S = 120.0


class TrainerRanks:
    """All ranks of a world; `call` runs a method of `Trainer` on each of them that was not killed."""

    def __init__(self, directory: Path, world_size: int) -> None:
        self._directory, self.ranks = directory, list(range(world_size))
        self._number = 0
        self.failure: BaseException | None = None

    def call(self, method: str, *per_rank: Sequence[Any], **same: Any) -> list[Any]:
        """Call a method with the rank's entry of each list, and return what each rank returned."""
        self.ask(method, *per_rank, **same)
        return self.answers()

    def ask(self, method: str, *per_rank: Sequence[Any], **same: Any) -> None:
        """Call a method without waiting: `answers` must follow."""
        self._number += 1
        for rank in self.ranks:
            request = (method, [values[rank] for values in per_rank], same)
            _write(self._directory / f"request-{self._number}-{rank}", request)

    def answers(self) -> list[Any]:
        """Return values of the last call, one a rank."""
        return [self._read(f"answer-{self._number}-{rank}") for rank in self.ranks]

    def await_hold(self) -> None:
        """Wait until all ranks have come to where `try_send` holds them."""
        for rank in self.ranks:
            self._read(f"held-{self._number}-{rank}")

    def kill(self, rank: int) -> None:
        """Kill a rank, which must be one that may die."""
        os.kill(self._read(f"pid-{rank}"), signal.SIGKILL)
        self.ranks.remove(rank)

    def release(self) -> None:
        """Resume the ranks that wait in `try_send`."""
        _write(self._directory / f"released-{self._number}", None)

    def _read(self, name: str) -> Any:
        path, end = self._directory / name, time.monotonic() + _LIMIT_S
        while not path.exists():
            if self.failure is not None:
                raise self.failure
            assert time.monotonic() < end, f"no {name} after {_LIMIT_S} s"
            time.sleep(0.01)
        return pickle.loads(path.read_bytes())


@contextmanager
def trainer_ranks(model: Path, world_size: int, scratch: Path, may_die: Sequence[int] = ()) -> Iterator[TrainerRanks]:
    """Ranks that serve requests until the block ends. `may_die`: those that the test kills."""
    scratch = Path(tempfile.mkdtemp(dir=scratch))
    ranks = TrainerRanks(scratch, world_size)

    def run() -> None:
        try:
            run_distributed(_serve, world_size, model, scratch, timeout_s=600.0, may_die=may_die)
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
    """Methods that a rank can be called for."""

    def __init__(self, model: Path, scratch: Path) -> None:
        self._model, self._scratch, self._rank = model, scratch, int(os.environ["RANK"])
        self.number = 0
        self._engine: Any = None
        self._sender: Any = None

    def build(
        self,
        location: Location,
        *,
        sizes: dict[str, Any],
        dtype: str = "float32",
        model: Path | None = None,
        precision: Precision | None = None,
        lora: LoraConfig | None = None,
        fp8: Fp8Settings = NOTHING_LEFT_OUT,
    ) -> SharedShards:
        """Build the model, or another, on a layout and share its weights."""
        from engine3d.training.engine import TrainEngine

        if self._engine is not None:
            self._sender.close()
            self._engine.close()
        config = TrainConfig(layout=LayoutConfig(**sizes), dtype=dtype, lora=lora, fp8=fp8)
        layout = Layout.of_world(int(os.environ["WORLD_SIZE"]), **sizes)
        self._engine = TrainEngine(model or self._model, config, layout)
        self._sender = self._engine.weight_sender(f"actor rank {self._rank}", self._rank, location, precision)
        return self._sender.share()

    def publish(self, path: Path) -> None:
        self._sender.publish(path)

    def connect(self, order: Any) -> None:
        self._sender.connect(order)

    def connect_each(self, orders: Sequence[Any]) -> None:
        self._sender.connect(*orders)

    def send(self, *, version: int, transfer: int = 0) -> Any:
        return self._sender.send(version, transfer)

    def try_send(self, *, version: int, hold_in_round: int) -> str:
        """Send over the process group, stand still in a round until released, and return the error, if there is one."""
        wire = self._sender._outlets[0].participant._wire
        exchange, exchanges = wire._exchange, itertools.count(1)

        def holding(*arguments: Any) -> Any:
            if next(exchanges) == hold_in_round:
                _write(self._scratch / f"held-{self.number}-{self._rank}", None)
                while not (self._scratch / f"released-{self.number}").exists():
                    time.sleep(0.01)
            return exchange(*arguments)

        wire._exchange = holding
        try:
            self._sender.send(version)
        except EngineError as error:
            return str(error)
        return ""

    def change(self, *, seed: int) -> None:
        """Give every weight that is trained another value, the same on all ranks that hold it."""
        from engine3d.models.files.weights import rank_parameters

        engine = self._engine
        with torch.no_grad():
            for local, tensor in rank_parameters(engine.module, engine.trained, engine.layout, engine.coordinates):
                for tensor_slice in local.slices:
                    shape = engine.trained.hf_shape(tensor_slice.hf_name)
                    generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(tensor_slice.hf_name.encode()))
                    full = 0.2 * torch.randn(shape, generator=generator)
                    taken = full[tuple(slice(*edges) for edges in tensor_slice.hf_box)]
                    target = tensor.data[tuple(slice(*edges) for edges in tensor_slice.local_box)]
                    tensor_slice.to_hf(target).copy_(taken)

    def export(self, *, directory: Path, **options: Any) -> None:
        self._engine.export(directory, **options)

    def stop(self) -> None:
        pass


def _serve(model: Path, scratch: Path) -> None:
    rank, trainer = int(os.environ["RANK"]), Trainer(model, scratch)
    _write(scratch / f"pid-{rank}", os.getpid())
    method = ""
    while method != "stop":
        trainer.number += 1
        path = scratch / f"request-{trainer.number}-{rank}"
        while not path.exists():
            time.sleep(0.01)
        method, arguments, same = pickle.loads(path.read_bytes())
        _write(scratch / f"answer-{trainer.number}-{rank}", getattr(trainer, method)(*arguments, **same))


def _write(path: Path, value: Any) -> None:
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(pickle.dumps(value))
    partial.rename(path)
