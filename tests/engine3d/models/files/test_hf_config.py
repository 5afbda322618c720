"""Configs as people have them: read as the installed transformers reads them, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from engine3d.errors import UserError
from engine3d.models import ModelSpec, model_spec
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rope import read_rope
from tests.support.tiny_families import CONFIGS, changed, text_of

KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "vocabulary": "vocab_size",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads",
    "ffn": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "qkv_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}
OF_EXPERTS = {
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "normalised_routing": "norm_topk_prob",
    "routing_scale": "routed_scaling_factor",
    "expert_groups": "n_group",
    "groups_per_token": "topk_group",
}
"""Sizes, and the attributes of transformers' configs."""


def read_by_transformers(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    values = dict(config)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def text_of_class(config: Any) -> Any:
    return getattr(config, "text_config", config)


def same(spec: ModelSpec, theirs: Any) -> None:
    sizes = spec.sizes
    for name, key in (KEYS | (OF_EXPERTS if sizes.experts else {})).items():
        if hasattr(theirs, key):
            assert getattr(sizes, name) == getattr(theirs, key), name
    if sizes.latent is None:
        # As its attention has it where the config's class knows no such key.
        assert sizes.head_dim == (getattr(theirs, "head_dim", None) or sizes.hidden // sizes.heads)
    if hasattr(theirs, "first_k_dense_replace"):
        assert list(sizes.sparse) == [layer >= theirs.first_k_dense_replace for layer in range(sizes.layers)]
    assert (spec.rope.base, spec.rope.kind) == tuple(theirs.rope_parameters[key] for key in ("rope_theta", "rope_type"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_absent_and_null_keys_are_read_as_transformers_reads_them(name: str) -> None:
    config, compared = CONFIGS[name], 0
    for key in text_of(config).keys() - {"architectures", "model_type"}:
        null = changed(config, **{key: None})
        absent = changed(config)
        del text_of(absent)[key]
        for values in (absent, null):
            try:
                spec = model_spec(values)
            except UserError:
                continue
            same(spec, text_of_class(read_by_transformers(values)))
            compared += 1
    assert compared >= 3


def test_the_kind_of_model_is_the_one_by_which_others_read_the_config() -> None:
    """transformers and SGLang read a config by its model_type, and not by its architecture."""
    llama = CONFIGS["llama"]
    assert model_spec({**llama, "architectures": None}).family.name == "llama"
    for wrong in ("qwen3", None):
        with pytest.raises(UserError, match=r"^config: model_type: expected \"llama\", found "):
            model_spec({**llama, "model_type": wrong})
    with pytest.raises(UserError, match="model_type: expected"):
        model_spec({key: value for key, value in llama.items() if key != "model_type"})
    for other in (["LlamaModel"], ["LlamaForSequenceClassification"], ["GPT2LMHeadModel"]):
        with pytest.raises(UserError, match=rf"architecture {other[0]} is not supported"):
            model_spec({**llama, "architectures": other})


LINEAR, YARN = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    "forms",
    [
        {},
        {"rope_theta": 5e5},
        {"rope_scaling": None, "rope_theta": 5e5},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5},
        {"rope_scaling": LINEAR},
        {"rope_parameters": {**LINEAR, "rope_theta": 5e5}, "rope_theta": 1e4},
        {"rope_parameters": LINEAR, "rope_scaling": LINEAR},
        {"rope_parameters": LINEAR, "rope_scaling": {}},
        {"rope_parameters": {}, "rope_scaling": LINEAR},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_both_forms_of_rotary_embeddings(forms: dict[str, Any]) -> None:
    config = {**CONFIGS["llama"], **forms}
    spec, theirs = model_spec(config), read_by_transformers(config)
    same(spec, theirs)
    assert spec.rope.factor == theirs.rope_parameters.get("factor", 1.0)


def test_two_forms_that_differ_are_refused() -> None:
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": LINEAR}
    with pytest.raises(UserError, match="rope_parameters: expected the same as rope_scaling, or only one of them"):
        model_spec({**CONFIGS["llama"], **both})
    outside = {"rope_scaling": {**YARN, "original_max_position_embeddings": 32}, "original_max_position_embeddings": 64}
    with pytest.raises(UserError, match="original_max_position_embeddings: expected the original_max_position_embedd"):
        read_rope(HFConfig(outside, "config"), ("default", "yarn"))


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize(
    ("key", "value", "plain"),
    [
        ("final_logit_softcapping", 30.0, None),  # which SGLang obeys and transformers passes over
        ("rope_is_neox_style", False, True),
        ("logits_scaling", 8.0, 1.0),
        ("bias", True, False),
    ],
)
def test_keys_by_which_similar_models_compute_otherwise_are_refused(
    name: str, key: str, value: Any, plain: Any
) -> None:
    with pytest.raises(UserError, match=f"{key}: expected .*, found "):
        model_spec(changed(CONFIGS[name], **{key: value}))
    for same_result in (plain, None):
        model_spec(changed(CONFIGS[name], **{key: same_result}))
