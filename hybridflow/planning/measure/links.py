"""Rates of exchanges between the devices of a host, by the collective library that models use."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

from engine3d.errors import UserError
from engine3d.platform import platform
from hybridflow.planning.measure.rates import ROUNDS, MeasuredRate

_SMALL_BYTES, _DECODE_BYTES = 8, 512 << 10
_RESULTS = "seconds.pt"
_LIMIT_S = 240.0
_TIMES = 20


def measured_links(ranks: int, large_bytes: int) -> dict[str, MeasuredRate]:
    """Measure exchanges of ranks, each on a device of its own.

    Args:
        ranks: at least 2.
        large_bytes: that each rank sends in the large exchange.

    Returns:
        Rates by their name in `Hardware`.

    Raises:
        UserError: the ranks did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.spawn(_rank, (ranks, large_bytes, folder), ranks, join=False)
        ends = time.monotonic() + _LIMIT_S
        while not context.join(timeout=1.0):
            if time.monotonic() > ends:
                for process in context.processes:
                    process.kill()
                raise UserError(f"profile: exchanges of {ranks} ranks did not end within {_LIMIT_S:.0f} s")
        small, exchanged, decode_small, decode = torch.load(Path(folder) / _RESULTS)
    sent = large_bytes * (ranks - 1) / ranks
    reduced = _DECODE_BYTES * (ranks - 1) / ranks
    origin = f"measured, {platform.collective_backend}, {ranks} ranks"
    return {
        "message_s": MeasuredRate(small / (ranks - 1), f"{origin}, all-to-all of {_SMALL_BYTES} bytes"),
        "node_rate": MeasuredRate(
            sent / max(1e-9, exchanged - small), f"{origin}, all-to-all of {large_bytes:,} bytes"
        ),
        "nccl_s": MeasuredRate(decode_small, f"{origin}, all-reduce of {_SMALL_BYTES} bytes"),
        "nccl_small_rate": MeasuredRate(reduced / max(1e-9, decode - decode_small), f"{origin}, all-reduce of 512 KiB"),
    }


def _rank(rank: int, ranks: int, large_bytes: int, folder: str) -> None:
    torch.set_num_threads(1)
    device = platform.device(rank if platform.gpus else 0)
    dist.init_process_group(
        platform.collective_backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_LIMIT_S),
    )

    def all_to_all(nbytes: int) -> Callable[[], object]:
        sent = torch.zeros(max(ranks, nbytes // 4 // ranks * ranks), device=device)
        received = torch.empty_like(sent)
        return lambda: dist.all_to_all_single(received, sent)

    def all_reduce(nbytes: int) -> Callable[[], object]:
        summed = torch.zeros(nbytes // 4, device=device)
        return lambda: dist.all_reduce(summed)

    exchanges = (all_to_all(_SMALL_BYTES), all_to_all(large_bytes), all_reduce(_SMALL_BYTES), all_reduce(_DECODE_BYTES))
    seconds = torch.tensor([_shortest(exchange) for exchange in exchanges])
    if rank == 0:
        torch.save(seconds.tolist(), Path(folder) / _RESULTS)
    dist.barrier()
    dist.destroy_process_group()


def _shortest(exchange: Callable[[], object]) -> float:
    """Measure the seconds of an exchange: the shortest of some rounds."""
    rounds = []
    for _ in range(ROUNDS + 1):
        dist.barrier()
        platform.synchronize()
        began = time.perf_counter()
        for _ in range(_TIMES):
            exchange()
        platform.synchronize()
        rounds.append((time.perf_counter() - began) / _TIMES)
    return min(rounds[1:])
