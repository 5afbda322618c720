"""Rates of a GPU, of its kernels and of its links: hardware profiles, as files that say where each number comes from.

A profile is a YAML file: `name`, `gpu` (as the driver names it), `interval`, `measured`, and `rates`, each with
`value`, `unit` and `origin`. Those of `profiles/` ship with the project, those that `hybridflow profile` measures also
have `machine`.
"""

from __future__ import annotations

import math
import os
import platform as host
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from engine3d.errors import UserError, shortened
from engine3d.platform import platform
from hybridflow.cluster.devices.nvml import answer, visible_gpus
from hybridflow.cluster.hosts.checks.facts import machine_bytes
from hybridflow.rundir.yaml_reader import read_yaml_file

PROFILES = Path(__file__).parent / "profiles"

_SHIPPED = "profile: {name}; expected one of {names}, or a file of this form"
_LINK = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(Gb|GB)(?:/s)?")
_MAY_BE_NONE = ("linear_half", "cores")
"""Rates besides seconds that may be 0."""
_LINK_SHARE = 0.9
"""Share of a network link's rate that transfers reach (45 of 50 GB/s of a 400 Gb/s link in published transfers)."""


FLASH_ATTENTION = 1.17
"""Rate of FlashAttention 4 over cuDNN's (h200-4gpu-12-layers-copies-fused-flash-third-kernels.txt)."""
_SHARED_RATES = ("flops", "memory_rate", "node_rate")
_SHARED_SECONDS = (
    "layer_s",
    "sparse_layer_s",
    "unfused_layer_s",
    "sequence_s",
    "update_s",
    "scoring_s",
    "decode_layer_s",
    "decode_host_s",
    "nccl_s",
)
"""Rates and seconds of work of a rank's core. Not what the driver does, nor messages: who waits leaves the core."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of a GPU and of its links.

    Args:
        flops: of dense bf16 multiplications at the peak, a second.
        linear: share of it that wide matrix multiplications reach.
        linear_half: width of the shorter side at which they reach half of that share.
        experts: share that grouped GEMMs of experts reach in training.
        unfused_experts: share that Megatron-Core's own operations of experts reach.
        attention: share that attention reaches in training.
        latent_attention: share that multi-head latent attention reaches in training.
        memory: bytes.
        memory_rate: bytes a second that kernels read and write.
        passes: share of it that the kernels between multiplications reach.
        backward: time of a backward pass over that of a forward pass, without multiplications.
        adam: share of memory_rate that an optimizer reaches.
        gpus_per_node: of a node.
        node_rate: bytes a second, one way, between a GPU and the others of its node.
        network_rate: bytes a second, one way, between a GPU and other nodes.
        host_rate: bytes a second between host memory and one GPU, one way while the other is used.
        node_host_rate: the same of all GPUs of a node.
        layer_s: seconds in which a host launches one pass of a dense layer: the least that it takes.
        sparse_layer_s: the same of a layer with fused experts.
        unfused_layer_s: the same of a layer with Megatron-Core's own operations of experts.
        sequence_s: seconds of one pass of a layer's attention for each packed sequence, beyond its multiplications.
        update_s: seconds of an update next to its micro-batches: the call, its batch, its metrics.
        scoring_s: the same of a scoring pass.
        message_s: seconds until a message arrives, however short.
        decode_read: share of `memory_rate` at which decoding reads weights of experts, keys and values.
        decode_linear: share of `memory_rate` at which it reads other weights.
        decode_layer_s: further seconds of a layer in a decoding step.
        decode_start_s: seconds of the scheduler to start a request.
        nccl_s, nccl_small_rate: seconds of an exchange of a decoding step by NCCL without bytes, and bytes a second.
        peers_s, peers_rate: the same by kernels that write into the memory of other ranks.
        decode_host_s: least seconds of a decoding step, of the scheduler.
        decode_request_s: seconds of the scheduler for each running request in a step.
        sample_s: seconds of the driver for each sample of a step.
        transfer_s: seconds of a weight transfer without bytes.
        transfer_share: share of a link's rate that a weight transfer reaches.
        cores: that ranks without GPUs share; 0 for GPUs.
    """

    flops: float
    linear: float
    linear_half: float
    experts: float
    unfused_experts: float
    attention: float
    latent_attention: float
    memory: int
    memory_rate: float
    passes: float
    backward: float
    adam: float
    gpus_per_node: int
    node_rate: float
    network_rate: float
    host_rate: float
    node_host_rate: float
    layer_s: float
    sparse_layer_s: float
    unfused_layer_s: float
    sequence_s: float
    update_s: float
    scoring_s: float
    message_s: float
    decode_read: float
    decode_linear: float
    decode_layer_s: float
    decode_start_s: float
    nccl_s: float
    nccl_small_rate: float
    peers_s: float
    peers_rate: float
    decode_host_s: float
    decode_request_s: float
    sample_s: float
    transfer_s: float
    transfer_share: float
    cores: int

    def for_ranks(self, ranks: int) -> Hardware:
        """The rates of each of so many ranks, which on a CPU take turns on the cores."""
        ranks_of_core = min(ranks, self.gpus_per_node) / self.cores if self.cores else 1.0
        if ranks_of_core <= 1:
            return self
        rates = {name: getattr(self, name) / ranks_of_core for name in _SHARED_RATES}
        return replace(self, **rates, **{name: getattr(self, name) * ranks_of_core for name in _SHARED_SECONDS})

    @property
    def highest_rate(self) -> float:
        """FLOP/s that no kernel class exceeds."""
        attention = max(FLASH_ATTENTION * self.attention, self.latent_attention)
        return self.flops * max(self.linear, self.experts, self.unfused_experts, attention)

    def linear_rate(self, width: float) -> float:
        """Predict the FLOP/s of matrix multiplications whose shorter side has this width."""
        return self.flops * self.linear * width / (width + self.linear_half)

    def exchange_s(
        self, nbytes: float, group: int, stride: int = 1, times: float = 1.0, *, at_once: bool = False
    ) -> float:
        """Predict the seconds in which a rank sends bytes evenly to the others of a group.

        Args:
            nbytes: to all others together, in all exchanges.
            group: ranks of the group.
            stride: distance between two of them, in ranks.
            times: number of exchanges.
            at_once: messages to all others are sent at once, not one after another along a ring.
        """
        if group == 1:
            return 0.0
        near = max(1, min(group, self.gpus_per_node // stride))
        within = nbytes * (near - 1) / (group - 1)
        sending = max(within / self.node_rate, (nbytes - within) / self.network_rate)
        return sending + times * (1 if at_once else group - 1) * self.message_s

    def ring_s(self, nbytes: float, group: int, stride: int, times: float) -> float:
        """Predict the seconds in which a rank sends bytes to the next of a ring, in a number of messages."""
        rate = self.node_rate if group * stride <= self.gpus_per_node else self.network_rate
        return nbytes / rate + times * self.message_s


@dataclass(frozen=True)
class Profile:
    """Hardware with the origin of its numbers.

    Args:
        name: such as "h200".
        gpu: name of the device, as the driver has it; "cpu" for none.
        hardware: its rates.
        interval: relative half-width of the interval of each phase: "update", "scoring", "rollout", "transfer".
        measured: features whose cost was measured; others widen the interval.
        origins: of each rate.
        units: of each rate.
        machine: that it was measured on, as `this_machine`; empty for every one with the GPU.
    """

    name: str
    gpu: str
    hardware: Hardware
    interval: dict[str, float]
    measured: frozenset[str]
    origins: dict[str, str]
    units: dict[str, str] = field(default_factory=dict)
    machine: dict[str, str | int] = field(default_factory=dict)

    def with_cluster(self, gpus_per_node: int | None = None, link: str | None = None) -> Profile:
        """Return the profile on nodes of another size, and with another link, such as "400Gb" a GPU.

        Without GPUs the nodes have the cores and the memory of the machine that was measured.

        Raises:
            UserError: the link is no rate.
        """
        hardware = self.hardware
        if gpus_per_node is not None:
            memory = hardware.memory
            if self.gpu == "cpu":  # slots share that of their machine
                memory = memory * hardware.gpus_per_node // gpus_per_node
            hardware = replace(hardware, gpus_per_node=gpus_per_node, memory=memory)
        if link is not None:
            hardware = replace(hardware, network_rate=link_rate(link))
        return replace(self, hardware=hardware)


def cpu_profile(slots: int) -> Profile:
    """Return the shipped profile of ranks without GPUs, with the cores and the memory of this machine for its slots."""
    profile = load_profile("cpu").with_cluster(slots)
    cores, memory = len(os.sched_getaffinity(0)), machine_bytes() // slots
    return replace(profile, hardware=replace(profile.hardware, cores=cores, memory=memory))


def link_rate(text: str) -> float:
    """Bytes a second of a link of a GPU, from such as "400Gb" (bits) or "50GB" (bytes).

    Raises:
        UserError: another form.
    """
    match = _LINK.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise UserError(f"--link {shortened(text)}: expected such as 400Gb, the rate of a GPU's link to other nodes")
    return float(match[1]) * 1e9 / (8 if match[2] == "Gb" else 1) * _LINK_SHARE


def shipped_profiles() -> list[str]:
    """List the names of the profiles that ship with the project."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def this_machine() -> dict[str, str | int]:
    """Describe this machine: "gpu", as the driver has it, or "cpu"; without GPUs its processor and their number."""
    if platform.gpus:
        # CUDA's own name would take memory of the GPU.
        kinds = (answer(name, lambda reader, gpu: reader.name(gpu)) for name in visible_gpus().values())
        return {"gpu": next(kinds, None) or "unknown"}
    try:
        names = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
        processor = next(names, "").partition(":")[2].strip()
    except OSError:
        processor = ""
    return {"gpu": "cpu", "processor": processor or host.machine(), "cores": len(os.sched_getaffinity(0))}


def matching_profile(machine: Mapping[str, str | int]) -> Profile | None:
    """Return the shipped profile of a machine's devices; None if none ships."""
    profiles = (load_profile(name) for name in shipped_profiles())
    return next((profile for profile in profiles if profile.gpu == machine["gpu"]), None)


def load_profile(name: str) -> Profile:
    """Read a profile that ships with the project, by its name, or a file of the same form.

    Raises:
        UserError: no such profile, or a file that is none: names the rate that is missing, unknown or no number.
    """
    path = PROFILES / f"{name.lower()}.yaml"
    if not re.fullmatch(r"\w+", name) or not path.is_file():
        path = Path(name)
        if path.suffix != ".yaml" or not path.is_file():
            raise UserError(_SHIPPED.format(name=shortened(name), names=", ".join(shipped_profiles())))
    return _profile(path, read_yaml_file(path)[0])


def _profile(path: Path, data: Any) -> Profile:
    if not isinstance(data, dict) or not isinstance(data.get("rates"), dict):
        raise UserError(f"{path}: no hardware profile: expected name, gpu, interval, measured and rates")
    rates, names = data["rates"], [field.name for field in fields(Hardware)]
    for name in names:
        if name not in rates:
            raise UserError(f"{path}: rates.{name} is missing")
    for name, rate in rates.items():
        value = rate.get("value") if isinstance(rate, dict) else None
        if name not in names:
            raise UserError(f"{path}: rates.{name}: no such rate, expected {', '.join(names)}")
        if not _is_number(value) or not rate.get("origin"):
            raise UserError(f"{path}: rates.{name}: expected value, a number of at least 0, unit and origin")
        if not value and not name.endswith("_s") and name not in _MAY_BE_NONE:
            raise UserError(f"{path}: rates.{name}: expected a value above 0")
    interval = data.get("interval")
    phases = ("update", "scoring", "rollout", "transfer")
    if not isinstance(interval, dict) or set(interval) != {*phases} or not all(map(_is_number, interval.values())):
        raise UserError(f"{path}: interval: expected {', '.join(phases)}, each a number of at least 0")
    measured, machine = data.get("measured") or [], data.get("machine") or {}
    if not isinstance(measured, list) or not isinstance(machine, dict):
        wrong = "machine: expected keys and values" if isinstance(measured, list) else "measured: expected a list"
        raise UserError(f"{path}: {wrong}, as `hybridflow profile` writes them")
    values = {name: rates[name]["value"] for name in names}
    values |= {name: round(values[name]) for name in ("memory", "gpus_per_node", "cores")}
    return Profile(
        name=str(data.get("name", path.stem)),
        gpu=str(data.get("gpu", "")),
        hardware=Hardware(**values),
        interval={name: float(value) for name, value in interval.items()},
        measured=frozenset(map(str, measured)),
        origins={name: f"{rates[name]['origin']}" for name in names},
        units={name: f"{rates[name].get('unit', '')}" for name in names},
        machine=machine,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
