"""Saving and loading for real: bandwidth against plain writes to the same disk, stall, host memory."""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks.random_engine import leads, most, of_all, random_engine, random_sequences, say, timed, train_on
from engine3d.checkpoint.writing.save import EngineCheckpoint
from engine3d.layout import Layout
from engine3d.platform import platform
from engine3d.training.config import OptimizerConfig
from engine3d.training.engine import TrainEngine

_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class Case:
    """Model, layout and settings of a measurement.

    Args:
        config: the model's config.json.
        layout: of the trainer, whose ranks torchrun started.
        directory: on the disk that is measured; what is written there is removed again.
        tokens: of a training step, over all ranks.
        sequence: tokens of each sequence.
        micro_batch_tokens: of a rank.
        rounds: of plain writes and reads, a save and a load; perhaps none.
        saves: asynchronous ones; perhaps none.
        threads: files that a rank writes at a time.
        dtype: of the model.
        precision_aware: moments in bf16.
    """

    config: dict[str, Any]
    layout: Layout
    directory: Path
    tokens: int
    sequence: int
    micro_batch_tokens: int
    rounds: int
    saves: int
    threads: int
    dtype: str
    precision_aware: bool


def measure(case: Case) -> dict[str, Any] | None:
    """Run on every rank of the layout; the figures on rank 0."""
    leader = leads()
    if leader:
        case.directory.mkdir(parents=True)
    try:
        stats = _measure(case)
    finally:
        if dist.is_initialized():
            dist.barrier()
        if leader:
            shutil.rmtree(case.directory, ignore_errors=True)
    return stats if leader else None


def _measure(case: Case) -> dict[str, Any]:
    engine = _engine(case)
    checkpoint = EngineCheckpoint(engine, threads=case.threads)
    device = torch.cuda.get_device_name() if platform.gpus else "CPU"
    stats: dict[str, Any] = {"device": device, "parameters": checkpoint.summary.parameters}
    # Compiles, and gives the optimizer its moments.
    _step(engine, replace(case, tokens=case.micro_batch_tokens * case.layout.dp))
    resident = _resident()
    if case.saves:
        checkpoint.prepare()
        stats["step_while_memory_is_taken_s"] = timed(lambda: _step(engine, case))
    stats["step_s"] = statistics.median(timed(lambda: _step(engine, case)) for _ in range(2))
    say(f"step {stats['step_s']:.1f} s")

    stats["ranks"] = dist.get_world_size()
    if case.rounds:
        stats |= _blocking(case, engine, checkpoint)
    if case.saves:
        stats["asynchronous"] = _asynchronous(case, engine, checkpoint, stats["step_s"], resident)
    return stats


def _blocking(case: Case, engine: TrainEngine, checkpoint: EngineCheckpoint) -> dict[str, Any]:
    """Saves and loads that training waits for."""
    rounds = []
    for number in range(case.rounds):
        rounds.append(_round(case, engine, checkpoint, number))
        say(f"round {number}: {rounds[-1]}")
    median = {name: statistics.median(measured[name] for measured in rounds) for name in rounds[0]}
    stats: dict[str, Any] = {name: median[name] for name in ("state_bytes", "largest_rank_bytes")}
    stats["rounds"] = rounds
    for name in ("save", "load"):
        stats[f"{name}_over_plain_write"] = median[f"{name}_gb_s"] / median["plain_write_gb_s"]
    stats["load_over_plain_read"] = median["load_gb_s"] / median["plain_read_gb_s"]
    for name in ("save", "load"):
        stats[f"{name}_host_growth_over_shard"] = median[f"{name}_host_growth_bytes"] / median["largest_rank_bytes"]
    return stats


def _round(case: Case, engine: TrainEngine, checkpoint: EngineCheckpoint, number: int) -> dict[str, float]:
    """All rates in GB/s, one soon after another: those of a disk that others use too change by the minute."""
    directory = case.directory / f"round-{number}"
    with _host_memory() as save_growth:
        save_s = timed(lambda: _save(checkpoint, directory, background=False))
    state = sum(of_all(_own_bytes(directory)))
    largest = most(_own_bytes(directory))
    _forget(directory)
    with _host_memory() as load_growth:
        load_s = timed(lambda: (checkpoint.load(directory), platform.synchronize()))
    _remove(directory)
    plain_write, plain_read = _plain(case, state)
    return {
        "state_bytes": state,
        "largest_rank_bytes": largest,
        "save_gb_s": state / save_s / 1e9,
        "load_gb_s": state / load_s / 1e9,
        "plain_write_gb_s": plain_write,
        "plain_read_gb_s": plain_read,
        "save_host_growth_bytes": most(save_growth[0]),
        "load_host_growth_bytes": most(load_growth[0]),
    }


def _engine(case: Case) -> TrainEngine:
    return random_engine(
        case.config,
        case.layout,
        dtype=case.dtype,
        optimizer=OptimizerConfig(lr=1e-6, precision_aware=case.precision_aware),
        micro_batch_tokens=case.micro_batch_tokens,
        recompute="full" if platform.gpus else "none",
    )


def _step(engine: TrainEngine, case: Case) -> None:
    train_on(engine, random_sequences(engine, case.tokens, case.sequence))
    platform.synchronize()


def _save(checkpoint: EngineCheckpoint, directory: Path, *, background: bool) -> None:
    _make(directory)
    checkpoint.begin(directory, background=background)
    checkpoint.finish()


def _asynchronous(
    case: Case, engine: TrainEngine, checkpoint: EngineCheckpoint, step_s: float, resident: int
) -> dict[str, Any]:
    """Saves behind training: how long each rank stood still, and how long the steps meanwhile took.

    Args:
        resident: memory of this process in bytes before any was taken for saves.
    """
    stalls, durations, steps = [], [], []
    with _host_memory(resident) as growth:
        for number in range(case.saves):
            directory = case.directory / f"asynchronous-{number}"
            _make(directory)
            started = time.perf_counter()
            begun = checkpoint.begin(directory, background=True)
            stall = time.perf_counter() - started
            while most(not checkpoint.is_written()):
                steps.append(timed(lambda: _step(engine, case)))
            durations.append(time.perf_counter() - started)
            stall += timed(checkpoint.finish)
            stalls.append(most(stall))
            say(f"asynchronous save {number}: stall {stalls[-1]:.3f} s, whole after {durations[-1]:.1f} s")
            _remove(directory)
    stall = statistics.median(stalls[1:] or stalls)
    return {
        "first_stall_s": stalls[0],
        "stall_s": stall,
        "stall_of_step": stall / step_s,
        "whole_after_s": durations,
        "step_meanwhile_s": statistics.median(steps),
        "staged_bytes": most(begun.host_bytes),
        "written_bytes": most(begun.nbytes),
        "host_growth_bytes": most(growth[0]),
        "host_growth_over_shard": most(growth[0]) / most(begun.nbytes),
    }


def _plain(case: Case, state: int) -> tuple[float, float]:
    """Rates at which as many threads write (and make durable) and read as many bytes, in GB/s over all ranks."""
    directory = case.directory / "plain"
    _make(directory)
    share = state // dist.get_world_size() // case.threads
    block = torch.randint(256, (_BLOCK_BYTES,), dtype=torch.uint8).numpy().data
    paths = [directory / f"{dist.get_rank()}-{number}" for number in range(case.threads)]

    def write(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            for start in range(0, share, _BLOCK_BYTES):
                file.write(block[: min(_BLOCK_BYTES, share - start)])
            os.fsync(file.fileno())

    def read(path: Path) -> None:
        target = bytearray(_BLOCK_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(target):
                pass

    rates = []
    for action in (write, read):
        with ThreadPoolExecutor(case.threads) as pool:
            seconds = timed(lambda do=action: list(pool.map(do, paths)))  # type: ignore[misc]
        rates.append(share * case.threads * dist.get_world_size() / seconds / 1e9)
        _forget(directory)
    _remove(directory)
    return rates[0], rates[1]


def _forget(directory: Path) -> None:
    """Drop a directory's files from the page cache, so that they are read from the disk."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _host_memory(before: int | None = None) -> Iterator[list[int]]:
    """Measure the peak growth of this process's resident memory since `before`, in bytes. It is set once the block has
    ended.
    """
    before = _resident() if before is None else before
    growth, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            growth[0] = max(growth[0], _resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield growth
    finally:
        ended.set()
        watcher.join()


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _make(directory: Path) -> None:
    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()


def _remove(directory: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
    dist.barrier()


def _own_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob(f"__{dist.get_rank()}_*"))
