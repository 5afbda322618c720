"""Whether a judge can be served: its directory, its layout, and its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine3d.errors import UserError
from engine3d.input_files import read_model_config
from engine3d.platform.cpu import sglang as sglang_cpu
from engine3d.serving.model import ServedModel
from hybridflow.cluster.devices.device_map import Device
from hybridflow.config.roles import JudgeModel
from hybridflow.planning.served_devices import check_served_devices


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
    check_served_devices("judge", judge.engine.tp, devices, beside=("reward",))
    if devices["judge"][0].kind == "cpu":
        for name, value in sglang_cpu.server_arguments().items():
            if judge.engine.server_args.get(name, value) != value:
                raise UserError(
                    f"judge.engine.server_args.{name}={judge.engine.server_args[name]}: on a CPU SGLang runs with "
                    f"{value} alone"
                )
