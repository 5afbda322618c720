"""Memory ledger of a run: the predicted memory of every GPU, CPU slot and host, as text and as a check that it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine3d.errors import UserError, amount
from hybridflow.cluster.devices.device_map import Device


@dataclass(frozen=True)
class MemoryPhase:
    """The worst moment of a phase on a GPU.

    Args:
        name: of the phase and of the role that is at work.
        items: what is there beside what always is, by name, in bytes.
        less: the settings that would make it less.
    """

    name: str
    items: Mapping[str, int]
    less: str


@dataclass(frozen=True)
class GpuMemory:
    """Memory of some GPUs that are alike; or node memory of the ranks on some CPU slots.

    Args:
        devices: that are alike, in order.
        always: what is there in every phase once the first update is made, by name, in bytes.
        phases: in the order of a step.
        cache_tokens: that the KV cache has room for; 0 where no engine runs.
        stages: for each role with a pipeline, its number of stages, and those on these GPUs.
    """

    devices: tuple[Device, ...]
    always: Mapping[str, int]
    phases: tuple[MemoryPhase, ...]
    cache_tokens: int
    stages: Mapping[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def is_like(self, other: GpuMemory) -> bool:
        """True if GPUs have the same memory, on whichever stage of a pipeline."""
        return replace(self, devices=(), stages={}) == replace(other, devices=(), stages={})

    def joined(self, other: GpuMemory) -> GpuMemory:
        """Join the GPUs with others that are like them."""
        stages = {
            role: (count, tuple(sorted({*numbers, *other.stages[role][1]})))
            for role, (count, numbers) in self.stages.items()
        }
        return replace(self, devices=(*self.devices, *other.devices), stages=stages)

    @property
    def name(self) -> str:
        """Name of the GPUs, with their stages of pipelines."""
        stages = [
            f"{role} stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of {count}"
            for role, (count, numbers) in self.stages.items()
        ]
        return _names(self.devices) + (f" ({', '.join(stages)})" if stages else "")

    def total(self, phase: MemoryPhase) -> int:
        """Bytes of all that is there in a phase."""
        return sum(self.always.values()) + sum(phase.items.values())

    @property
    def worst(self) -> MemoryPhase:
        return max(self.phases, key=self.total)

    @property
    def on_cpu(self) -> bool:
        """True if these are CPU slots."""
        return any(device.kind == "cpu" for device in self.devices)


@dataclass(frozen=True)
class HostMemory:
    """Memory of a node that a run takes.

    Args:
        items: by name, in bytes.
        less: the setting that would make the largest of them less.
        page_locked: whether all of it is.
    """

    items: Mapping[str, int]
    less: str
    page_locked: bool = True

    @property
    def total(self) -> int:
        return sum(self.items.values())

    def __str__(self) -> str:
        """Return the size of the memory and its kind."""
        return f"{amount(self.total, 1)} of host memory{', page-locked' if self.page_locked else ''}"


@dataclass(frozen=True)
class MemoryLedger:
    """Predicted memory of a run.

    Args:
        gpus: in order of the first of the devices that are alike.
        gpu_bytes: of each GPU; None where that is not known.
        hosts: what is taken of each node's memory.
        sequence_tokens: of the longest prompt with its response.
        requests: that an engine is to run at once.
        host_bytes: of each node's memory; None where that is not known.
    """

    gpus: tuple[GpuMemory, ...]
    gpu_bytes: int | None
    hosts: tuple[HostMemory, ...]
    sequence_tokens: int
    requests: int
    host_bytes: int | None = None

    def lines(self) -> list[str]:
        """Return the ledger as text: for each kind of GPU every phase with its items, in GB (1e9 bytes)."""
        lines = []
        for gpu in self.gpus:
            cache = f", KV cache of {gpu.cache_tokens:,} tokens" if gpu.cache_tokens else ""
            if gpu.cache_tokens and (fit := gpu.cache_tokens // self.sequence_tokens) < self.requests:
                cache += f": {fit} of {self.requests} requests at once, where all are of {self.sequence_tokens} tokens"
            has = "" if self.gpu_bytes is None or gpu.on_cpu else f" of {self.gpu_bytes / 1e9:.1f}"
            most = f"{gpu.total(gpu.worst) / 1e9:.1f}{has} GB in {gpu.worst.name}"
            lines.append(f"{gpu.name}: at most {most}{cache}")
            lines.append(_line("always", sum(gpu.always.values()), gpu.always))
            lines += [_line(phase.name, gpu.total(phase), phase.items, "+ ") for phase in gpu.phases]
        if any(gpu.stages for gpu in self.gpus):
            gpu = self._heaviest(self.gpus)
            lines.append(f"most: {gpu.total(gpu.worst) / 1e9:.1f} GB on {gpu.name} in {gpu.worst.name}")
        for node, host in enumerate(self.hosts):
            if host.items:
                lines.append(f"node {node}: {host}: {_items(host.items)}")
        return lines

    @staticmethod
    def _heaviest(gpus: Sequence[GpuMemory]) -> GpuMemory:
        return max(gpus, key=lambda gpu: gpu.total(gpu.worst))

    def check(self) -> None:
        """Refuse a run that cannot fit, as far as sizes are known.

        Raises:
            UserError: names the GPU that needs the most, or the first node, the phase, what is there, what to change.
        """
        on_gpus = [gpu for gpu in self.gpus if not gpu.on_cpu]
        if self.gpu_bytes is not None and on_gpus:
            gpu = self._heaviest(on_gpus)
            worst, total = gpu.worst, gpu.total(gpu.worst)
            if total > self.gpu_bytes:
                items = _items({**gpu.always, **worst.items})
                raise UserError(
                    f"{gpu.name}: {amount(total, 1)} in phase {worst.name} on a GPU of "
                    f"{amount(self.gpu_bytes, 1)} ({items}); to need less: {worst.less}"
                )
        for node, host in enumerate(self.hosts):
            if self.host_bytes is not None and host.total > self.host_bytes:
                raise UserError(
                    f"node {node}: {host}, on a node of {amount(self.host_bytes, 1)} ({_items(host.items)}); to need "
                    f"less: {host.less}, or more nodes"
                )


def _names(devices: Sequence[Device]) -> str:
    first = devices[0]
    more = f" and {len(devices) - 1} like it" if len(devices) > 1 else ""
    what = "GPU" if first.kind == "cuda" else "CPU slot"
    return f"{what} {first.index} of node {first.node}{more}"


def _line(name: str, total: int, items: Mapping[str, int], before: str = "") -> str:
    there = _items(items)
    return f"  {name:<22}{total / 1e9:>7.1f}" + (f"  {before}{there}" if there else "")


def _items(items: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / 1e9:.1f}" for name, size in items.items() if size >= 5e7)
