"""Rates of copies between page-locked host memory and GPUs, of one GPU alone and of all at once.

    python benchmarks/host_copies.py [--gb 8] > rates.json

An optimizer's state in host memory comes and goes so (`train.optimizer.offload`), in chunks of 512 MiB: into the GPU,
out of it, and both at once. Each GPU has a process of its own, as trainer's ranks are, which all start a copy together.
The memory is what ranks take (`page_locked`: CUDA takes it of the system), and memory in huge pages that CUDA locks
afterwards (`huge_pages`). Rates are of the slowest GPU, in GB/s each way; taking the memory is in seconds.
"""

from __future__ import annotations

import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.reshard_plan import Parser, versions
from engine3d.errors import UserError
from engine3d.platform import platform
from engine3d.training.host_state import CHUNK_BYTES

_ROUNDS = 3
_LIMIT_S = 120.0
_WAYS = ("in", "out", "both")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the exit code is 2 for arguments that cannot be right, or where it takes too long."""
    parser = Parser(prog="host_copies.py", description="Copies between page-locked host memory and GPUs.")
    parser.add_argument("--gb", type=float, default=8.0, help="of host memory for each GPU")
    by_kind: dict[str, Any] = {}
    try:
        options = parser.parse_args(arguments)
        chunks = int(options.gb * 1e9) // CHUNK_BYTES
        if chunks < 2:
            raise UserError(f"--gb {options.gb}: expected at least {2 * CHUNK_BYTES / 1e9:.2f}, two chunks")
        if not platform.gpus:
            raise UserError("this machine has no GPU, whose copies are measured")
        for kind in _MEMORY:
            for gpus in sorted({1, platform.gpus}):
                rates = by_kind.setdefault(kind, {})[f"{gpus} at once"] = measured(kind, gpus, chunks)
                reported = ", ".join(f"{way} {rates[way]:.1f} GB/s" for way in _WAYS)
                print(f"{kind}, {gpus} at once: {reported}; taken in {rates['taken_s']:.1f} s", file=sys.stderr)
    except UserError as error:
        print(f"host_copies.py: {error}", file=sys.stderr)
        return 2
    command = " ".join(["benchmarks/host_copies.py", *sys.argv[1:]])
    conditions = {"command": command, "device": torch.cuda.get_device_name(), "gb": chunks * CHUNK_BYTES / 1e9}
    print(json.dumps(conditions | {"rates": by_kind, "versions": versions()}, indent=2))
    return 0


def measured(kind: str, devices: int, chunks: int, part_bytes: int = CHUNK_BYTES) -> dict[str, float]:
    """GB/s of the slowest device, each way, and seconds until the slowest had its memory.

    Raises:
        UserError: they took too long; what a process raises is raised here.
    """
    context = torch.multiprocessing.get_context("forkserver")  # imports once, and has not used a device
    context.set_forkserver_preload([__name__])
    answers, barrier = context.SimpleQueue(), context.Barrier(devices)
    arguments = (kind, chunks, part_bytes, barrier, answers)
    ranks = torch.multiprocessing.start_processes(
        _rank, arguments, nprocs=devices, join=False, start_method="forkserver"
    )
    deadline = time.monotonic() + _LIMIT_S
    try:
        while not ranks.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise UserError(f"{kind}, {devices} at once: no rates within {_LIMIT_S:.0f} s")
    finally:
        for process in ranks.processes:
            process.kill()
    rates = [answers.get() for _ in range(devices)]
    taken_s = max(rank_rates["taken_s"] for rank_rates in rates)
    return {way: min(rank_rates[way] for rank_rates in rates) for way in _WAYS} | {"taken_s": taken_s}


def _rank(rank: int, kind: str, chunks: int, part_bytes: int, barrier: Any, answers: Any) -> None:
    """One device's part."""
    device = platform.device(rank)
    platform.synchronize()
    barrier.wait(_LIMIT_S)
    began = time.perf_counter()
    host = [_MEMORY[kind](part_bytes) for _ in range(chunks)]
    rates = {"taken_s": time.perf_counter() - began}
    coming, going = host[: chunks // 2], host[chunks // 2 :][: chunks // 2]
    here = [torch.empty(part_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = torch.get_device_module(device)
    ways = [streams.Stream(), streams.Stream()]

    def copy(way: str) -> None:
        for into, out in zip(coming, going, strict=True):
            if way != "out":
                with streams.stream(ways[0]):
                    here[0].copy_(into, non_blocking=True)
            if way != "in":
                with streams.stream(ways[1]):
                    out.copy_(here[1], non_blocking=True)
        platform.synchronize()

    for way in _WAYS:
        seconds = []
        for _ in range(_ROUNDS + 1):  # the first is left out
            barrier.wait(_LIMIT_S)
            began = time.perf_counter()
            copy(way)
            seconds.append(time.perf_counter() - began)
        rates[way] = len(coming) * part_bytes / statistics.median(seconds[1:]) / 1e9
    answers.put(rates)


def _huge_pages(nbytes: int) -> torch.Tensor:
    """(nbytes,) uint8 of page-locked memory, in huge pages where Linux has them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    tensor.zero_()  # Linux gives the pages now
    failed = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0))
    if failed:
        raise RuntimeError(f"cudaHostRegister: error {failed}")
    return tensor


_MEMORY: dict[str, Callable[[int], torch.Tensor]] = {"page_locked": platform.host_memory, "huge_pages": _huge_pages}


if __name__ == "__main__":
    sys.exit(main())
