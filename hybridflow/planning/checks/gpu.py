"""Checks of this machine's GPUs and libraries against a recipe, without a CUDA context and without SGLang."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine3d.errors import UserError, shortened
from engine3d.models import ModelSpec
from engine3d.platform import platform
from engine3d.rollout.config import RolloutConfig
from hybridflow.cluster.devices.device_map import Device
from hybridflow.cluster.devices.nvml import answer
from hybridflow.roles.config import MegatronRole

Devices = Mapping[str, Sequence[Device]]
"""The devices of each role."""

_ROLLOUT_LIBRARIES = {"sgl_kernel": "sglang-kernel", "flashinfer": "flashinfer-python"}
"""Modules that SGLang imports wherever it runs on a GPU, and the packages that have them."""


def used_gpus(devices: Devices) -> dict[int, str]:
    """The GPUs of this machine on which models and engines are placed: by index, as CUDA_VISIBLE_DEVICES names them."""
    indices = {
        device.index
        for role, role_devices in devices.items()
        if role != "reward"
        for device in role_devices
        if device.kind == "cuda"
    }
    names = {index: platform.visible_devices((index,)) for index in sorted(indices)}
    return {index: variables["CUDA_VISIBLE_DEVICES"] for index, variables in names.items()}


def check_libraries(
    roles: Mapping[str, MegatronRole], engine: RolloutConfig, devices: Devices | None, spec: ModelSpec
) -> list[str]:
    """Check that the libraries of the models are installed on this machine.

    Args:
        roles: the models, by role.
        engine: settings of the engines.
        devices: of this machine; None where the run is on another cluster.
        spec: of the actor.

    Returns:
        What only makes a run slower, a line each.

    Raises:
        UserError: names the setting or the package.
    """
    if devices is None:
        return []
    for role in roles.values() if not platform.has_transformer_engine else ():
        lacking = "needs Transformer Engine, which is absent here"
        if role.trained and role.train.optimizer.precision_aware:
            raise UserError(f"{role.name}: optimizer.precision_aware=true {lacking}")
        if role.train.recompute == "selective":
            raise UserError(f"{role.setting}.recompute=selective {lacking}: expected none or full")
        if role.train.precision is not None and _on_gpus(devices[role.name]):
            raise UserError(f"{role.setting}.precision={role.train.precision} {lacking}; expected null")
    for role in roles.values():
        if role.train.precision is not None:
            setting = f"{role.setting}.precision={role.train.precision}"
            _check_capability(setting, devices[role.name], (9,), "", "null")
    if _on_gpus(devices.get("rollout", ())):
        check_rollout_libraries(engine, devices["rollout"], latent=spec.sizes.latent is not None)
    of_models = [role_devices for role, role_devices in devices.items() if role not in ("rollout", "reward")]
    if not any(map(_on_gpus, of_models)):
        return []
    if platform.has_transformer_engine:
        return _slower_experts(roles.values(), devices, spec)
    return [
        "train: Transformer Engine is absent; Megatron-Core's own layers take its place, slower and one expert after "
        "the other: pip install --no-build-isolation -r requirements-gpu.txt"
    ]


def _slower_experts(roles: Collection[MegatronRole], devices: Devices, spec: ModelSpec) -> list[str]:
    """Notes on GPUs without a kernel for fused experts."""
    requested = any(
        role.train.has_fused_experts(spec.sizes, role.train.layout.layout(len(devices[role.name])))
        for role in roles
        if _on_gpus(devices[role.name])
    )
    other = gpu_without_fused_experts(devices) if spec.sizes.experts and requested else None
    if other is None:
        return []
    from engine3d.models.experts.grouped_gemm import CAPABILITY  # imports torch

    for role in roles:
        config, layout = role.train, role.train.layout.layout(len(devices[role.name]))
        for setting, is_set in (
            ("copy_engine_dispatcher", config.has_copy_engine_dispatcher(spec.sizes, layout)),
            ("predicted_expert_capacity", config.has_predicted_capacity(spec.sizes, layout)),
        ):
            if is_set:
                raise UserError(
                    f"{role.setting}.{setting}=true needs fused experts; {other}, expected {CAPABILITY}.x, or false"
                )
    return [
        f"train.fused_experts: {other}, and fused experts need {CAPABILITY}.x; Megatron-Core's own operations "
        "take their place, slower and with more memory"
    ]


def gpu_without_fused_experts(devices: Devices) -> str | None:
    """The first of this machine's GPUs that has no kernel for fused experts, with its compute capability."""
    gpus = used_gpus(devices)
    if not gpus:
        return None
    from engine3d.models.experts.grouped_gemm import CAPABILITY  # imports torch

    for index, name in gpus.items():
        capability = answer(name, lambda reader, gpu: reader.capability(gpu))
        if capability is not None and capability[0] != CAPABILITY:
            return f"GPU {index} of this machine has compute capability {capability[0]}.{capability[1]}"
    return None


def check_rollout_libraries(engine: RolloutConfig, devices: Sequence[Device], *, latent: bool) -> None:
    """Check the libraries of an engine on a GPU: SGLang's kernels, and those of the recipe's attention backend.

    Args:
        engine: settings of the engines.
        devices: of the engines.
        latent: whether the model has multi-head latent attention.

    Raises:
        UserError: names the package, or what the attention backend lacks.
    """
    for module, package in _ROLLOUT_LIBRARIES.items():
        if importlib.util.find_spec(module) is None:
            raise UserError(
                f"placement.rollout: {module} is absent, without which SGLang runs on no GPU; "
                f"expected {package} as in requirements.lock: pip install {package}"
            )
    if engine.precision is not None:
        _check_capability(f"rollout.engine.precision={engine.precision}", devices, (9,), "", "null")
    if engine.attention_kernels != "fa3":
        return
    setting, other = "rollout.engine.attention_backend=fa3", "another backend such as flashinfer"
    if engine.cascade_attention:
        setting, other = "rollout.engine.cascade_attention=true", "false"
    if not _has_flash_attention_3():
        raise UserError(
            f"{setting}: the installed sgl_kernel has no flash_ops library; expected sglang-kernel as in "
            f"requirements.lock, or {other}"
        )
    right, models = ((9,), " for latent attention") if latent else ((8, 9), "")
    _check_capability(setting, devices, right, models, other)


def _check_capability(setting: str, devices: Sequence[Device], right: tuple[int, ...], models: str, other: str) -> None:
    """Refuse GPUs of this machine whose compute capability has another major number than the `right` ones."""
    for index, name in used_gpus({"rollout": devices}).items():
        capability = answer(name, lambda reader, gpu: reader.capability(gpu))
        if capability is not None and capability[0] not in right:
            major, minor = capability
            raise UserError(
                f"{setting}: GPU {index} of this machine has compute capability {major}.{minor}, expected "
                f"{' or '.join(f'{supported}.x' for supported in right)}{models}; "
                f"or {other}"
            )


def largest_gpu(devices: Devices) -> int | None:
    """Bytes of the largest GPU of this machine on which models and engines are placed; None where it cannot be read."""
    memories = [answer(name, lambda reader, gpu: reader.memory(gpu)) for name in used_gpus(devices).values()]
    return max((memory.total_bytes for memory in memories if memory is not None), default=None)


def _on_gpus(devices: Sequence[Device]) -> bool:
    return any(device.kind == "cuda" for device in devices)


def _has_flash_attention_3() -> bool:
    """True if sgl_kernel has the extension that its `flash_attn` module imports."""
    spec = importlib.util.find_spec("sgl_kernel")
    locations = spec.submodule_search_locations if spec is not None else None
    return any(list(Path(location).glob("flash_ops*.so")) for location in locations or ())


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


def check_imports(roles: Mapping[str, MegatronRole], devices: Devices, *, every: bool) -> None:
    """Import what the models and engines need on GPUs of this machine.

    An installed package may not be importable: its libraries may be absent, or of another version.

    Args:
        roles: the models, by role.
        devices: of each role, on this machine.
        every: import what the roles import when they start, as well as what they only import in the first update.

    Raises:
        UserError: names the setting, the module and why it cannot be imported.
    """
    needed = needed_modules(roles, devices, every=every)
    if not needed or (failure := first_failure(tuple(needed))) is None:
        return
    module, reason = failure
    raise UserError(
        f"{needed[module].setting}: {module} cannot be imported here ({shortened(reason, 300)}); "
        f"expected {needed[module].expected}"
    )


def needed_modules(roles: Mapping[str, MegatronRole], devices: Devices, *, every: bool) -> dict[str, Needed]:
    """The modules by name. `every` as of `check_imports`."""
    on_gpus = {role for role, role_devices in devices.items() if any(device.kind == "cuda" for device in role_devices)}
    needed: dict[str, Needed] = {}
    for name, role in roles.items() if platform.has_transformer_engine else ():
        if name not in on_gpus:
            continue
        if every:
            lock = "transformer_engine as in requirements-gpu.txt"
            needed.setdefault("transformer_engine.pytorch", Needed(f"placement.{name}", lock))
        if role.train.has_flash_attention:
            setting = f"{role.setting}.megatron.attention_backend=flash"
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
    failure = json.loads(last)
    return None if failure is None else (failure[0], " ".join(failure[1].split()))
