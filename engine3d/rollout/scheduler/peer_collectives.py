"""Tokens between groups of ranks with attention of their own, by kernels that write into the other ranks' memory.

Every layer of experts has SGLang gather the tokens of all groups, and sum up and scatter what its ranks' experts made
of them. With some hundreds of tokens NCCL takes longer to get going than to send them. Here one kernel puts a rank's
part into memory of the others, waits for theirs, and takes what they have put.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from engine3d.platform import platform
from engine3d.platform.peer_memory import WORD_BYTES, PeerExchange

PEER_BYTES = 32 << 20
"""Most bytes of all ranks' shards together, which decoding does not reach. Larger ones are sent by SGLang."""
PEER_MEMORY = 2 * PEER_BYTES
"""Bytes of peer memory of a rank, but for some KB: shards of one exchange may arrive while the previous ones are read.
"""
_TIMEOUT_S = 600.0

_peers: PeerExchange | None = None


def register() -> None:
    """Hook SGLang's collective operations, in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{runner}.init_torch_distributed", _connect, HookType.AFTER)
    group = "sglang.srt.distributed.parallel_state.GroupCoordinator"
    HookRegistry.register(f"{group}.all_gather_into_tensor", gather, HookType.AROUND)
    HookRegistry.register(f"{group}.reduce_scatterv", add_up, HookType.AROUND)


def _connect(result: Any, runner: Any) -> None:
    from sglang.srt.distributed.parallel_state import get_tp_group

    global _peers
    if not runner.is_draft_worker:
        _peers = platform.peer_exchange(get_tp_group().device_group, PEER_BYTES, _TIMEOUT_S)
        logging.getLogger(__name__).info("Tokens of up to %d MB go between ranks by kernels.", PEER_BYTES >> 20)


def gather(original: Callable[..., Any], group: Any, output: torch.Tensor, local: torch.Tensor) -> Any:
    """SGLang's `GroupCoordinator.all_gather_into_tensor`: (T, ...) of each rank -> (R * T, ...)."""
    peers = _of(group)
    if peers is None or not _fits(output, local):
        return original(group, output, local)
    peers.all_gather(local, output.view(group.world_size, *local.shape))
    return None


def add_up(
    original: Callable[..., Any],
    group: Any,
    full: torch.Tensor,
    output: torch.Tensor | None = None,
    sizes: list[int] | None = None,
) -> Any:
    """SGLang's `GroupCoordinator.reduce_scatterv`: (R * T, ...) of each rank -> (T, ...), the sum of its own part."""
    peers = _of(group)
    equal = sizes is None or len(set(sizes)) == 1
    shards = full.unflatten(0, (group.world_size, -1)) if equal and len(full) else full
    if peers is None or not equal or not full.is_floating_point() or not _fits(full, shards[:1]):
        return original(group, full, output=output, sizes=sizes)
    result = torch.empty_like(shards[0]) if output is None else output
    peers.reduce_scatter(shards, result)
    return result


def _of(group: Any) -> PeerExchange | None:
    """Peers of SGLang's group; None for any group but that of all ranks."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return _peers if _peers is not None and group is get_tp_group() else None


def _fits(full: torch.Tensor, shard: torch.Tensor) -> bool:
    """True if a tensor of this size is sent by kernels; the same on every rank."""
    words = 0 < full.nbytes <= PEER_BYTES and shard.nbytes % WORD_BYTES == 0
    return words and full.is_contiguous() and shard.is_contiguous()
