"""Checks that the models of a recipe can be trained and served: files, settings and devices of engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from engine3d.errors import UserError, amount
from engine3d.input_files import read_model_config
from engine3d.layout import Layout
from engine3d.models import ModelSpec, check_finite_weights, check_weights, load_model_spec, weight_notes
from engine3d.models.files.safetensors_files import TensorFiles
from engine3d.models.precision import Precision, quantised_as_stored
from engine3d.models.quantisation.stored import fp8_tensors
from engine3d.platform import platform
from engine3d.platform.cpu import sglang as sglang_cpu
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.served import check_files, check_on_gpus, check_served
from engine3d.rollout.server_arguments import check_against_platform
from engine3d.serving.model import ServedModel
from engine3d.startup.lazy_imports import torch
from engine3d.training.config import TrainConfig
from engine3d.training.megatron.settings import check_effect, check_options, megatron_settings
from hybridflow.algorithms.distillation import DistillationSettings
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.cluster.devices.device_map import Device
from hybridflow.roles.config import JudgeModel, ModelRole, ScoringModel, TeacherModel

LANGUAGE_MODELS = ("reference", "teacher")
"""The models beside the actor that have a vocabulary and no scalar head."""
_FINITE_LIMIT_S = 5.0
"""Time limit of the search through the weights of one model: some 5 GB."""


def check_megatron(
    config: TrainConfig, setting: str, spec: ModelSpec, layout: Layout, *, trained: bool | None, gpus: bool
) -> None:
    """A role's `train.megatron` against its model, its layout, its other settings and its devices.

    Args:
        config: of the role.
        setting: the name of `config`.
        spec: the role's model.
        layout: the role's.
        trained: true if the role is trained; None if `config` is the actor's, which is checked with the actor.
        gpus: true if the role is on GPUs.

    Raises:
        UserError: naming the option.
    """
    try:
        if trained is not None:
            check_effect(config, spec, trained=trained)
        check_options(config, spec, layout, transformer_engine=gpus)
        if config.precision is not None and gpus and layout.world_size > 1:
            raise UserError(
                f"precision={config.precision} on {layout.world_size} GPUs: tried on one GPU alone, expected null"
            )
        if config.megatron and gpus == platform.has_transformer_engine:  # Megatron-Core takes seconds to import
            from engine3d.models.megatron_config import transformer_config

            settings = megatron_settings(config, spec, layout)
            transformer_config(spec, layout, getattr(torch, config.dtype), **settings)
    except UserError as error:
        raise UserError(f"{setting}.{error}") from None


def with_fp8_settings(
    spec: ModelSpec | None, train: TrainConfig, setting: str, engine: RolloutConfig | None
) -> ModelSpec | None:
    """The model of a role with the matrices left in its dtype that `train.fp8` names; None for one that is unknown.

    Args:
        spec: of the role.
        train: settings of the role.
        setting: the name of `train`.
        engine: settings of the engines that get its weights; None for none.

    Raises:
        UserError: the settings do not fit the model, or nothing is in fp8.
    """
    if train.fp8.given and train.precision is None and (engine is None or engine.precision is None):
        name, value = next(iter(train.fp8.given.items()))
        others = "" if engine is None else " or rollout.engine.precision=fp8"
        plain = type(value)()
        raise UserError(
            f"{setting}.fp8.{name}={str(value).lower()} without fp8; expected {setting}.precision=fp8{others}, or "
            f"{str(plain).lower()}"
        )
    try:
        return None if spec is None else train.fp8.applied(spec)
    except UserError as error:
        raise UserError(f"{setting}.{error}") from None


def check_model(
    model: ModelRole, role: str, algorithm: AlgorithmSettings, actor: ModelSpec | None
) -> tuple[ModelSpec | None, list[str]]:
    """Check the model of a role next to the actor: its files, and that it reads the actor's tokens.

    Returns:
        The model, None if it begins with the actor's, which is unknown; and notes as of `check_model_files`.

    Raises:
        UserError: naming the setting.
    """
    path = model.path
    try:
        spec = role_spec(model, role, actor)
        if path is None or spec is None:
            return spec, []
        notes = check_model_files(f"{role}.path", spec, path, needs_head=isinstance(model, ScoringModel))
    except UserError as error:
        raise UserError(f"{role}.path: {error}") from None
    if role == "teacher" and actor is not None:
        check_teacher(algorithm, spec, path, actor)
    if actor is not None and spec.vocab_size < actor.vocab_size:
        raise UserError(
            f"{role}.path: {path} has a vocab_size of {spec.vocab_size} and the actor one of {actor.vocab_size}; "
            "expected at least as many, of the same tokenizer"
        )
    return spec, notes


def check_model_files(setting: str, spec: ModelSpec, directory: Path, *, needs_head: bool = False) -> list[str]:
    """The weights of a model: that all are there, and finite, as far as can be read in a few seconds.

    Args:
        needs_head: refuse files without a value head, for a model whose head nobody trains.

    Returns:
        What was not looked at, and what is not read, a line each.

    Raises:
        UserError: names the tensor.
    """
    check_weights(spec, directory, needs_head=needs_head)
    notes = [f"{setting}: {note}" for note in weight_notes(spec, directory)]
    looked_at, total = check_finite_weights(spec, directory, limit_s=_FINITE_LIMIT_S)
    if looked_at == total:
        return notes
    return [
        *notes,
        f"{setting}: {amount(looked_at, 1)} of {amount(total, 1)} of weights were looked at for nan and infinity in "
        f"{_FINITE_LIMIT_S:g} s; the ranks look at all that they load",
    ]


def role_spec(model: ModelRole, role: str, actor: ModelSpec | None) -> ModelSpec | None:
    """The model of a role beside the actor; None if it begins with the actor's, which is unknown.

    Raises:
        UserError: its directory holds no model that can be one.
    """
    path, value_head = model.path, role not in LANGUAGE_MODELS
    if path is not None:
        return load_model_spec(path, value_head=value_head)
    return dataclasses.replace(actor, value_head=value_head) if actor is not None else None


def as_stored(spec: ModelSpec, directory: Path, precision: Precision | None) -> ModelSpec:
    """The model as engines of a precision load it: with the matrices in fp8 that its files have in it.

    Raises:
        UserError: names a tensor.
    """
    if precision is None:
        return spec
    with TensorFiles(directory) as files:
        return quantised_as_stored(spec, fp8_tensors(files.tensors))


def check_engines(engine: RolloutConfig, spec: ModelSpec) -> None:
    """Refuse a model that fits, but that SGLang or Megatron-Core would refuse.

    Raises:
        UserError: naming the setting.
    """
    sizes = spec.sizes
    if engine.context_length is not None and engine.context_length > sizes.max_positions:
        raise UserError(
            f"rollout.engine.context_length={engine.context_length}, expected at most the model's "
            f"{sizes.max_positions} positions"
        )
    check_served(spec, engine)


def check_teacher(algorithm: AlgorithmSettings, teacher: ModelSpec, directory: Path, actor: ModelSpec) -> None:
    """The teacher's vocabulary against the student's, and against the tokens that are compared.

    Args:
        directory: of the teacher.

    Raises:
        UserError: naming the setting.
    """
    if teacher.vocab_size != actor.vocab_size:
        raise UserError(
            f"teacher.path: {directory} has a vocab_size of {teacher.vocab_size} and the actor one of "
            f"{actor.vocab_size}; expected the same, since the most likely tokens of one are looked up in the other"
        )
    assert isinstance(algorithm, DistillationSettings)
    if algorithm.divergence_in == "loss" and algorithm.top_k > actor.vocab_size:
        raise UserError(
            f"algorithm.top_k={algorithm.top_k} of a vocabulary of {actor.vocab_size} tokens, expected at most as many"
        )


def check_teacher_engine(
    teacher: TeacherModel,
    algorithm: AlgorithmSettings,
    samples: int,
    actor: ModelSpec,
    devices: Mapping[str, Sequence[Device]] | None,
) -> None:
    """Check a teacher that engines serve: its model, what SGLang would refuse of it, and its devices.

    Args:
        teacher: with engines.
        algorithm: which compares the teacher with the actor.
        samples: of a step.
        actor: whose tokens the teacher reads.
        devices: of each role; None where they are not known.

    Raises:
        UserError: naming the setting.
    """
    engine = teacher.engine
    assert engine is not None
    try:
        spec = load_model_spec(teacher.path)
    except UserError as error:
        raise UserError(f"teacher.path: {error}") from None
    check_teacher(algorithm, spec, teacher.path, actor)
    if engine.draft_tokens:
        raise UserError(f"teacher.engine.draft_tokens={engine.draft_tokens}: a teacher generates nothing, expected 0")
    try:
        check_files(teacher.path, engine.precision)
        check_served(as_stored(spec, teacher.path, engine.precision), engine)
        if engine.precision is not None and devices is not None and devices["teacher"][0].kind == "cuda":
            raise UserError(f"rollout.engine.precision={engine.precision} was not tried on GPUs; expected null")
    except UserError as error:
        raise UserError(str(error).replace("rollout.engine", "teacher.engine")) from None
    if engine.context_length is not None and engine.context_length > spec.sizes.max_positions:
        raise UserError(
            f"teacher.engine.context_length={engine.context_length}, expected at most the model's "
            f"{spec.sizes.max_positions} positions"
        )
    if devices is None:
        return
    if devices["teacher"][0].kind == "cuda":
        try:
            check_on_gpus(spec)
        except UserError as error:
            raise UserError(str(error).replace("model:", "teacher.path:").replace(".rollout", ".teacher")) from None
    engines = check_served_devices("teacher", engine.tp, devices)
    if samples < engines:
        raise UserError(f"{samples} samples a step for {engines} engines of the teacher, expected one for each")
    if devices["teacher"][0].kind == "cpu":
        check_against_platform(engine.server_args, engine.attention_backend, sglang_cpu.server_arguments())


def check_judge(judge: JudgeModel, devices: Mapping[str, Sequence[Device]] | None) -> None:
    """Check a judge before its server starts.

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


def check_served_devices(
    role: str, tp: int, devices: Mapping[str, Sequence[Device]], beside: Collection[str] = ()
) -> int:
    """Check that a role has devices of its own, a whole number of engines, and each engine's on one node.

    Args:
        role: of the engines.
        tp: devices of each.
        devices: of every role.
        beside: roles that take nothing of a device, and may be on one of these.

    Returns:
        The number of engines.

    Raises:
        UserError: naming the placement.
    """
    role_devices = devices[role]
    for other, other_devices in devices.items():
        if other != role and other not in beside and (shared := sorted(set(other_devices) & set(role_devices))):
            raise UserError(
                f"placement.{role} and placement.{other} are both on {shared[0].kind}:{shared[0].index} of node "
                f"{shared[0].node}, expected devices of its own for the {role}"
            )
    nodes_of_engines = [
        {device.node for device in role_devices[first : first + tp]} for first in range(0, len(role_devices), tp)
    ]
    if len(role_devices) % tp or any(len(nodes) > 1 for nodes in nodes_of_engines):
        raise UserError(
            f"placement.{role}: {len(role_devices)} devices for engines of {role}.engine.tp={tp}, expected a multiple, "
            "and the devices of each on one node"
        )
    return len(nodes_of_engines)
