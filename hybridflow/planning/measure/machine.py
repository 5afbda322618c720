"""Hardware profile of this machine: measured rates, and those of a shipped profile where nothing was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from engine3d.errors import UserError
from engine3d.platform import platform
from engine3d.startup.lazy_imports import torch
from hybridflow.cluster.hosts.checks.facts import machine_bytes
from hybridflow.planning.measure.kernels import ON_CPU, ON_GPU, measured_kernels
from hybridflow.planning.measure.layers import measured_layers
from hybridflow.planning.measure.links import measured_links
from hybridflow.planning.measure.rates import MeasuredRate
from hybridflow.planning.time.hardware import Hardware, Profile, load_profile, matching_profile, this_machine

_LINK_BYTES = {True: 256 << 20, False: 4 << 20}
"""Bytes of the large exchange, on GPUs and without."""


def measured_profile(devices: int) -> tuple[Profile, dict[str, MeasuredRate]]:
    """Measure this machine.

    Args:
        devices: GPUs, or ranks on processors, among which exchanges are measured; 1 measures none.

    Returns:
        The shipped profile whose other rates are taken: that of this GPU, or H200's; and the measured rates.

    Raises:
        UserError: more devices than there are, or exchanges that did not end.
    """
    if platform.gpus and devices > platform.gpus:
        raise UserError(f"profile: --devices {devices}: this machine has {platform.gpus} GPUs")
    machine = this_machine()
    if not platform.gpus and devices > int(machine["cores"]):
        raise UserError(f"profile: --devices {devices}: this machine has {machine['cores']} cores, one for each rank")
    base = matching_profile(machine) or load_profile("h200")
    threads = torch.get_num_threads()
    if not platform.gpus:
        torch.set_num_threads(1)  # as a rank of a model has
    try:
        rates = dict(measured_kernels(ON_GPU if platform.gpus else ON_CPU, platform.peak_flops))
    finally:
        torch.set_num_threads(threads)
    if devices > 1:
        rates |= measured_links(devices, _LINK_BYTES[bool(platform.gpus)])
    if not platform.gpus:
        known: dict[str, Any] = {name: rate.value for name, rate in rates.items()}
        rates |= measured_layers(devices, replace(base.hardware, **known))
    total = platform.memory().total if platform.gpus else machine_bytes() // devices
    rates["memory"] = MeasuredRate(
        total, "measured" if platform.gpus else f"measured, the share of each of {devices} ranks"
    )
    rates["gpus_per_node"] = MeasuredRate(devices, "measured, the devices of this machine")
    if not platform.gpus:
        rates["cores"] = MeasuredRate(int(machine["cores"]), "measured, the cores of this machine")
    return base, rates


def profile_text(name: str, base: Profile, rates: Mapping[str, MeasuredRate]) -> str:
    """The profile of this machine as a YAML file.

    Args:
        name: of the profile.
        base: that other rates are taken from, with their origins.
        rates: that were measured.
    """
    machine = this_machine()
    same = base.gpu == machine["gpu"]
    lines = [
        f"# Measured by `hybridflow profile`, where the origin says so; the other rates are those of {base.name}.",
        f"name: {name}",
        f"gpu: {json.dumps(machine['gpu'])}",
        f"machine: {json.dumps(machine)}",
        f"interval: {json.dumps(base.interval)}",
        f"measured: {json.dumps(sorted(base.measured))}",
        "rates:",
    ]
    return "\n".join([*lines, *_rate_lines(base, rates, same=same)]) + "\n"


def _rate_lines(base: Profile, rates: Mapping[str, MeasuredRate], *, same: bool) -> Iterator[str]:
    for field in fields(Hardware):
        if field.name in rates:
            rate = rates[field.name]
            value, origin = rate.value, rate.origin or "measured"
        else:
            value = getattr(base.hardware, field.name)
            origin = base.origins[field.name] if same else f"assumed, of {base.name}: {base.origins[field.name]}"
        yield f"  {field.name}:"
        yield f"    value: {value:.4g}" if value < 1e6 else f"    value: {value:.4e}"
        yield f"    unit: {json.dumps(base.units[field.name])}"
        yield f"    origin: {json.dumps(origin)}"


def check_machine(path: str, profile: Profile) -> None:
    """Refuse a profile that was measured on another machine.

    Args:
        path: of its file.
        profile: as it was read.

    Raises:
        UserError: names the difference.
    """
    here, there = this_machine(), profile.machine or {"gpu": profile.gpu}
    for name, value in there.items():
        if here.get(name) != value:
            raise UserError(
                f"--profile {path}: measured with {name} {value}, this machine has {here.get(name, 'none')}; expected "
                "the profile that hybridflow profile measures here, or --gpus to plan for other machines"
            )
