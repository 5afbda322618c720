"""Fields that `train.megatron` may set, and the messages for others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig
from pydantic import ValidationError

from benchmarks.reshard_plan import named_model
from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import FAMILIES, ModelSpec, model_spec
from engine3d.models.attention import requirements
from engine3d.models.megatron_config import transformer_config
from engine3d.platform import platform
from engine3d.training.config import TrainConfig
from engine3d.training.megatron.options import (
    BY_NAME,
    OPTIONS,
    PAGE,
    REFUSED,
    page,
    refusals,
)
from engine3d.training.megatron.settings import check_effect, check_options, megatron_settings
from tests.support import tiny_families

ROOT = Path(__file__).parents[4]
FIELDS = {field.name for field in dataclasses.fields(MLATransformerConfig)}
MOE, DENSE, DEEPSEEK = (named_model("qwen3-30b-a3b"), named_model("llama-3-70b"), model_spec(tiny_families.DEEPSEEK))


def test_names_are_megatron_cores_and_each_is_named_once() -> None:
    refused = [name for group in REFUSED for name in group.names]
    assert len({*BY_NAME, *refused}) == len(OPTIONS) + len(refused)
    assert {*BY_NAME, *refused} <= FIELDS


def test_the_page_is_the_table() -> None:
    assert (ROOT / PAGE).read_text() == page()
    for option in OPTIONS:
        for path in option.tried.split(", "):
            assert (ROOT / path).exists(), path


def test_every_other_field_is_refused_whatever_its_value() -> None:
    for name in sorted(FIELDS - BY_NAME.keys()):
        for value in (0, None, False, True, "none"):
            [line] = refusals({name: value})
            assert line.startswith(f"{name}: "), name


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"calculate_per_token_loss": False}, "calculate_per_token_loss: the engine sets it: gradients are sums"),
        ({"finalize_model_grads_func": None}, "finalize_model_grads_func: the engine sets it"),
        ({"context_parallel_size": 2}, "it has a setting of its own; expected train.layout.cp"),
        ({"tensor_model_parallel_size": 2}, "it has a setting of its own; expected train.layout.tp"),
        ({"recompute_modules": ["moe"]}, "it has a setting of its own; expected train.recompute"),
        ({"num_layers": 2}, "num_layers: it is of the model, and SGLang would serve another one"),
        ({"window_size": [8, 0]}, "it is of the model"),
        ({"softmax_type": "off-by-one"}, "it is of the model"),
        ({"layernorm_epsilon": 1e-3}, "it is of the model"),
        ({"hidden_dropout": 0.1}, "hidden_dropout: it draws or drops what SGLang does not"),
        ({"moe_expert_capacity_factor": 1.0}, "it draws or drops"),
        ({"mtp_num_layers": 1}, "mtp_num_layers: it would be ignored"),
        ({"fp8": "hybrid"}, "it computes in another precision"),
        (
            {"moe_shared_expert_overlap": True},
            "it is none of the options that were tried; expected one of moe_token_disp",
        ),
        ({"nonsense": 1}, r"nonsense: it is none of the options .* \(docs/megatron_options.md\)"),
        ({"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type='flex'; expected alltoall or allgather"),
        ({"moe_router_load_balancing_type": "aux_loss"}, "'aux_loss': its load is that of a micro-batch, .*; expected"),
        ({"moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"]}, "its load is that of a micro-batch"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "it routes otherwise in training than SGLang does"),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, "by a bias that SGLang does not have"),
        ({"moe_router_load_balancing_type": []}, r"=\[\]; expected none, seq_aux_loss"),
        ({"moe_aux_loss_coeff": -1e-3}, "moe_aux_loss_coeff=-0.001; expected a number of at least 0"),
        ({"moe_aux_loss_coeff": "1e-3"}, "moe_aux_loss_coeff='1e-3'; expected a number"),
        ({"moe_aux_loss_coeff": [0.1, None]}, "expected a number"),
        ({"moe_z_loss_coeff": float("nan")}, "moe_z_loss_coeff=nan; expected a number"),
        ({"moe_z_loss_coeff": True}, "moe_z_loss_coeff=True; expected a number"),
        ({"moe_router_fusion": 1}, "moe_router_fusion=1; expected true or false"),
        ({"attention_backend": "fused"}, "attention_backend='fused'; expected auto or flash"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError, match=line):
        TrainConfig(megatron=options)


def test_every_refusal_is_told() -> None:
    assert len(refusals({"num_layers": 2, "moe_z_loss_coeff": 1e-3, "fp8": None})) == 2


@pytest.mark.parametrize(
    ("spec", "layout", "options", "others", "line"),
    [
        (
            MOE,
            Layout(),
            {"moe_router_fusion": True},
            {},
            "moe_router_fusion=True needs Transformer Engine; expected false",
        ),
        (MOE, Layout(), {"attention_backend": "flash"}, {}, "=flash needs Transformer Engine; expected auto on a CPU"),
        (MOE, Layout(ep=2, dp=2), {"moe_token_dispatcher_type": "allgather"}, {"packing": False}, "packing=true"),
        (MOE, Layout(pp=2), {"moe_token_dispatcher_type": "allgather"}, {}, "allgather with pp=2: expected pp=1"),
        (
            MOE,
            Layout(),
            {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": 0.1},
            {},
            "moe_aux_loss_coeff=0.1 with .*: expected as many of one as of the other",
        ),
        (MOE, Layout(), {"moe_aux_loss_coeff": [0.1]}, {}, "expected as many of one as of the other"),
        (
            MOE,
            Layout(),
            {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1},
            {},
            "with moe_router_load_balancing_type=none does nothing",
        ),
        (
            MOE,
            Layout(),
            {"moe_router_load_balancing_type": "seq_aux_loss"},
            {},
            "with moe_aux_loss_coeff=0.0 does nothing: expected a coefficient above 0",
        ),
    ],
)
def test_options_against_model_layout_and_devices(
    spec: ModelSpec, layout: Layout, options: dict[str, Any], others: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=rf"^megatron\..*{line}"):
        check_options(TrainConfig(megatron=options, **others), spec, layout, transformer_engine=False)


def test_the_fused_router_is_for_a_softmax_on_gpus() -> None:
    config = TrainConfig(megatron={"moe_router_fusion": True})
    check_options(config, MOE, Layout(ep=2, dp=2), transformer_engine=True)
    with pytest.raises(UserError, match="was tried with a softmax over experts alone; expected false"):
        check_options(config, DEEPSEEK, Layout(), transformer_engine=True)


def test_routes_are_replayed_by_routers_that_take_them() -> None:
    config = TrainConfig(routing_replay="update", megatron={"moe_router_fusion": True})
    with pytest.raises(UserError, match=r"routing_replay=update with megatron\.moe_router_fusion=true, whose kernel"):
        check_options(config, MOE, Layout(), transformer_engine=True)
    config = TrainConfig(routing_replay="rollout")
    check_options(config, MOE, Layout(), transformer_engine=True)
    check_effect(config, MOE, trained=True)
    with pytest.raises(UserError, match="routing_replay=rollout, and LlamaForCausalLM has no experts; expected none"):
        check_effect(config, DENSE, trained=True)


NARROW, WIDE = (model_spec(tiny_families.MOE | {"head_dim": size}) for size in (64, 256))


@pytest.mark.parametrize(
    ("spec", "settings", "line"),
    [
        (DEEPSEEK, {}, "DeepseekV3ForCausalLM has latent attention; expected auto"),
        (WIDE, {}, "head_dim=256, expected 64 or 128, or auto"),
        (NARROW, {"dtype": "float32"}, "with dtype=float32: expected bfloat16, or auto"),
        (NARROW, {"packing": False}, "with packing=false: expected packing=true, or auto"),
        (NARROW, {"deterministic": True}, "with deterministic=true: expected false, or auto"),
    ],
)
def test_what_flash_attention_was_not_tried_with(spec: ModelSpec, settings: dict[str, Any], line: str) -> None:
    config = TrainConfig(megatron={"attention_backend": "flash"}, **settings)
    with pytest.raises(UserError, match=f"^megatron.attention_backend=flash:? {line}"):
        check_options(config, spec, Layout(), transformer_engine=True)


def test_flash_attention_is_the_fourth_and_its_packages_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(megatron={"attention_backend": "flash", "moe_aux_loss_coeff": 0.1})
    check_options(config, NARROW, Layout(), transformer_engine=True)
    made = transformer_config(MOE, Layout(), torch.bfloat16, **megatron_settings(config, MOE, Layout()))
    assert (made.attention_backend, made.flash_attention_version) == (AttnBackend.flash, 4)
    settings = megatron_settings(TrainConfig(megatron={"attention_backend": "auto"}), MOE, Layout())
    assert transformer_config(MOE, Layout(), torch.bfloat16, **settings).attention_backend == AttnBackend.auto
    monkeypatch.setattr(platform, "has_transformer_engine", True)
    monkeypatch.setattr(requirements, "FLASH_ATTENTION", ("flash-attn-4", "no-such-package"))
    with pytest.raises(UserError, match="flash needs no-such-package, which is absent here: pip"):
        check_options(config, NARROW, Layout(), transformer_engine=True)


GATHERING = {"moe_token_dispatcher_type": "allgather"}


@pytest.mark.parametrize("setting", ["copy_engine_dispatcher", "predicted_expert_capacity"])
def test_what_ranks_that_share_experts_do_needs_fused_experts_on_gpus(setting: str) -> None:
    config, two = TrainConfig(**{setting: True}, megatron=GATHERING), Layout(ep=2, dp=2)
    for spec, layout in ((MOE, two), (DENSE, Layout(dp=2))):
        check_options(config, spec, layout, transformer_engine=True)
    with pytest.raises(UserError, match=f"{setting}=true, and LlamaForCausalLM has no experts; expected false"):
        check_effect(config, DENSE, trained=True)
    with pytest.raises(UserError, match=f"{setting}=true needs Transformer Engine; expected false on a CPU"):
        check_options(config, MOE, two, transformer_engine=False)
    for layout, settings, cause in (
        (Layout(dp=2), {}, "ep=1 etp=1, dtype=bfloat16"),
        (two, {"megatron": {}}, "ep=2"),
        (two, {"fused_experts": False}, "ep=2"),
        (two, {"dtype": "float32"}, "dtype=float32"),
        (Layout(ep=2, etp=2, dp=4), {}, "etp=2"),
    ):
        other = TrainConfig(**{setting: True, "megatron": GATHERING} | settings)
        with pytest.raises(UserError, match=f"{setting}=true with .*{cause}.*: expected fused experts"):
            check_options(other, MOE, layout, transformer_engine=True)


def test_what_room_for_rows_of_experts_was_not_tried_with() -> None:
    for layout, settings, line in (
        (Layout(ep=2, dp=2), {"deterministic": True}, "deterministic=true"),
        (Layout(ep=2, dp=2, pp=2), {}, "pp=2"),
    ):
        other = TrainConfig(**{"predicted_expert_capacity": True, "megatron": GATHERING} | settings)
        with pytest.raises(
            UserError, match=f"predicted_expert_capacity=true was not tried with {line}; expected false"
        ):
            check_options(other, MOE, layout, transformer_engine=True)


def test_options_that_go_together() -> None:
    for spec, layout, options in (
        (MOE, Layout(ep=2, dp=2), {"moe_token_dispatcher_type": "allgather", "moe_aux_loss_coeff": 1e-3}),
        (MOE, Layout(pp=2), {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1}),
        (DEEPSEEK, Layout(), {"moe_router_bias_update_rate": 1e-3, "moe_z_loss_coeff": 0}),
    ):
        check_options(TrainConfig(megatron=options), spec, layout, transformer_engine=False)
        check_effect(TrainConfig(megatron=options), spec, trained=True)


@pytest.mark.parametrize(
    ("spec", "options", "trained", "line"),
    [
        (DENSE, {"moe_z_loss_coeff": 1e-3}, True, "moe_z_loss_coeff is set, and LlamaForCausalLM has no experts"),
        (MOE, {"moe_router_bias_update_rate": 1e-3}, True, "Qwen3MoeForCausalLM has no bias of experts"),
        (MOE, {"moe_z_loss_coeff": 1e-3}, False, "changes what a model learns, and this one is not trained"),
    ],
)
def test_options_that_would_do_nothing(spec: ModelSpec, options: dict[str, Any], trained: bool, line: str) -> None:
    with pytest.raises(UserError, match=line):
        check_effect(TrainConfig(megatron=options), spec, trained=trained)
    check_effect(TrainConfig(megatron={"moe_token_dispatcher_type": "allgather"}), MOE, trained=False)


def _config(architecture: str) -> dict[str, Any]:
    """Tiny config of a family."""
    return next(config for config in tiny_families.CONFIGS.values() if config["architectures"] == [architecture])


WINDOWS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 32},
    "MixtralForCausalLM": {"sliding_window": 32},
    **{
        f"{name}ForCausalLM": {"use_sliding_window": True, "sliding_window": 32}
        for name in ("Qwen2", "Qwen3", "Qwen2Moe", "Qwen3Moe")
    },
}
"""Settings of a config with which layers attend within windows, by architecture."""
UNSHARED = {"GptOssForCausalLM": "attention sinks"}
"""Layers of architectures whose sequences context-parallel ranks cannot share."""


@pytest.mark.parametrize("architecture", [family.architecture for family in FAMILIES])
@pytest.mark.parametrize("transformer_engine", [False, True])
def test_attention_that_ranks_cannot_share_is_refused_in_one_line(architecture: str, transformer_engine: bool) -> None:
    spec, layout = model_spec(_config(architecture)), Layout(cp=2)

    def line(**settings: Any) -> str | None:
        try:
            check_options(TrainConfig(**settings), spec, layout, transformer_engine=transformer_engine)
        except UserError as error:
            return str(error)
        return None

    if spec.sizes.delta is not None and transformer_engine:
        assert "run on CPUs alone" in (line() or "")
        return
    assert (
        line(packing=False)
        == "packing=false with layout.cp=2: expected packing=true, because ranks share packed sequences"
    )
    if architecture in UNSHARED:
        refused = f"{architecture} has {UNSHARED[architecture]}, which was not tried with layout.cp=2; expected 1"
        assert line() == line(megatron={"attention_backend": "flash"}) == refused
        return
    assert line() is None
    assert line(megatron={"attention_backend": "flash"}) == (
        "megatron.attention_backend=flash with layout.cp=2: expected auto, because Transformer Engine shares no "
        "sequences with FlashAttention 4"
    )
    if architecture in WINDOWS:
        with pytest.raises(UserError, match=r"sliding_window") as refusal:
            model_spec(_config(architecture) | WINDOWS[architecture])
        assert "\n" not in str(refusal.value)
