"""PyTorch's symmetric memory: memory of GPUs that all ranks of a group write into."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory

from engine3d.platform.peer_memory import Copy, PeerExchange, PeerMemory


@functools.cache
def _copy_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all copies of a device: one set after the other, each at the full rate."""
    return torch.cuda.Stream(device)


class CudaPeerMemory(PeerMemory):
    """Memory that no allocator of PyTorch counts; freed with the last tensor of it.

    Args:
        group: whose ranks have a GPU each, with access to those of the others.
        nbytes: of each rank.
        timeout_s: of waits of one GPU for another, which end the process with a message of PyTorch.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, timeout_s: float) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self._local = _SymmetricMemory.empty_strided_p2p((nbytes,), [1], torch.uint8, device, group.group_name)
        self._handle = _SymmetricMemory.rendezvous(self._local)
        memory = [self._handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]
        super().__init__(group.rank(), memory)
        self._timeout_ms = max(1, round(1000 * timeout_s))
        self._copy_stream = _copy_stream(device.index)

    def meet(self) -> None:
        self._handle.barrier(0, self._timeout_ms)

    def copy(self, copies: Sequence[Copy]) -> Callable[[], None]:
        # No kernel is queued next to the others. With CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron-Core needs, one
        # that waits for the copies would delay all that is queued after it. A copy within a device is a kernel.
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            done = self._copy_stream.record_event()

        def wait(kept: Sequence[Copy] = copies) -> None:  # or their memory would be used for something else
            torch.cuda.current_stream().wait_event(done)

        return wait


class CudaPeerExchange(PeerExchange):
    """One kernel that writes into the other GPUs' memory, waits for what they write into this one's, and takes it.

    Args:
        group, timeout_s: as of `CudaPeerMemory`.
        nbytes: of all ranks' tensors together, at most.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, timeout_s: float) -> None:
        # Triton is slow to import, and only engines need it here.
        from engine3d.platform.cuda.kernels import peer as peer_kernels

        super().__init__(group.rank(), group.size())
        layout = peer_kernels.ExchangeBuffer.of(nbytes, self.ranks)
        self._memory = CudaPeerMemory(group, layout.nbytes, timeout_s)
        self._memory.of(self.rank, (layout.nbytes,), torch.uint8).zero_()
        self._memory.meet()
        addresses = [self._memory.of(rank, (layout.nbytes,), torch.uint8).data_ptr() for rank in range(self.ranks)]
        self._kernels = peer_kernels.ExchangeKernels(self.rank, addresses, layout, timeout_s)

    def all_gather(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        self._kernels.all_gather(tensor, into)

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        self._kernels.reduce_scatter(tensor, into)
