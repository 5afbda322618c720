"""The CPU, where the same Megatron-Core and the same SGLang run over gloo."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine3d.platform.copies import Copies, CopyMethod, RunCopies
from engine3d.platform.cpu import gloo_groups
from engine3d.platform.cpu import memory as cpu_memory
from engine3d.platform.cpu.gloo_wire import GlooWire
from engine3d.platform.cpu.memory import CpuPeerExchange, CpuPeerMemory
from engine3d.platform.interface import DeviceMemory, Platform
from engine3d.platform.memory_handles import MemoryHandle
from engine3d.platform.offload_memory import FileMemory, OffloadMemory
from engine3d.platform.peer_memory import PeerExchange, PeerMemory
from engine3d.platform.wire import Wire
from engine3d.startup import leave_out
from engine3d.startup.lazy_imports import dist, torch

if TYPE_CHECKING:
    from torch import Tensor


def draw_tokens(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """See `Platform.draw_tokens`."""
    every = (logits.float() / temperatures[:, None]).log_softmax(dim=-1)
    probabilities = every.double().exp()
    cumulative = probabilities.cumsum(dim=-1)
    targets = uniforms[:, None] * cumulative[:, -1:]
    # Where rounding leaves none beyond, the last that can be drawn.
    columns = torch.arange(logits.shape[1], device=logits.device)
    last = torch.where(probabilities > 0, columns, 0).amax(dim=-1, keepdim=True)
    tokens = torch.minimum(torch.searchsorted(cumulative, targets, right=True), last)
    return tokens[:, 0].int(), every.gather(1, tokens)[:, 0]


_FOR_GPUS = ("flash_attn", "flashinfer", "cutlass", "quack")
"""Kernels that run on no CPU. Megatron-Core and SGLang import them where they are installed, which takes seconds of
each process; where they cannot be imported, both do without."""


class CpuPlatform(Platform):
    device_type = "cpu"

    def __init__(self) -> None:
        leave_out(*_FOR_GPUS)

    @property
    def collective_backend(self) -> str:
        gloo_groups.register()
        return gloo_groups.BACKEND

    @property
    def gpus(self) -> int:
        return 0

    @property
    def peak_flops(self) -> float | None:
        return None

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def prepare_training(self) -> None:
        from engine3d.platform.cpu import megatron as megatron_cpu  # its classes are torch's

        megatron_cpu.answer_for_cuda()

    def quantised_linears(
        self, inputs: Callable[[torch.Tensor], torch.Tensor], weights: Callable[[torch.Tensor], torch.Tensor]
    ) -> Mapping[type[torch.nn.Module], type[torch.nn.Module]]:
        from engine3d.platform.cpu.quantised_linears import quantised_linears  # its classes are Megatron-Core's

        return quantised_linears(inputs, weights)

    def synchronize(self) -> None:
        """Do nothing: a CPU queues nothing."""

    def empty_cache(self) -> None:
        """torch keeps none on a CPU; the C library keeps what was freed between two allocations that live."""
        ctypes.CDLL(None).malloc_trim(0)

    def take_workspaces(self) -> None:
        """Do nothing: the allocator returns free memory page by page."""

    def memory(self) -> DeviceMemory:
        page = os.sysconf("SC_PAGE_SIZE")
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return DeviceMemory(allocated=resident, peak=peak, peak_reserved=peak, total=os.sysconf("SC_PHYS_PAGES") * page)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def host_scratch(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def offload_memory(self, nbytes: int) -> OffloadMemory:
        return FileMemory(nbytes)

    def visible_devices(self, devices: tuple[int, ...]) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ""}

    def stay_near(self, device: torch.device) -> None:
        """Do nothing: a processor is near itself."""

    def prepare_deterministic(self) -> None:
        """Do nothing: a CPU is deterministic."""

    def training_environment(
        self, ranks: int, *, deterministic: bool = False, sends_to_engines: bool = False
    ) -> dict[str, str]:
        cores = len(os.sched_getaffinity(0))
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // ranks)))}

    def rollout_server_arguments(self, most_requests: int) -> dict[str, Any]:
        # SGLang is slow to import, and only its workers need it.
        from engine3d.platform.cpu import sglang as sglang_cpu

        return sglang_cpu.server_arguments()

    def grammar_arguments(self) -> dict[str, Any]:
        return {"grammar_backend": "outlines"}  # the others have kernels for GPUs alone

    def sink_arguments(self) -> dict[str, Any]:
        from engine3d.platform.cpu import sglang as sglang_cpu

        return sglang_cpu.sink_arguments()

    def rollout_device_arguments(self) -> dict[str, Any]:
        return {}

    def rollout_environment(self, tp: int, *, memory_saver: bool = False) -> dict[str, str]:
        from engine3d.platform.cpu import sglang as sglang_cpu

        return sglang_cpu.environment(tp)

    def rollout_memory_saver(self) -> Callable[[bool], Any] | None:
        from engine3d.platform.cpu.sglang_modules import memory as sglang_cpu_memory

        return sglang_cpu_memory.create

    def install_draft_kernels(self) -> None:
        from engine3d.platform.cpu.sglang_modules import speculation

        speculation.install()

    def draw_tokens(
        self, logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return draw_tokens(logits, temperatures, uniforms)

    def device_name(self, slot: int) -> str:
        return f"cpu:{slot}"

    def share_memory(self, storage: torch.UntypedStorage) -> MemoryHandle:
        return cpu_memory.share(storage)

    def shareable_memory(self) -> AbstractContextManager[None]:
        return nullcontext()

    def map_memory(self, handle: MemoryHandle) -> torch.UntypedStorage:
        return cpu_memory.map_shared(handle)

    def copy_runner(self, copies: Copies, method: CopyMethod | None = None) -> RunCopies:
        targets, sources = copies.simplified().views()

        def run() -> None:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)

        return run if targets else _nothing

    def peer_memory(self, group: dist.ProcessGroup, nbytes: int, timeout_s: float) -> PeerMemory:
        return CpuPeerMemory(group, nbytes)

    def peer_exchange(self, group: dist.ProcessGroup, nbytes: int, timeout_s: float) -> PeerExchange:
        return CpuPeerExchange(group, nbytes)

    def wire(self, store: dist.Store, names: Sequence[str], rank: int, timeout_s: float) -> Wire:
        return GlooWire(store, names, rank, timeout_s)


def _nothing() -> None:
    """There is nothing to copy."""
