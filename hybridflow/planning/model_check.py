"""Whether the files of a recipe's models are there, hold what they must, and fit Megatron-Core and SGLang."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from engine3d.errors import UserError, amount
from engine3d.layout import Layout
from engine3d.models import ModelSpec, check_finite_weights, check_weights, load_model_spec, weight_notes
from engine3d.platform import platform
from engine3d.rollout.served import check_served
from engine3d.startup.lazy_imports import torch
from engine3d.training.megatron_settings import check_effect, check_options, megatron_settings
from hybridflow.config.recipe import Recipe
from hybridflow.config.roles import ScoringModel
from hybridflow.planning.teacher_check import check_teacher

LANGUAGE_MODELS = ("reference", "teacher")
"""The models beside the actor that have a vocabulary and no scalar head."""
_FINITE_LIMIT_S = 5.0
"""For looking through the weights of one model: some 5 GB."""


def check_megatron(recipe: Recipe, role: str, spec: ModelSpec, layout: Layout, *, gpus: bool) -> None:
    """A role's `train.megatron` against its model, its layout, its other settings and its devices.

    Raises:
        UserError: naming the option.
    """
    config, setting = recipe.train_config(role), recipe.train_setting(role)
    try:
        if role == "actor" or setting != "train":
            check_effect(config, spec, trained=role in recipe.trained_roles)
        check_options(config, spec, layout, transformer_engine=gpus)
        if config.megatron and gpus == platform.has_transformer_engine:  # Megatron-Core takes seconds to import
            from engine3d.models.megatron_config import transformer_config

            settings = megatron_settings(config, spec, layout)
            transformer_config(spec, layout, getattr(torch, config.dtype), **settings)
    except UserError as error:
        raise UserError(f"{setting}.{error}") from None


def check_model(recipe: Recipe, role: str, actor: ModelSpec | None) -> tuple[ModelSpec | None, list[str]]:
    """The model of a role beside the actor: its files, and whether it reads the actor's tokens.

    Returns:
        The model, None if it begins with the actor's, which is unknown; and notes as of `check_model_files`.

    Raises:
        UserError: naming the setting.
    """
    path = recipe.models[role].path
    try:
        spec = role_spec(recipe, role, actor)
        if path is None or spec is None:
            return spec, []
        notes = check_model_files(f"{role}.path", spec, path, needs_head=isinstance(recipe.models[role], ScoringModel))
    except UserError as error:
        raise UserError(f"{role}.path: {error}") from None
    if role == "teacher" and actor is not None:
        check_teacher(recipe, spec, path, actor)
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
    looked_at, whole = check_finite_weights(spec, directory, limit_s=_FINITE_LIMIT_S)
    if looked_at == whole:
        return notes
    return [
        *notes,
        f"{setting}: {amount(looked_at, 1)} of {amount(whole, 1)} of weights were looked at for nan and infinity in "
        f"{_FINITE_LIMIT_S:g} s; the ranks look at all that they load",
    ]


def role_spec(recipe: Recipe, role: str, actor: ModelSpec | None) -> ModelSpec | None:
    """The model of a role beside the actor; None if it begins with the actor's, which is unknown.

    Raises:
        UserError: its directory holds no model that can be one.
    """
    path, value_head = recipe.models[role].path, role not in LANGUAGE_MODELS
    if path is not None:
        return load_model_spec(path, value_head=value_head)
    return dataclasses.replace(actor, value_head=value_head) if actor is not None else None


def check_engines(recipe: Recipe, spec: ModelSpec) -> None:
    """What SGLang and Megatron-Core would refuse of a model that fits otherwise.

    Raises:
        UserError: naming the setting.
    """
    engine, sizes = recipe.rollout.engine, spec.sizes
    if engine.context_length is not None and engine.context_length > sizes.max_positions:
        raise UserError(
            f"rollout.engine.context_length={engine.context_length}, expected at most the model's "
            f"{sizes.max_positions} positions"
        )
    check_served(spec, engine)
