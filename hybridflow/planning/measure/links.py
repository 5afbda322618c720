"""Rates of exchanges between the devices of a host, by the collective library that models use."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from engine3d.platform import platform
from hybridflow.planning.measure.ranks import on_ranks, seconds_together
from hybridflow.planning.measure.rates import MeasuredRate

_SMALL_BYTES, _DECODE_BYTES = 8, 512 << 10
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
    small, exchanged, decode_small, decode = on_ranks(_exchanges, ranks, ranks, large_bytes)
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


def _exchanges(ranks: int, large_bytes: int) -> list[float]:
    """Seconds of a small and a large all-to-all, and of a small and a decoding step's all-reduce."""
    device = platform.device(dist.get_rank() if platform.gpus else 0)

    def all_to_all(nbytes: int) -> Callable[[], object]:
        sent = torch.zeros(max(ranks, nbytes // 4 // ranks * ranks), device=device)
        received = torch.empty_like(sent)
        return lambda: dist.all_to_all_single(received, sent)

    def all_reduce(nbytes: int) -> Callable[[], object]:
        summed = torch.zeros(nbytes // 4, device=device)
        return lambda: dist.all_reduce(summed)

    exchanges = (all_to_all(_SMALL_BYTES), all_to_all(large_bytes), all_reduce(_SMALL_BYTES), all_reduce(_DECODE_BYTES))
    return [seconds_together(exchange, _TIMES) for exchange in exchanges]
