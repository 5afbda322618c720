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
"""Of all ranks' parts together, at most, which decoding does not reach. What is larger is sent as without."""
PEER_MEMORY = 2 * PEER_BYTES
"""That a rank has for it, but for some KB: one exchange's parts may come while those of the one before are taken."""
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


def gather(original: Callable[..., Any], group: Any, output: torch.Tensor, own: torch.Tensor) -> Any:
    """SGLang's `GroupCoordinator.all_gather_into_tensor`: (T, ...) of each rank -> (R * T, ...)."""
    peers = _of(group)
    if peers is None or not _fits(output, own):
        return original(group, output, own)
    peers.gather(own, output.view(group.world_size, *own.shape))
    return None


def add_up(
    original: Callable[..., Any],
    group: Any,
    whole: torch.Tensor,
    output: torch.Tensor | None = None,
    sizes: list[int] | None = None,
) -> Any:
    """SGLang's `GroupCoordinator.reduce_scatterv`: (R * T, ...) of each rank -> (T, ...), the sum of its own part."""
    peers = _of(group)
    equal = sizes is None or len(set(sizes)) == 1
    parts = whole.unflatten(0, (group.world_size, -1)) if equal and len(whole) else whole
    if peers is None or not equal or not whole.is_floating_point() or not _fits(whole, parts[:1]):
        return original(group, whole, output=output, sizes=sizes)
    result = torch.empty_like(parts[0]) if output is None else output
    peers.add_up(parts, result)
    return result


def _of(group: Any) -> PeerExchange | None:
    """What the ranks of SGLang's group have mapped; None for another group than that of all ranks."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return _peers if _peers is not None and group is get_tp_group() else None


def _fits(whole: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether so much goes by kernels, which is the same on every rank."""
    words = 0 < whole.nbytes <= PEER_BYTES and part.nbytes % WORD_BYTES == 0
    return words and whole.is_contiguous() and part.is_contiguous()
