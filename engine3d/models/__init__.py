"""Model families: a HuggingFace `config.json` as a Megatron-Core model, and its weights in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine3d.errors import UserError, shortened
from engine3d.models.families.deepseek_v3 import DEEPSEEK_V3
from engine3d.models.families.glm4_moe import GLM4_MOE
from engine3d.models.families.gpt_oss import GPT_OSS
from engine3d.models.families.llama import LLAMA
from engine3d.models.families.minimax_m2 import MINIMAX_M2
from engine3d.models.families.mistral import MISTRAL
from engine3d.models.families.mixtral import MIXTRAL
from engine3d.models.families.qwen2 import QWEN2
from engine3d.models.families.qwen2_moe import QWEN2_MOE
from engine3d.models.families.qwen3 import QWEN3
from engine3d.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from engine3d.models.families.qwen3_moe import QWEN3_MOE
from engine3d.models.families.qwen3_next import QWEN3_NEXT
from engine3d.models.family import Family, ModelSpec
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.quantisation.stored import QUANTISATION_KEYS
from engine3d.models.rope import read_rope
from engine3d.models.rules import Box, LocalParameter, TensorSlice
from engine3d.models.sizes import Sizes
from engine3d.startup.lazy_imports import attributes_later

if TYPE_CHECKING:
    from engine3d.models.build import build_model
    from engine3d.models.files.random_weights import initialise_random
    from engine3d.models.files.weights import (
        check_finite_weights,
        check_weights,
        export_weights,
        load_weights,
        weight_notes,
    )

__all__ = [
    "FAMILIES",
    "Box",
    "Family",
    "LocalParameter",
    "ModelSpec",
    "Sizes",
    "TensorSlice",
    "build_model",
    "check_finite_weights",
    "check_weights",
    "export_weights",
    "initialise_random",
    "load_model_spec",
    "load_weights",
    "model_spec",
    "sglang_overrides",
    "weight_notes",
]

# Imported when first asked for: rules and plans need neither Megatron nor safetensors.
_later = attributes_later(
    __name__,
    {
        "build_model": "build",
        "check_finite_weights": "files.weights",
        "check_weights": "files.weights",
        "export_weights": "files.weights",
        "initialise_random": "files.random_weights",
        "load_weights": "files.weights",
        "weight_notes": "files.weights",
    },
)


def __getattr__(name: str) -> Any:
    if name == "build_model":
        from engine3d.platform import platform

        platform.prepare_training()  # before Megatron-Core is imported
    return _later(name)


_MOST_EXPERTS = 131_072
"""Experts over all layers, five times those of the largest models, because each adds tensors to every pass."""

FAMILIES = (
    QWEN3_MOE,
    QWEN3,
    QWEN2_MOE,
    QWEN2,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    DEEPSEEK_V3,
    GLM4_MOE,
    MINIMAX_M2,
    GPT_OSS,
    QWEN3_NEXT,
    QWEN3_5_MOE,
    QWEN3_5,
)


def load_model_spec(directory: str | Path, *, value_head: bool = False) -> ModelSpec:
    """Read the specification of a model from `directory/config.json`.

    Args:
        directory: a HuggingFace model directory.
        value_head: a scalar head in place of the output layer, for a critic or a reward model.

    Raises:
        UserError: no such directory, no config.json, an architecture that is not supported, or a value that is
            missing, of the wrong type or not supported.
    """
    directory = Path(directory)
    return _spec(HFConfig.load(directory), directory, value_head)


def model_spec(hf_config: dict[str, Any], *, value_head: bool = False) -> ModelSpec:
    """Build a specification from a parsed `config.json`. Raises UserError as `load_model_spec` does."""
    return _spec(HFConfig(hf_config, "config"), None, value_head)


def sglang_overrides(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a `config.json`, and the values with which SGLang serves the model that is trained.

    They are the keys that SGLang needs and files saved by transformers lack, and null for quantisation, which
    `check_weights` refuses where weights are quantised. Keys of a family exist only for supported ones.
    """
    named = hf_config.get("architectures") or []
    known = [family for family in FAMILIES if family.architecture in named]
    known = known if named else [family for family in FAMILIES if hf_config.get("model_type") in family.model_types]
    needed = {"architectures": [known[0].architecture], **known[0].published} if known else {}
    lacking = {key: value for key, value in needed.items() if not hf_config.get(key)}
    if known and known[0].flat_rope:  # where both are there, the nested ones hold, as for transformers
        nested = hf_config.get("rope_parameters") or {}
        names = ("rope_theta", "partial_rotary_factor")
        lacking |= {name: nested[name] for name in names if nested.get(name) not in (None, hf_config.get(name))}
    return lacking | {key: None for key in QUANTISATION_KEYS if hf_config.get(key) is not None}


def _spec(config: HFConfig, directory: Path | None, value_head: bool) -> ModelSpec:
    architectures = config.texts("architectures")
    for family in FAMILIES:
        accepted = [family.architecture]
        if value_head:
            accepted += [family.value_architecture, family.biased_value_architecture]
        named = any(architecture in accepted for architecture in architectures)
        if named or (not architectures and config.get("model_type") in family.model_types):
            config.require("model_type", family.model_types)  # by which transformers and SGLang read the config
            config.check_others()
            if family.text is not None:
                if value_head:
                    raise UserError(
                        f"{config.source}: {family.architecture} was not tried with a scalar head; expected a model "
                        "without a vision tower for critics and reward models"
                    )
                config = config.of_text(family.text)
            share = family.rotary_share
            known_share = share if isinstance(share, float) else share(config)
            rope = read_rope(config, family.ropes, family.rope_base, known_share)
            sizes = family.sizes(config)
            if not isinstance(share, float) and rope.rotary_share != known_share:
                raise UserError(
                    f"{config.source}: partial_rotary_factor={rope.rotary_share:g}: expected {known_share:g}, as "
                    "rotary_dim says, or nothing"
                )
            if sizes.latent is None and (rotary := rope.rotary_share * sizes.head_dim) % 2:
                raise UserError(
                    f"{config.source}: partial_rotary_factor={rope.rotary_share}: expected an even number of rotary "
                    f"elements, found {rotary:g} of head_dim={sizes.head_dim}"
                )
            if sizes.latent is not None and not rope.truncate:
                raise UserError(f"{config.source}: truncate: expected true, the only value in latent attention")
            if sizes.layers * max(1, sizes.experts) > _MOST_EXPERTS:
                raise UserError(
                    f"{config.source}: {sizes.layers:,} layers of {sizes.experts:,} experts: expected at most "
                    f"{_MOST_EXPERTS:,} experts over all layers"
                )
            return ModelSpec(family, config, sizes, rope, directory, value_head)
    supported = ", ".join(family.architecture for family in FAMILIES)
    architecture = ", ".join(architectures) or str(config.get("model_type", "none"))
    raise UserError(
        f"{config.source}: architecture {shortened(architecture)} is not supported; supported are {supported}"
    )
