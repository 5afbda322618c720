"""Rates of copies between page-locked host memory and GPUs, of one GPU alone and of all at once.

    python benchmarks/host_copies.py [--gb 8] > rates.json

An optimizer's state in host memory comes and goes so (`train.optimizer.offload`), in parts of 512 MB: into the GPU, out
of it, and both at once. Each GPU has a process of its own, as trainer's ranks are, which all start a copy together. The
memory is what ranks take (`page_locked`: CUDA takes it of the system), and memory in huge pages that CUDA locks
afterwards (`huge_pages`). Rates are of the slowest GPU, in GB/s each way; taking the memory is in seconds.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
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
from engine3d.training.host_state import PART_BYTES

_ROUNDS = 3
_LIMIT_S = 120.0
_WAYS = ("in", "out", "both")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the exit code."""
    parser = Parser(prog="host_copies.py", description="Copies between page-locked host memory and GPUs.")
    parser.add_argument("--gb", type=float, default=8.0, help="of host memory for each GPU")
    try:
        options = parser.parse_args(arguments)
        parts = int(options.gb * 1e9) // PART_BYTES
        if parts < 2:
            raise UserError(f"--gb {options.gb}: expected at least {2 * PART_BYTES / 1e9:.2f}, two parts")
        if not platform.gpus:
            raise UserError("this machine has no GPU, whose copies are measured")
    except UserError as error:
        print(f"host_copies.py: {error}", file=sys.stderr)
        return 2
    figures: dict[str, Any] = {}
    for kind in _MEMORY:
        for gpus in sorted({1, platform.gpus}):
            found = figures.setdefault(kind, {})[f"{gpus} GPU{'s' * (gpus > 1)}"] = _measured(kind, gpus, parts)
            told = ", ".join(f"{way} {found[way]:.1f} GB/s" for way in _WAYS)
            print(f"{kind}, {gpus} at once: {told}; taken in {found['taken_s']:.1f} s", file=sys.stderr)
    command = " ".join(["benchmarks/host_copies.py", *sys.argv[1:]])
    facts = {"command": command, "device": torch.cuda.get_device_name(), "gb": parts * PART_BYTES / 1e9}
    print(json.dumps(facts | {"rates": figures, "versions": versions()}, indent=2))
    return 0


def _measured(kind: str, gpus: int, parts: int) -> dict[str, float]:
    """GB/s of the slowest, each way, and seconds until the slowest had its memory."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(gpus), context.Queue()
    ranks = [context.Process(target=_rank, args=(kind, gpu, parts, barrier, answers)) for gpu in range(gpus)]
    for rank in ranks:
        rank.start()
    try:
        found = [answers.get(timeout=_LIMIT_S) for _ in ranks]
    finally:
        for rank in ranks:
            rank.join(_LIMIT_S)
            rank.kill()
    taken_s = max(each["taken_s"] for each in found)
    return {way: min(each[way] for each in found) for way in _WAYS} | {"taken_s": taken_s}


def _rank(kind: str, gpu: int, parts: int, barrier: Any, answers: Any) -> None:
    """One GPU's part."""
    torch.cuda.set_device(gpu)
    torch.cuda.synchronize()
    barrier.wait(_LIMIT_S)
    began = time.perf_counter()
    host = [_MEMORY[kind](PART_BYTES) for _ in range(parts)]
    taken_s = time.perf_counter() - began
    place = [torch.empty(PART_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    half = parts // 2
    rates: dict[str, float] = {}
    for way in _WAYS:
        seconds = []
        for number in range(_ROUNDS + 1):
            torch.cuda.synchronize()
            barrier.wait(_LIMIT_S)
            began = time.perf_counter()
            for part in range(half):
                if way != "out":
                    with torch.cuda.stream(streams[0]):
                        place[0].copy_(host[part], non_blocking=True)
                if way != "in":
                    with torch.cuda.stream(streams[1]):
                        host[half + part].copy_(place[1], non_blocking=True)
            torch.cuda.synchronize()
            if number:
                seconds.append(time.perf_counter() - began)
        rates[way] = half * PART_BYTES / sorted(seconds)[len(seconds) // 2] / 1e9
    answers.put(rates | {"taken_s": taken_s})


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
