"""Interface of what differs between a CUDA machine and a CPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from engine3d.platform.copies import Copies, CopyMethod, RunCopies
from engine3d.platform.memory_handles import MemoryHandle
from engine3d.platform.offload_memory import OffloadMemory
from engine3d.platform.peer_memory import PeerExchange, PeerMemory
from engine3d.platform.wire import Wire
from engine3d.startup.lazy_imports import dist, torch


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device, as seen from this process.

    Args:
        allocated: by tensors, now.
        peak: by tensors, at most so far.
        peak_reserved: reserved for tensors, at most so far.
        total: of the device.
    """

    allocated: int
    peak: int
    peak_reserved: int
    total: int


class Platform(ABC):
    """One kind of device. `engine3d.platform.platform` is the one of this machine."""

    device_type: str

    @property
    @abstractmethod
    def collective_backend(self) -> str:
        """PyTorch's name of the backend of process groups."""

    @property
    @abstractmethod
    def gpus(self) -> int:
        """GPUs that this process sees."""

    @property
    @abstractmethod
    def peak_flops(self) -> float | None:
        """Dense bf16 operations a second that the device's maker states, without sparsity; None where not known."""

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """The device of a rank, made current for this process."""

    @abstractmethod
    def stay_near(self, device: torch.device) -> None:
        """Keep this thread, and those that it starts from here on, to the processors on the device's side of the host.

        Some hosts do not say which those are; all are taken then.
        """

    @abstractmethod
    def prepare_training(self) -> None:
        """Make this process ready for Megatron-Core; called before any model is built. Idempotent."""

    @abstractmethod
    def quantised_linears(
        self, inputs: Callable[[torch.Tensor], torch.Tensor], weights: Callable[[torch.Tensor], torch.Tensor]
    ) -> Mapping[type[torch.nn.Module], type[torch.nn.Module]]:
        """Megatron-Core's own linear layers, each with the one in its place whose GEMMs have quantised operands.

        Args:
            inputs, weights: quantise an operand and dequantise it.

        Raises:
            UserError: the device has kernels for quantised operands, which are Transformer Engine's.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the work queued on the device."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Return unused memory of the allocator to the device."""

    @abstractmethod
    def take_workspaces(self) -> None:
        """Allocate what libraries keep from their first use on, in this thread and in autograd's, as memory of its own.

        Otherwise PyTorch's allocator cuts it from what is free by then, such as the memory of a micro-batch's logits,
        none of which could be freed after that.
        """

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Memory of this process's current device."""

    @abstractmethod
    def host_memory(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 of host memory that the device copies into at its full rate. No more is taken of the system.

        To be called in a thread whose device is current.

        Raises:
            RuntimeError: there is not so much.
        """

    @abstractmethod
    def host_scratch(self, nbytes: int) -> torch.Tensor:
        """`host_memory` from PyTorch's cache of such memory: quick to take, and rounded up to a power of two."""

    @abstractmethod
    def offload_memory(self, nbytes: int) -> OffloadMemory:
        """Memory for what is offloaded from the device. `memory` does not count it while it rests.

        Raises:
            RuntimeError: there is not so much.
        """

    @abstractmethod
    def visible_devices(self, devices: tuple[int, ...]) -> dict[str, str]:
        """The environment in which a new process sees just these of the devices that this process sees, by index."""

    @abstractmethod
    def training_environment(
        self, ranks: int, *, deterministic: bool = False, sends_to_engines: bool = False
    ) -> dict[str, str]:
        """Environment of a training process that shares its machine with `ranks` of them.

        Args:
            deterministic: training is to make the same bits in every run; see `prepare_deterministic`.
            sends_to_engines: it is to have process groups with ranks of engines on its own machine.
        """

    @abstractmethod
    def prepare_deterministic(self) -> None:
        """Make this process compute the same bits in every run, in an environment made for it.

        Raises:
            UserError: the environment is not made for it.
        """

    @abstractmethod
    def rollout_server_arguments(self, most_requests: int) -> dict[str, Any]:
        """SGLang engine arguments that this platform needs, for an engine that runs at most `most_requests` at once."""

    @abstractmethod
    def grammar_arguments(self) -> dict[str, Any]:
        """More of them, for a server that is asked for answers of a schema."""

    @abstractmethod
    def sink_arguments(self) -> dict[str, Any]:
        """More of them, for a model whose attention has sinks."""

    @abstractmethod
    def rollout_device_arguments(self) -> dict[str, Any]:
        """More of them, for the devices that this process sees; called in SGLang's own main process."""

    @abstractmethod
    def rollout_environment(self, tp: int, *, memory_saver: bool = False) -> dict[str, str]:
        """Environment that SGLang's processes need on this platform, for a tensor parallel size.

        Args:
            memory_saver: the engine is to release memory.
        """

    @abstractmethod
    def rollout_memory_saver(self) -> Callable[[bool], Any] | None:
        """Replacement of `TorchMemorySaverAdapter.create` in SGLang's processes; None where that works."""

    @abstractmethod
    def install_draft_kernels(self) -> None:
        """Make SGLang's speculative decoding run in this process, one of its schedulers, before it loads a model."""

    @abstractmethod
    def draw_tokens(
        self, logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token for each row of logits, drawn from softmax(logits / temperature), and its log-prob there.

        Tokens are drawn by inversion: the first whose cumulative probability is larger than the row's random number.
        One that has no probability is never drawn.

        Args:
            logits: (rows, vocabulary), of any floating-point dtype; read only.
            temperatures: (rows,), above 0.
            uniforms: (rows,) float64, random numbers from 0 up to 1, without 1.

        Returns:
            Token ids, (rows,) int32, and log-probs, (rows,) float32. A row without a distribution, as one with a nan or
            +inf has none, gets token 0 with log-prob nan.
        """

    @abstractmethod
    def device_name(self, slot: int) -> str:
        """Name of a device, unique in its node, for all processes.

        Args:
            slot: number of a rank of the node that has no device of its own, as on a CPU.
        """

    @abstractmethod
    def share_memory(self, storage: torch.UntypedStorage) -> MemoryHandle:
        """Share a storage with other processes of the node, for as long as it lives. Twice gives the same handle.

        Raises:
            EngineError: shared memory is full, or its memory is of a kind that cannot be shared.
        """

    @abstractmethod
    def shareable_memory(self) -> AbstractContextManager[None]:
        """Make torch allocate device memory in the block that `share_memory` can share."""

    @abstractmethod
    def map_memory(self, handle: MemoryHandle) -> torch.UntypedStorage:
        """Memory that another process shares, on this process's current device. What it shared itself is itself.

        Raises:
            EngineError: the process is gone, or its memory cannot be reached.
        """

    @abstractmethod
    def copy_runner(self, copies: Copies, method: CopyMethod | None = None) -> RunCopies:
        """Return a function that runs many copies at once, on the current device, any number of times.

        Args:
            copies: between memory that this process reaches. The caller keeps them for as long as they may run.
            method: of a GPU, instead of the one that was measured to be the fastest.
        """

    @abstractmethod
    def peer_memory(self, group: dist.ProcessGroup, nbytes: int, timeout_s: float) -> PeerMemory:
        """Memory of this process's current device that all ranks of a group write into; called by all of them.

        Args:
            group: whose ranks are on one host, with a device each.
            nbytes: of each rank.
            timeout_s: of each wait for another rank.
        """

    @abstractmethod
    def peer_exchange(self, group: dist.ProcessGroup, nbytes: int, timeout_s: float) -> PeerExchange:
        """Exchange between all ranks of a group; called by all of them.

        Args:
            group, timeout_s: as of `peer_memory`.
            nbytes: of all ranks' tensors together, at most.
        """

    @abstractmethod
    def wire(self, store: dist.Store, names: Sequence[str], rank: int, timeout_s: float) -> Wire:
        """Connect the participants of transfers; a group apart from any that the processes have.

        Args:
            store: that all of them reach, used by no other group.
            names: how errors call them.
            rank: this one's index among them.
            timeout_s: of each wait.

        Raises:
            WireError: not all of them came in time; the message names those who did not.
        """

    @cached_property
    def node(self) -> str:
        """Unique name of the node. Containers of one machine are different nodes, because they map no shared memory."""
        # Two machines may have the same host name, and two containers of one machine too. Memory is mapped through the
        # number of the process that shares it, which is the same for processes of one namespace.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        return f"{socket.gethostname()}-{boot[:8]}-{namespace}"

    @cached_property
    def has_transformer_engine(self) -> bool:
        """True if layers are built from Transformer Engine."""
        if self.device_type != "cuda" or importlib.util.find_spec("transformer_engine") is None:
            return False
        # The extension is a module of its own where it was built from source, and inside the package in a wheel.
        built = importlib.util.find_spec("transformer_engine_torch") is not None
        return built or distribution_version("transformer_engine_torch") != "absent"

    @cached_property
    def has_fused_weight_gradient(self) -> bool:
        """True if apex's fused weight gradient accumulation is installed for Megatron-Core's own linear layers."""
        return self.device_type == "cuda" and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None

    def libraries(self) -> dict[str, str]:
        """Installed libraries that decide speed: distribution name to version, or "absent"."""
        names = ("torch", "megatron-core", "transformer-engine", "sglang", "ray")
        versions_by_name = {name: distribution_version(name) for name in names}
        versions_by_name["apex"] = "present" if importlib.util.find_spec("amp_C") else "absent"
        installed = ("flash-attn", "flash-attn-4") if importlib.util.find_spec("flash_attn") else ()
        versions = [version for name in installed if (version := distribution_version(name)) != "absent"]
        versions_by_name["flash-attn"] = versions[0] if versions else "absent"
        return versions_by_name


def distribution_version(distribution: str) -> str:
    """Version of an installed distribution, or "absent"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
