"""`hybridflow profile`: rates of this machine, measured in minutes, as a hardware profile for `hybridflow plan`."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from engine3d.errors import UserError
from engine3d.platform import platform
from engine3d.startup.imports import quick_imports

_MOST_DEVICES = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hybridflow profile`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the profile to write, such as here.yaml")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="GPUs between which exchanges are measured (all), or ranks (2)"
    )


def run(parsed: argparse.Namespace) -> int:
    """Run `hybridflow profile`.

    Raises:
        UserError: an option is wrong, or the measurement did not end.
    """
    path: Path = parsed.file
    if path.suffix != ".yaml":
        raise UserError(f"profile: {path}: expected a name that ends with .yaml")
    if path.exists() or not path.parent.is_dir():
        raise UserError(f"profile: {path}: expected a new file in a directory that exists")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"profile: {path.parent} cannot be written")
    devices = parsed.devices if parsed.devices is not None else platform.gpus or min(2, len(os.sched_getaffinity(0)))
    if not 1 <= devices <= _MOST_DEVICES:
        raise UserError(f"profile: --devices {devices}: expected 1 to {_MOST_DEVICES}")
    with quick_imports():
        from hybridflow.planning.measure.machine import measured_profile, profile_text

    began = time.monotonic()
    base, rates = measured_profile(devices)
    path.write_text(profile_text(path.stem, base, rates))
    for name, rate in rates.items():
        print(f"{name}: {rate.value:.4g} {base.units[name]} ({getattr(base.hardware, name):.4g} in {base.name})")
    print(
        f"{path}: {len(rates)} rates measured in {time.monotonic() - began:.0f} s, the others are those of {base.name}"
    )
    return 0
