"""Whether a judge can be served: its directory, its layout, and its devices."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from engine3d.errors import UserError
from engine3d.input_files import read_model_config
from engine3d.models.safetensors_files import TensorFiles
from engine3d.platform.cpu import sglang as sglang_cpu
from engine3d.serving.model import ServedModel
from hybridflow.cluster.devices.device_map import Device
from hybridflow.config.roles import JudgeModel


def check_judge(judge: JudgeModel, devices: Mapping[str, Sequence[Device]] | None) -> None:
    """What can be known before a server starts.

    Args:
        devices: of each role; None where they are not known.

    Raises:
        UserError: naming the setting.
    """
    try:
        ServedModel.of(judge.path, judge.engine)
    except UserError as error:
        raise UserError(f"judge.path: {error}") from None
    heads = read_model_config(judge.path).get("num_attention_heads")
    if isinstance(heads, int) and heads % judge.engine.tp:
        raise UserError(f"judge.engine.tp={judge.engine.tp} does not divide the model's {heads} attention heads")
    if devices is not None:
        check_judge_devices(judge, devices)


def check_judge_devices(judge: JudgeModel, devices: Mapping[str, Sequence[Device]]) -> None:
    """The devices of the servers, which share none with other roles.

    Raises:
        UserError: naming the setting.
    """
    own, tp = devices["judge"], judge.engine.tp
    for role, held in devices.items():
        if role not in ("judge", "reward") and (shared := sorted(set(held) & set(own))):
            raise UserError(
                f"placement.judge and placement.{role} are both on {shared[0].kind}:{shared[0].index} of node "
                f"{shared[0].node}, expected devices of its own for the judge"
            )
    each = [{device.node for device in own[first : first + tp]} for first in range(0, len(own), tp)]
    if len(own) % tp or any(len(nodes) > 1 for nodes in each):
        raise UserError(
            f"placement.judge: {len(own)} devices for servers of judge.engine.tp={tp}, expected a multiple, and the "
            "devices of each on one node"
        )
    if own[0].kind == "cpu":
        for name, value in sglang_cpu.server_arguments().items():
            if judge.engine.server_args.get(name, value) != value:
                raise UserError(
                    f"judge.engine.server_args.{name}={judge.engine.server_args[name]}: on a CPU SGLang runs with "
                    f"{value} alone"
                )


def judge_identity(judge: JudgeModel) -> str:
    """What tells a judge from others whose verdicts are kept: its weights, its configuration and how it is served."""
    found = hashlib.sha256(TensorFiles(judge.path).fingerprint().encode())
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (path := judge.path / name).is_file():
            found.update(path.read_bytes())
    found.update(judge.engine.model_dump_json().encode())
    return found.hexdigest()
