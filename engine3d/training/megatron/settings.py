"""A training engine's settings as arguments of Megatron-Core's TransformerConfig, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models.attention.requirements import check_flash_attention, check_fused_query_key
from engine3d.models.family import ModelSpec
from engine3d.models.files.multi_token import DRAFTING_FAMILIES, check_drafting_layer
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.peft_files import check_peft
from engine3d.models.lora.spec import AdapterSpec
from engine3d.models.precision import check_trained_blocks
from engine3d.models.sizes import Sizes
from engine3d.platform import platform
from engine3d.training.config import TrainConfig
from engine3d.training.megatron.options import BY_NAME


def megatron_settings(config: TrainConfig, spec: ModelSpec, layout: Layout) -> dict[str, Any]:
    """Build the fields of a model's TransformerConfig that `models.megatron_config` does not set.

    Raises:
        UserError: recompute=selective without Transformer Engine.
    """
    settings: dict[str, Any] = {
        "sequence_parallel": config.sequence_parallel and layout.tp > 1,
        # Packed micro-batches differ in length, and so do the activations between stages.
        "variable_seq_lengths": layout.pp > 1,
        # Gradients are sums over micro-batches and ranks; see LossFunction.
        "calculate_per_token_loss": True,
        "deterministic_mode": config.deterministic,
    }
    if config.recompute == "full":
        some = config.recompute_layers
        method = {"recompute_method": "uniform", "recompute_num_layers": 1}
        if some is not None:
            method = {"recompute_method": "block", "recompute_num_layers": some}
        settings |= {"recompute_granularity": "full", **method}
    elif config.recompute == "selective":
        if not platform.has_transformer_engine:
            raise UserError("recompute=selective needs Transformer Engine, which is absent here: use none or full")
        settings |= {"recompute_granularity": "selective", "recompute_modules": _cheap_modules(spec.sizes)}
    if config.precision is not None and platform.has_transformer_engine:
        settings |= {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    return settings | config.megatron | _attention(config)


def _attention(config: TrainConfig) -> dict[str, Any]:
    if "attention_backend" not in config.megatron:
        return {}
    from megatron.core.transformer.enums import AttnBackend

    if not config.has_flash_attention:
        return {"attention_backend": AttnBackend.auto}
    return {"attention_backend": AttnBackend.flash, "flash_attention_version": 4}


def _cheap_modules(sizes: Sizes) -> list[str]:
    """Modules that take memory to keep and hardly any time to compute again. Flash attention keeps next to nothing."""
    modules = ["layernorm"]
    if sizes.experts:
        modules.append("moe_act")
    if sizes.latent is not None:
        modules.append("mla_up_proj")
    return modules


def check_options(config: TrainConfig, spec: ModelSpec, layout: Layout, *, transformer_engine: bool) -> None:
    """Refuse options that do not go with each other, the model, the layout, other settings or the devices.

    Args:
        config: its `megatron` has passed `refusals`.
        spec: the model.
        layout: of the model.
        transformer_engine: True if the model is built from Transformer Engine's layers.

    Raises:
        UserError: names the option.
    """
    if spec.sizes.delta is not None and transformer_engine:
        raise UserError(
            f"{spec.family.architecture} has gated delta nets, which run on CPUs alone here: kernels of "
            "flash-linear-attention were not tried; expected another model, or placement on a CPU"
        )
    if config.mtp is not None:
        _check_mtp(config, spec, layout, transformer_engine=transformer_engine)
    if config.precision is not None:
        check_trained_blocks(spec, layout, transformer_engine=transformer_engine)
        if config.fp8.given and transformer_engine:
            raise UserError(f"fp8.{min(config.fp8.given)} was not tried on GPUs; expected none, or precision=null")
        if config.fused_query_key:
            raise UserError(f"fused_query_key=true was not tried with precision={config.precision}; expected false")
    if config.fused_query_key:
        check_fused_query_key(spec, tp=layout.tp)
    if layout.cp > 1:
        _check_context_parallel(config, spec, layout)
    if config.lora is not None:
        if transformer_engine:
            check_lora_on_gpus(spec, layout)
        _check_lora(config, config.lora, spec)
    options = config.megatron
    if config.routing_replay != "none" and options.get("moe_router_fusion"):
        raise UserError(
            f"routing_replay={config.routing_replay} with megatron.moe_router_fusion=true, whose kernel takes no "
            "routes; expected none, or false"
        )
    _check_dispatchers(config, spec, layout, transformer_engine=transformer_engine)
    for name, value in options.items():
        option = BY_NAME[name]
        if option.needs_gpu and value != option.plain and not transformer_engine:
            plain = str(option.plain).lower()
            raise UserError(f"megatron.{name}={value} needs Transformer Engine; expected {plain} on a CPU")
    if config.has_flash_attention:
        check_flash_attention(spec, dtype=config.dtype, packing=config.packing, deterministic=config.deterministic)
    if options.get("moe_token_dispatcher_type") == "allgather":
        _check_allgather(config, layout)
    scores = spec.family.megatron(spec.sizes).get("moe_router_score_function", "softmax")
    if options.get("moe_router_fusion") and scores != "softmax":
        raise UserError("megatron.moe_router_fusion=true was tried with a softmax over experts alone; expected false")
    _check_load_balancing(options)


def _check_dispatchers(config: TrainConfig, spec: ModelSpec, layout: Layout, *, transformer_engine: bool) -> None:
    """Refuse our own dispatch of experts' tokens where it does not apply, or was not tried."""
    for setting in ("copy_engine_dispatcher", "predicted_expert_capacity"):
        if not getattr(config, setting) or not spec.sizes.experts:
            continue
        if not transformer_engine:
            raise UserError(f"{setting}=true needs Transformer Engine; expected false on a CPU")
        if not config.shares_fused_experts(spec.sizes, layout):
            raise UserError(
                f"{setting}=true with ep={layout.ep} etp={layout.etp}, dtype={config.dtype}: expected fused "
                "experts (fused_experts=true, bfloat16, precision=null, etp=1, no adapters) on several ranks that "
                "gather tokens (megatron.moe_token_dispatcher_type=allgather), or false"
            )
    if config.has_predicted_capacity(spec.sizes, layout) and (config.deterministic or layout.pp > 1):
        setting = "deterministic=true" if config.deterministic else f"pp={layout.pp}"
        raise UserError(f"predicted_expert_capacity=true was not tried with {setting}; expected false")


def _check_allgather(config: TrainConfig, layout: Layout) -> None:
    """Refuse settings with which Megatron-Core does not gather tokens for their experts."""
    gathers = "megatron.moe_token_dispatcher_type=allgather"
    if not config.packing:
        raise UserError(f"{gathers} needs packing=true, found false")
    if layout.pp > 1:
        raise UserError(
            f"{gathers} with pp={layout.pp}: expected pp=1, or alltoall, because Megatron-Core gathers no tokens "
            "where stages pass micro-batches of several lengths"
        )


def _check_load_balancing(options: Mapping[str, Any]) -> None:
    """Refuse losses of load balancing that contradict their coefficients."""
    kinds, coefficients = options.get("moe_router_load_balancing_type"), options.get("moe_aux_loss_coeff", 0.0)
    lists = isinstance(kinds, list), isinstance(coefficients, list)
    if lists[0] != lists[1] or (all(lists) and len(kinds or ()) != len(coefficients)):
        raise UserError(
            f"megatron.moe_aux_loss_coeff={coefficients} with moe_router_load_balancing_type={kinds}: expected as many "
            "of one as of the other"
        )
    if kinds == "none" and coefficients:
        raise UserError(
            f"megatron.moe_aux_loss_coeff={coefficients} with moe_router_load_balancing_type=none does nothing"
        )
    given = coefficients if isinstance(coefficients, list) else [coefficients]
    if kinds not in (None, "none") and not any(given):
        raise UserError(
            f"megatron.moe_router_load_balancing_type={kinds} with moe_aux_loss_coeff={coefficients} does nothing: "
            "expected a coefficient above 0"
        )


def _check_context_parallel(config: TrainConfig, spec: ModelSpec, layout: Layout) -> None:
    """Refuse settings that do not go with sequences shared by ranks, or were not tried with them."""
    cp = f"with layout.cp={layout.cp}"
    if not config.packing:
        raise UserError(f"packing=false {cp}: expected packing=true, because ranks share packed sequences")
    for has, kind in (
        (spec.sizes.sinks, "attention sinks"),
        (spec.sizes.window is not None, "sliding windows"),
    ):
        if has:
            raise UserError(f"{spec.family.architecture} has {kind}, which was not tried {cp}; expected 1")
    if config.has_flash_attention:
        raise UserError(
            f"megatron.attention_backend=flash {cp}: expected auto, because Transformer Engine shares no sequences "
            "with FlashAttention 4"
        )
    for setting in ("copy_engine_dispatcher", "predicted_expert_capacity"):
        if getattr(config, setting) and spec.sizes.experts:
            raise UserError(f"{setting}=true was not tried {cp}; expected false")


def check_effect(config: TrainConfig, spec: ModelSpec, *, trained: bool) -> None:
    """Refuse options that would do nothing; not for a model that shares another one's settings.

    Raises:
        UserError: names the option.
    """
    for setting in ("copy_engine_dispatcher", "predicted_expert_capacity"):
        if getattr(config, setting) and not spec.sizes.experts:
            raise UserError(f"{setting}=true, and {spec.family.architecture} has no experts; expected false")
    if config.routing_replay != "none" and not spec.sizes.experts:
        raise UserError(
            f"routing_replay={config.routing_replay}, and {spec.family.architecture} has no experts; expected none"
        )
    for name, value in config.megatron.items():
        if BY_NAME[name].needs_experts and not spec.sizes.experts:
            raise UserError(f"megatron.{name} is set, and {spec.family.architecture} has no experts")
        if BY_NAME[name].learns and not trained:
            raise UserError(f"megatron.{name} changes what a model learns, and this one is not trained")
        biased = spec.family.megatron(spec.sizes).get("moe_router_enable_expert_bias")
        if name == "moe_router_bias_update_rate" and value and not biased:
            raise UserError(f"megatron.{name} is set, and {spec.family.architecture} has no bias of experts")


def _check_mtp(config: TrainConfig, spec: ModelSpec, layout: Layout, *, transformer_engine: bool) -> None:
    """Refuse training of a layer for multi-token prediction that is none, or with what it was not tried with."""
    if transformer_engine:
        raise UserError("mtp was not tried on GPUs; expected null, or placement on a CPU")
    if spec.value_head:
        raise UserError("mtp with a scalar head: expected null, because values predict no tokens")
    if spec.family.name not in DRAFTING_FAMILIES:
        raise UserError(f"mtp was not tried with {spec.family.architecture}; expected null")
    if not spec.sizes.is_sparse(spec.sizes.layers - 1):
        raise UserError("mtp was not tried with a model whose last layer has no experts; expected null")
    try:
        check_drafting_layer(spec)
    except UserError as error:
        raise UserError(f"mtp: {error}") from None
    for name, size in (("pp", layout.pp), ("cp", layout.cp)):
        if size > 1:
            raise UserError(f"mtp was not tried with layout.{name}={size}; expected 1, or mtp=null")
    untried: dict[str, tuple[Any, str]] = {
        "lora": (config.lora is not None, "null"),
        "precision": (config.precision, "null"),
        "logits_tokens": (config.logits_tokens, "null"),
        "optimizer.offload": (config.optimizer.offload, "false"),
        "routing_replay": (config.routing_replay != "none", "none"),
        f"megatron.{min(config.megatron, default='')}": (config.megatron, "no such option"),
    }
    for setting, (is_set, expected) in untried.items():
        if is_set:
            raise UserError(f"mtp was not tried with {setting}; expected {expected}, or mtp=null")


def check_lora_on_gpus(spec: ModelSpec, layout: Layout) -> None:
    """Refuse adapters of Transformer Engine's layers where no GPU has run them yet.

    Raises:
        UserError: names the layout, or the kind of attention.
    """
    if layout.world_size > 1:
        raise UserError(f"lora on {layout.world_size} GPUs was not tried; expected one GPU for the actor, or lora=null")
    if spec.sizes.latent is not None:
        raise UserError(f"lora of latent attention ({spec.family.architecture}) was not tried on a GPU; expected null")


def _check_lora(config: TrainConfig, lora: LoraConfig, spec: ModelSpec) -> None:
    """Refuse adapters with settings that they were not tried with."""
    if spec.sizes.delta is not None:
        raise UserError(f"lora was not tried with the gated delta nets of {spec.family.architecture}; expected null")
    adapters = AdapterSpec.of(spec, lora)
    if lora.path is not None:
        try:
            check_peft(lora.path, adapters)
        except UserError as error:
            raise UserError(f"lora.path: {error}") from None
    if lora.dropout:
        raise UserError(
            f"lora.dropout={lora.dropout:g}: random numbers would differ between layouts, and the log-probs from those "
            "of the engines; expected 0"
        )
    if spec.value_head:
        raise UserError("lora with a scalar head was not tried; expected null")
    if config.precision is not None:
        raise UserError(f"lora with precision={config.precision} was not tried; expected precision=null, or lora=null")
    rate = config.megatron.get("moe_router_bias_update_rate", 0.0)
    if rate:
        raise UserError(
            f"lora with megatron.moe_router_bias_update_rate={rate:g}, which changes biases of the model itself; "
            "expected 0, or lora=null"
        )
