"""Imports of the libraries that a recipe needs on this machine, tried in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine3d.errors import UserError, shortened
from engine3d.platform import platform
from hybridflow.cluster.devices.device_map import Device
from hybridflow.config.recipe import Recipe

_LIMIT_S = 300.0
_TRY = """
import importlib, json, sys
import torch
failure = None
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failure = name, f"{type(error).__name__}: {error}"
        break
print()
print(json.dumps(failure), flush=True)
"""


@dataclass(frozen=True)
class Needed:
    """A module that a recipe needs.

    Args:
        setting: that needs it.
        expected: what would be right.
    """

    setting: str
    expected: str


def check_imports(recipe: Recipe, devices: Mapping[str, Sequence[Device]], *, every: bool) -> None:
    """Import what the models and engines need on GPUs of this machine.

    An installed package may not be importable: its libraries may be absent, or of another version.

    Args:
        recipe: the run.
        devices: of each role, on this machine.
        every: import what the roles import when they start, as well as what they only import in the first update.

    Raises:
        UserError: names the setting, the module and why it cannot be imported.
    """
    needed = needed_modules(recipe, devices, every=every)
    if not needed or (failure := first_failure(tuple(needed))) is None:
        return
    module, reason = failure
    raise UserError(
        f"{needed[module].setting}: {module} cannot be imported here ({shortened(reason, 300)}); "
        f"expected {needed[module].expected}"
    )


def needed_modules(recipe: Recipe, devices: Mapping[str, Sequence[Device]], *, every: bool) -> dict[str, Needed]:
    """The modules by name. `every` as of `check_imports`."""
    on_gpus = {role for role, held in devices.items() if any(device.kind == "cuda" for device in held)}
    needed: dict[str, Needed] = {}
    for role in ("actor", *recipe.models) if platform.has_transformer_engine else ():
        if role not in on_gpus:
            continue
        if every:
            lock = "transformer_engine as in requirements-gpu.txt"
            needed.setdefault("transformer_engine.pytorch", Needed(f"placement.{role}", lock))
        if recipe.train_config(role).has_flash_attention:
            setting = f"{recipe.train_setting(role)}.megatron.attention_backend=flash"
            lock = "flash-attn-4 and nvidia-cutlass-dsl as in requirements.lock, or attention_backend=auto"
            needed.setdefault("flash_attn.cute", Needed(setting, lock))
    if every and "rollout" in on_gpus:
        for module, package in (("sgl_kernel", "sglang-kernel"), ("flashinfer", "flashinfer-python")):
            needed[module] = Needed("placement.rollout", f"{package} as in requirements.lock")
    return needed


def first_failure(modules: Sequence[str]) -> tuple[str, str] | None:
    """The first of some modules that cannot be imported, and why; None where all can.

    Another process imports them, since they take seconds and may end it.
    """
    command = [sys.executable, "-P", "-c", _TRY, *modules]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return modules[-1], f"not imported after {_LIMIT_S:g} s"
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or ["nothing said"]
        return modules[-1], f"the process that imports it ended with {ended.returncode}: {said[-1]}"
    *_, last = ended.stdout.splitlines()
    found = json.loads(last)
    return None if found is None else (found[0], " ".join(found[1].split()))
