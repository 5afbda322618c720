"""Whether a teacher's distributions can be compared with the student's, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine3d.errors import UserError
from engine3d.models import ModelSpec, load_model_spec
from engine3d.platform.cpu import sglang as sglang_cpu
from engine3d.rollout.served import check_served
from engine3d.rollout.server_arguments import check_against_platform
from hybridflow.algorithms.distillation import DistillationSettings
from hybridflow.cluster.devices.device_map import Device
from hybridflow.config.recipe import Recipe
from hybridflow.planning.served_devices import check_served_devices


def check_teacher(recipe: Recipe, teacher: ModelSpec, directory: Path, actor: ModelSpec) -> None:
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
    algorithm = recipe.algorithm
    assert isinstance(algorithm, DistillationSettings)
    if algorithm.divergence_in == "loss" and algorithm.top_k > actor.vocab_size:
        raise UserError(
            f"algorithm.top_k={algorithm.top_k} of a vocabulary of {actor.vocab_size} tokens, expected at most as many"
        )


def check_teacher_engine(recipe: Recipe, actor: ModelSpec, devices: Mapping[str, Sequence[Device]] | None) -> None:
    """A teacher that engines serve: its model, what SGLang would refuse of it, and its devices.

    Args:
        devices: of each role; None where they are not known.

    Raises:
        UserError: naming the setting.
    """
    teacher, engine = recipe.teacher, recipe.teacher_engine
    assert teacher is not None and engine is not None
    try:
        spec = load_model_spec(teacher.path)
    except UserError as error:
        raise UserError(f"teacher.path: {error}") from None
    check_teacher(recipe, spec, teacher.path, actor)
    try:
        check_served(spec, engine)
    except UserError as error:
        raise UserError(str(error).replace("rollout.engine", "teacher.engine")) from None
    if engine.context_length is not None and engine.context_length > spec.sizes.max_positions:
        raise UserError(
            f"teacher.engine.context_length={engine.context_length}, expected at most the model's "
            f"{spec.sizes.max_positions} positions"
        )
    if devices is None:
        return
    engines = check_served_devices("teacher", engine.tp, devices)
    samples = recipe.trainer.prompts_per_step * recipe.rollout.samples_per_prompt
    if samples < engines:
        raise UserError(f"{samples} samples a step for {engines} engines of the teacher, expected one for each")
    if devices["teacher"][0].kind == "cpu":
        check_against_platform(engine.server_args, engine.attention_backend, sglang_cpu.server_arguments())
