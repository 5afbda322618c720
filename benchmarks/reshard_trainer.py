"""A trainer of the resharding benchmark: Megatron-Core's ranks in processes of their own, asked through pipes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine3d.layout import Layout
from engine3d.models.precision import Precision
from engine3d.platform import platform
from engine3d.platform.copies import CopyMethod
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.describe.shards import Location
from engine3d.reshard.plan.coordinate import SendOrder
from engine3d.reshard.transport.sender import Sent, Transport

_LIMIT_S = 300.0


class TrainerRank:
    """One rank, with weights in Megatron-Core's parameter buffers but without an optimizer."""

    def __init__(self, model: Path, layout: Layout, dtype: str, precision: Precision | None) -> None:
        from engine3d.models import build_model, load_model_spec
        from engine3d.models.files.weights import rank_parameters
        from engine3d.reshard.describe.source import model_shards
        from engine3d.reshard.transport.quantised import QuantisedWeights
        from engine3d.reshard.transport.sender import WeightSender
        from engine3d.training.config import OptimizerConfig, TrainConfig
        from engine3d.training.megatron import parallel
        from engine3d.training.optimizer import wrap_for_training

        self.rank = int(os.environ["RANK"])
        self._layout, self._dtype = layout, getattr(torch, dtype)
        self._coordinates = parallel.initialise(layout, seed=0, timeout_s=_LIMIT_S)
        spec = load_model_spec(model)
        spec.check_layout(layout)
        self._spec = spec.of_trainer(layout, transformer_engine=platform.has_transformer_engine)
        # bfloat16 gradients: nothing is trained here, and the memory is for the engines.
        config = TrainConfig(dtype=dtype, optimizer=OptimizerConfig(precision_aware=dtype == "bfloat16"))
        self._module = build_model(self._spec, layout, self._dtype)
        self._chunks = wrap_for_training(self._module, config)
        self._parameters = [
            (local, tensor.data)
            for local, tensor in rank_parameters(self._module, self._spec, layout, self._coordinates)
        ]
        self._precision: Precision | None = precision
        name = f"trainer rank {self.rank}"
        if precision is None:
            self._sender = WeightSender(*model_shards(self._parameters, name, self.rank, self.location()))
        else:
            quantised = QuantisedWeights(self._parameters, spec.hf_tensors, name, self.rank, self.location())
            self._quantise = quantised.quantise
            self._sender = WeightSender(quantised.shards, quantised.storages, quantised.quantise)

    def device(self) -> str:
        """Name of the rank's device."""
        return torch.cuda.get_device_name() if platform.device_type == "cuda" else "CPU"

    def location(self) -> Location:
        return Location(platform.node, platform.device_name(self.rank))

    def fill(self, seed: int) -> None:
        """Random weights, alike on all ranks that hold the same elements."""
        from benchmarks.random_engine import fill

        fill(self._parameters, seed)

    def share(self) -> SharedShards:
        return self._sender.share()

    def publish(self, path: Path) -> None:
        self._sender.publish(path)

    def connect(self, order: SendOrder, method: CopyMethod | None) -> dict[str, float]:
        """Seconds to make ready, and bytes that are taken for messages."""
        start = time.perf_counter()
        self._sender.connect(order, method=method)
        return {"connect_s": time.perf_counter() - start, "staging_bytes": self._sender.staged_bytes}

    def send(self, version: int) -> tuple[float, dict[Transport, Sent]]:
        """One transfer, begun on all ranks together: seconds until this rank was done, and what it sent."""
        dist.barrier()
        start = time.perf_counter()
        sent = self._sender.send(version)
        return time.perf_counter() - start, sent

    def quantise(self) -> float:
        """Seconds of quantising this rank's weights."""
        platform.synchronize()
        start = time.perf_counter()
        self._quantise()
        platform.synchronize()
        return time.perf_counter() - start

    def memory(self) -> dict[str, int]:
        platform.empty_cache()
        memory = platform.memory()
        return {"allocated_bytes": memory.allocated, "device_used_bytes": device_used_bytes()}

    def peak_since(self) -> int:
        """Most bytes that this process's allocator held since the last call."""
        if platform.device_type != "cuda":
            return 0
        peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def share_scratch(self, nbytes: int) -> Any:
        """Memory for `copy_rate` of another rank."""
        self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=self._parameters[0][1].device)
        self._scratch.random_()
        return platform.share_memory(self._scratch.untyped_storage())

    def copy_rate(self, handles: Sequence[Any]) -> list[float]:
        """Seconds of large copies into the next rank's memory, all ranks at the same time."""
        storage = platform.map_memory(handles[(self.rank + 1) % self._layout.world_size])
        source = self._scratch[: len(self._scratch) // 2]
        target = torch.empty(0, dtype=torch.uint8, device=source.device)
        target.set_(storage, len(source), (len(source),), (1,))
        seconds = []
        for _ in range(12):
            dist.barrier()
            platform.synchronize()
            start = time.perf_counter()
            target.copy_(source)
            platform.synchronize()
            seconds.append(time.perf_counter() - start)
        return seconds

    def drop_scratch(self) -> None:
        del self._scratch
        platform.empty_cache()

    def export(self, directory: Path) -> None:
        from engine3d.models import export_weights

        export_weights(
            self._module, self._spec, self._layout, self._coordinates, directory, self._dtype, precision=self._precision
        )

    def begin_baseline(self, bucket_bytes: int) -> None:
        from benchmarks.gather_baseline import GatherBaseline

        baseline = GatherBaseline(self._parameters, self._spec, self._layout, self._coordinates)
        self._buckets = baseline.buckets(bucket_bytes)

    def next_bucket(self) -> str | None:
        """The next bucket as SGLang takes it; None after the last. The one before it may be overwritten."""
        from benchmarks.gather_baseline import serialized

        bucket = next(self._buckets, None)
        if bucket is None:
            self._handed = None
            return None
        payload, self._handed = serialized(bucket)
        platform.synchronize()
        return payload

    def close(self) -> None:
        self._sender.close()


class Trainer:
    """All ranks of the trainer. `call` runs a method on every rank and returns what each returned."""

    def __init__(
        self, model: Path, layout: Layout, dtype: str, log_directory: Path, precision: Precision | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(layout.world_size):
            ours, theirs = context.Pipe()
            environment = platform.training_environment(layout.world_size, sends_to_engines=True) | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(layout.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            log = log_directory / f"trainer-{rank}.log"
            process = context.Process(
                target=_serve, args=(theirs, environment, log, (model, layout, dtype, precision)), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    @property
    def world_size(self) -> int:
        return len(self._connections)

    def start_call(self, method: str, *arguments: Any, by_rank: Sequence[tuple[Any, ...]] | None = None) -> None:
        for rank, connection in enumerate(self._connections):
            connection.send((method, by_rank[rank] if by_rank is not None else arguments))

    def results(self) -> list[Any]:
        results = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(2 * _LIMIT_S):
                raise RuntimeError(f"trainer rank {rank} gave no answer")
            succeeded, result = connection.recv()
            if not succeeded:
                raise RuntimeError(f"trainer rank {rank}:\n{result}")
            results.append(result)
        return results

    def call(self, method: str, *arguments: Any, by_rank: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        self.start_call(method, *arguments, by_rank=by_rank)
        return self.results()

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


def device_used_bytes() -> int:
    """Bytes in use on the current device, by all processes."""
    if platform.device_type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _serve(connection: Connection, environment: dict[str, str], log: Path, built: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if platform.device_type == "cpu":
        torch.set_num_threads(1)
        # The other way asks for a key that only relatives of this process have.
        torch.multiprocessing.set_sharing_strategy("file_system")
    rank: TrainerRank | None = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            if method == "start":
                rank = TrainerRank(*built)
                answer = None
            else:
                answer = getattr(rank, method)(*arguments)
        except Exception:
            connection.send((False, traceback.format_exc()))
        else:
            connection.send((True, answer))
