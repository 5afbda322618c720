"""CUDA devices: everything is as the libraries expect it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed import ProcessGroup, Store

from engine3d.errors import UserError
from engine3d.platform.copies import Copies, CopyMethod, RunCopies
from engine3d.platform.cuda import expandable as cuda_expandable
from engine3d.platform.cuda import memory as cuda_memory
from engine3d.platform.cuda.nccl_wire import NcclWire
from engine3d.platform.cuda.near_processors import stay_near
from engine3d.platform.cuda.page_locked import page_locked
from engine3d.platform.cuda.peer_memory import CudaPeerExchange, CudaPeerMemory
from engine3d.platform.interface import DeviceMemory, Platform
from engine3d.platform.memory_handles import MemoryHandle
from engine3d.platform.offload_memory import OffloadMemory
from engine3d.platform.peer_memory import PeerExchange, PeerMemory
from engine3d.platform.wire import Wire

# Dense bf16, from NVIDIA's datasheets; the PCIe and NVL forms of a chip are slower and have names of their own.
_PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "A100": 312e12,
}
_OCTAVES = [2**power for power in range(3, 20)]
_LARGE_BATCH = 256
_BLACKWELL = 10
_DETERMINISTIC = {
    # Of Transformer Engine's attention: the gradient of keys and values is summed in a fixed order.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    # Of cuBLAS: several streams share no workspace.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Of NCCL: sums over ranks are not taken in an order that depends on its tuning.
    "NCCL_ALGO": "Ring",
}


def graph_batch_sizes(most: int) -> list[int]:
    """The batches up to `most` for which decoding is captured, ascending; any other is padded to the next.

    By less than a quarter from 256 on, and by less than a half from 8 on, where a step's time hardly depends on its
    batch. Each size takes a second of an engine's start.
    """
    sizes = {1, 2, 4}
    for octave in _OCTAVES:
        sizes |= {octave * quarters // 4 for quarters in ((4, 6) if octave < _LARGE_BATCH else (4, 5, 6, 7))}
    smaller = sorted(size for size in sizes if size < most)
    if len(smaller) > 1:
        *fewer, last = smaller
        padded = fewer[-1] + 1  # the least batch that would run in the graph of `most` without the last one
        if last > most * 31 // 32 and most < (1.25 if padded >= _LARGE_BATCH else 1.5) * padded:
            smaller = fewer
    return [*smaller, most]


def expert_kernels(capabilities: Sequence[tuple[int, int]]) -> dict[str, str]:
    """SGLang's argument for the kernels of experts, on devices of these compute capabilities.

    On Blackwell SGLang would choose `flashinfer_trtllm`, which permutes the experts' weights once they are loaded:
    weights that are written later would be read in the wrong order. On other GPUs its own choice is Triton's too.
    """
    return {"moe_runner_backend": "triton"} if any(major >= _BLACKWELL for major, _ in capabilities) else {}


class CudaPlatform(Platform):
    device_type = "cuda"
    collective_backend = "nccl"

    @property
    def gpus(self) -> int:
        return torch.cuda.device_count()

    @property
    def peak_flops(self) -> float | None:
        name = torch.cuda.get_device_name()
        return next((rate for chip, rate in _PEAK_FLOPS.items() if chip in name), None)

    def device(self, local_rank: int) -> torch.device:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    def stay_near(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        stay_near(bus)

    def prepare_training(self) -> None:
        # Transformer Engine's: one kernel for all local experts, in place of a launch for each.
        os.environ.setdefault("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")

    def quantised_linears(
        self, inputs: Callable[[torch.Tensor], torch.Tensor], weights: Callable[[torch.Tensor], torch.Tensor]
    ) -> Mapping[type[torch.nn.Module], type[torch.nn.Module]]:
        raise UserError("precision=fp8 needs Transformer Engine, which is absent here; expected null")

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def take_workspaces(self) -> None:
        torch.cuda.empty_cache()  # or it would be cut from what the model's start has left
        ones = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        (ones @ ones).sum().backward()  # cuBLAS has a workspace for each thread

    def memory(self) -> DeviceMemory:
        return DeviceMemory(
            allocated=torch.cuda.memory_allocated(),
            peak=torch.cuda.max_memory_allocated(),
            peak_reserved=torch.cuda.max_memory_reserved(),
            total=torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
        )

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return page_locked(nbytes)

    def host_scratch(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def offload_memory(self, nbytes: int) -> OffloadMemory:
        return OffloadMemory(page_locked(nbytes))

    def visible_devices(self, devices: tuple[int, ...]) -> dict[str, str]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(max(devices) + 1)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[device].strip() for device in devices)}

    def training_environment(
        self, ranks: int, *, deterministic: bool = False, sends_to_engines: bool = False
    ) -> dict[str, str]:
        # Megatron-Core relies on kernels of one device being issued in order to overlap tensor-parallel traffic.
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} | (_DETERMINISTIC if deterministic else {})
        environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # no peer memory of ours is written so
        if sends_to_engines:
            # SGLang's own choice. NCCL fails with "unhandled cuda error" between processes of one machine that differ.
            environment["NCCL_CUMEM_ENABLE"] = os.environ.get("NCCL_CUMEM_ENABLE", "0")
        return environment

    def prepare_deterministic(self) -> None:
        for name, value in _DETERMINISTIC.items():
            if os.environ.get(name) != value:
                raise UserError(f"train.deterministic=true needs {name}={value} in the environment of every rank")
        torch.use_deterministic_algorithms(True)
        # Only speed: no result depends on memory that nobody wrote.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def rollout_server_arguments(self, most_requests: int) -> dict[str, Any]:
        return {
            # Both would compile for minutes on their first start.
            "disable_prefill_cuda_graph": True,
            "enforce_disable_flashinfer_allreduce_fusion": True,
            # SGLang's own choice ends at a size that goes by the GPU's memory; a larger batch runs kernel by kernel.
            "cuda_graph_bs_decode": graph_batch_sizes(most_requests),
        }

    def grammar_arguments(self) -> dict[str, Any]:
        return {}

    def sink_arguments(self) -> dict[str, Any]:
        # SGLang's own choice for gpt-oss keeps the weights of experts transposed.
        return {"moe_runner_backend": "triton", "disable_hybrid_swa_memory": True}

    def rollout_device_arguments(self) -> dict[str, Any]:
        # SGLang asks the devices too, in this process, so that this takes no more memory of them.
        return expert_kernels([torch.cuda.get_device_capability(index) for index in range(self.gpus)])

    def rollout_environment(self, tp: int, *, memory_saver: bool = False) -> dict[str, str]:
        # torch_memory_saver ends a process whose segments are expandable.
        return cuda_expandable.not_expandable(os.environ) if memory_saver else {}

    def rollout_memory_saver(self) -> Callable[[bool], Any] | None:
        return None

    def install_draft_kernels(self) -> None:
        """SGLang's own are there."""

    def draw_tokens(
        self, logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Triton is slow to import, and only engines need it.
        from engine3d.platform.cuda import sampling

        return sampling.draw_tokens(logits, temperatures, uniforms)

    def device_name(self, slot: int) -> str:
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def share_memory(self, storage: torch.UntypedStorage) -> MemoryHandle:
        return cuda_memory.share(storage)

    def shareable_memory(self) -> AbstractContextManager[None]:
        return cuda_expandable.shareable_memory()

    def map_memory(self, handle: MemoryHandle) -> torch.UntypedStorage:
        return cuda_memory.map_shared(handle)

    def copy_runner(self, copies: Copies, method: CopyMethod | None = None) -> RunCopies:
        # Triton is slow to import, and only transfers need it.
        from engine3d.platform.cuda import copy as cuda_copy

        return cuda_copy.runner(copies, method or "mixed")

    def peer_memory(self, group: ProcessGroup, nbytes: int, timeout_s: float) -> PeerMemory:
        return CudaPeerMemory(group, nbytes, timeout_s)

    def peer_exchange(self, group: ProcessGroup, nbytes: int, timeout_s: float) -> PeerExchange:
        return CudaPeerExchange(group, nbytes, timeout_s)

    def wire(self, store: Store, names: Sequence[str], rank: int, timeout_s: float) -> Wire:
        return NcclWire(store, names, rank, timeout_s)
