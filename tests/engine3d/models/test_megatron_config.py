"""Models that are read and layouts that fit them, which Megatron-Core's TransformerConfig accepts all.

It takes seconds to import, so `hybridflow check` does not ask it: what it refuses has to be refused before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine3d.errors import UserError
from engine3d.models import ModelSpec, model_spec
from engine3d.platform import platform
from engine3d.training.config import TrainConfig
from engine3d.training.megatron.settings import check_options, megatron_settings
from tests.support.tiny_families import CONFIGS, DEEPSEEK, MOE

LAYOUTS: list[dict[str, int]] = [
    {"world_size": 1},
    {"world_size": 2, "tp": 2},
    {"world_size": 2, "pp": 2},
    {"world_size": 3, "pp": 3},
    {"world_size": 2, "tp": 2, "ep": 2},
    {"world_size": 4, "tp": 4, "etp": 2, "ep": 2},
    {"world_size": 4, "tp": 2, "pp": 2, "etp": 2},
]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"dtype": "float32"},
    {"recompute": "full"},
    {"recompute": "full", "recompute_layers": 50},
    {"recompute": "selective"},
    {"deterministic": True},
    {"sequence_parallel": False},
    {"packing": False},
]


def models() -> Iterator[ModelSpec]:
    """Models of all families with every choice that TransformerConfig looks at, without those that are refused."""
    configs = [*CONFIGS.values()]
    for experts, chosen, normalised, step in itertools.product((1, 8), (1, 2, 8), (False, True), (1, 2, 9)):
        few = {"num_experts": experts, "num_experts_per_tok": chosen, "decoder_sparse_step": step}
        configs.append({**MOE, **few, "norm_topk_prob": normalised, "mlp_only_layers": []})
    for experts, chosen, groups, limit, dense in itertools.product((4, 16), (1, 2, 4), (1, 4), (1, 2, 4), (0, 3)):
        few = {"n_routed_experts": experts, "num_experts_per_tok": chosen, "first_k_dense_replace": dense}
        configs.append({**DEEPSEEK, **few, "n_group": groups, "topk_group": limit})
    for config in configs:
        try:
            yield model_spec(config)
        except UserError:
            continue


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_megatron_core_accepts_what_is_accepted_here(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Transformer Engine, and with it, but for what needs the library itself."""
    platform.prepare_training()
    from engine3d.models.megatron_config import transformer_config

    without_library = {"moe_permute_fusion": False, "apply_rope_fusion": False} if fused else {}
    monkeypatch.setattr(type(platform), "has_transformer_engine", fused)
    built = 0
    for spec, sizes, settings in itertools.product(list(models()), LAYOUTS, SETTINGS):
        config = TrainConfig.model_validate(
            {"layout": {k: v for k, v in sizes.items() if k != "world_size"}, **settings}
        )
        try:
            layout = config.layout.layout(sizes["world_size"])
            spec.check_layout(layout)
            config.check_trained(spec.sizes, layout)
            check_options(config, spec, layout, transformer_engine=fused)
            arguments = megatron_settings(config, spec, layout) | without_library
        except UserError:
            continue
        transformer_config(spec, layout, getattr(torch, config.dtype), **arguments)
        built += 1
    assert built > 1000


def test_one_expert_of_a_token_with_normalised_weights_is_refused() -> None:
    assert model_spec({**MOE, "num_experts_per_tok": 1, "norm_topk_prob": False}).sizes.experts_per_token == 1
    with pytest.raises(UserError, match="num_experts_per_tok: expected at least 2 with norm_topk_prob=true, or norm_"):
        model_spec({**MOE, "num_experts_per_tok": 1, "norm_topk_prob": True})
