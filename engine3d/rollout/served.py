"""Models that SGLang refuses after a minute of starting, or serves as another model without an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from engine3d.errors import UserError
from engine3d.models import ModelSpec
from engine3d.models.files.multi_token import DRAFTING_FAMILIES, check_drafting_layer
from engine3d.models.files.safetensors_files import StoredTensor, TensorFiles
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.spec import target_names
from engine3d.models.precision import BLOCK, Precision, check_experts, quantises_shared_experts
from engine3d.models.quantisation.stored import fp8_tensors, mxfp4_tensors
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.scheduler.local_experts import LEAST_EXPERTS

_VOCABULARY_ROWS = 64
"""SGLang pads the vocabulary to a multiple of it (layers/vocab_parallel_embedding.py)."""

_WITH_ADAPTERS = ("llama", "mistral", "qwen2", "qwen3")
_WITH_EXPERTS = ("deepseek_v3", "glm4_moe", "qwen2_moe", "qwen3_moe")
_WITH_ADAPTED_ATTENTION = ("gpt_oss", "minimax_m2", "mixtral")
"""Families whose adapters SGLang was seen to add: of all layers, of experts too, of attention alone."""

_DETERMINISTIC = ("fa3", "flashinfer", "triton")
_DETERMINISTIC_LATENT = ("fa3", "triton")
_DETERMINISTIC_ON_CPU = ("torch_native",)


def check_served(spec: ModelSpec, config: RolloutConfig) -> None:
    """Refuse a model that an engine would not serve as it is, and a parallel layout that does not divide it.

    Raises:
        UserError: names the setting or the key of the model's config, its value, and what would be accepted.
    """
    _check_architecture(spec)
    loads = config.server_args.get("load_format", "dummy") != "dummy"
    if spec.directory is not None and loads and not config.draft_tokens:
        check_files(spec.directory, config.precision)
    sizes, tp = spec.sizes, config.tp
    if config.attention_dp > 1 and not sizes.experts:
        raise UserError(
            f"rollout.engine.attention_dp={config.attention_dp}: expected 1, because {spec.family.architecture} has no "
            "experts, for which alone it was tried"
        )
    if config.cascade_attention and (sizes.latent is not None or sizes.sinks):
        kind = "attention sinks" if sizes.sinks else "latent attention"
        raise UserError(
            f"rollout.engine.cascade_attention=true: expected false, because {spec.family.architecture} has {kind}, "
            "with which it was not tried"
        )
    if sizes.sinks:
        _check_sinks(spec, config)
    if sizes.delta is not None:
        _check_delta_nets(spec, config)
        _divides("tp", tp, "key heads of gated delta nets (linear_num_key_heads)", sizes.delta.key_heads)
    if config.routes:
        _check_routes(spec)
    if config.draft_tokens:
        _check_drafts(spec, config)
    if config.kv_cache_dtype is not None and sizes.latent is not None:
        raise UserError(
            f"rollout.engine.kv_cache_dtype={config.kv_cache_dtype}: expected null, because "
            f"{spec.family.architecture} has latent attention, with which it was not tried"
        )
    attention_tp = config.attention_tp
    if config.attention_dp > 1 < attention_tp and spec.vocab_size % (_VOCABULARY_ROWS * attention_tp):
        raise UserError(
            f"rollout.engine.attention_dp={config.attention_dp} with tp={tp}: expected tp, because vocab_size="
            f"{spec.vocab_size} is no multiple of {_VOCABULARY_ROWS * attention_tp}, and SGLang fails then"
        )
    if config.precision is not None:
        _check_blocks(spec, config)
    setting = "tp" if config.attention_dp == 1 else "tp/attention_dp"
    _divides(setting, attention_tp, "attention heads (num_attention_heads)", sizes.heads)
    if sizes.latent is None and sizes.groups % attention_tp and attention_tp % sizes.groups:
        raise UserError(
            f"rollout.engine.{setting}={attention_tp}: expected a divisor or a multiple of "
            f"num_key_value_heads={sizes.groups}"
        )
    if not sizes.sparse or not all(sizes.sparse):
        _divides("tp", tp, "intermediate size of a dense MLP (intermediate_size)", sizes.ffn)
    _divides("tp", tp, "intermediate size of the shared expert", sizes.shared_ffn)
    if sizes.experts:
        _check_experts(spec, config)
    elif config.ep > 1:
        raise UserError(
            f"rollout.engine.ep={config.ep}: expected 1, because {spec.family.architecture} has no experts to cut over "
            "ranks"
        )


def _check_routes(spec: ModelSpec) -> None:
    """Refuse routes of a model of which SGLang records none."""
    if not spec.sizes.experts:
        raise UserError(
            f"rollout.engine.routes=true: expected false, because {spec.family.architecture} has no experts"
        )
    if spec.family.name == "mixtral":
        raise UserError(
            f"rollout.engine.routes=true: expected false: SGLang records no routes of {spec.family.architecture}"
        )


def _check_drafts(spec: ModelSpec, config: RolloutConfig) -> None:
    """Refuse drafts of a model whose layers for multi-token prediction were not tried, or that has none."""
    setting = f"rollout.engine.draft_tokens={config.draft_tokens}"
    if spec.family.name not in DRAFTING_FAMILIES:
        raise UserError(f"{setting} was not tried with {spec.family.architecture}; expected 0")
    if not spec.sizes.is_sparse(spec.sizes.layers - 1):
        raise UserError(f"{setting} was not tried with a model whose last layer has no experts; expected 0")
    try:
        check_drafting_layer(spec)
    except UserError as error:
        raise UserError(f"{setting}: {error}") from None


def _check_experts(spec: ModelSpec, config: RolloutConfig) -> None:
    """Refuse an expert-parallel layout that does not divide the experts, or that SGLang does not serve."""
    sizes, tp, ep = spec.sizes, config.tp, config.ep
    if sizes.expert_biases and ep > 1:
        raise UserError(
            f"rollout.engine.ep={ep}: expected 1: SGLang loads all experts of {spec.family.architecture} on every "
            "rank; tp cuts each of them"
        )
    _divides("ep", ep, "experts", sizes.experts)
    if config.local_experts_only and sizes.experts_per_token < LEAST_EXPERTS:
        raise UserError(
            f"rollout.engine.local_experts_only=true: expected false with {sizes.experts_per_token} experts of a "
            f"token (num_experts_per_tok), which SGLang adds up otherwise than {LEAST_EXPERTS} and more"
        )
    if sizes.expert_ffn % (tp // ep):
        raise UserError(
            f"rollout.engine.tp={tp} ep={ep}: tp/ep = {tp // ep} does not divide the experts' intermediate size "
            f"{sizes.expert_ffn} (moe_intermediate_size)"
        )


def check_adapters(spec: ModelSpec, config: RolloutConfig, lora: LoraConfig, *, on_gpu: bool) -> None:
    """Refuse engines with adapters apart from the model that were not tried, or that SGLang has no kernels for.

    Raises:
        UserError: names the setting.
    """
    if on_gpu:
        raise UserError("train.lora.engine=adapter was not tried on GPUs; expected merged")
    family, name = spec.family.name, spec.family.architecture
    if family not in _WITH_ADAPTERS + _WITH_EXPERTS + _WITH_ADAPTED_ATTENTION:
        raise UserError(f"train.lora.engine=adapter was not tried with {name}; expected merged")
    targets = lora.targets or target_names(spec)
    adapts_mlps = lora.model_copy(update={"targets": targets}).adapts_mlps
    if adapts_mlps and family in _WITH_ADAPTED_ATTENTION:
        raise UserError(
            f"train.lora.engine=adapter with lora.targets of experts was not tried with {name}; expected targets of "
            "attention alone, or merged"
        )
    if adapts_mlps and family in _WITH_EXPERTS:
        _check_adapted_experts(spec, targets)
    if spec.sizes.latent is not None and spec.sizes.latent.query_rank is None:
        for target in ("q_proj", "kv_a_proj_with_mqa"):
            if target in targets:
                raise UserError(
                    f"train.lora.engine=adapter with {target} in lora.targets: SGLang adds it to {name} with "
                    "q_lora_rank alone; expected other targets, or merged"
                )
    settings = {
        "precision": config.precision is not None,
        "kv_cache_dtype": config.kv_cache_dtype is not None,
        "attention_dp": config.attention_dp > 1,
        "release_weights": config.release_weights,
        "memory_saver": config.memory_saver,
        "draft_tokens": config.draft_tokens > 0,
    }
    for setting, is_set in settings.items():
        if is_set:
            raise UserError(
                f"train.lora.engine=adapter was not tried with rollout.engine.{setting}; expected one of them"
            )


def _check_adapted_experts(spec: ModelSpec, targets: Collection[str]) -> None:
    """Refuse adapters of MLPs that SGLang leaves out of experts, or has no room for."""
    sizes = spec.sizes
    if "down_proj" not in targets or not {"gate_proj", "up_proj"} & {*targets}:
        raise UserError(
            f"train.lora.engine=adapter with lora.targets of MLPs: SGLang adds to experts of "
            f"{spec.family.architecture} those of down_proj and of gate_proj or up_proj together; expected both, "
            "targets of attention alone, or merged"
        )
    if spec.family.name == "qwen2_moe" and sizes.shared_ffn != sizes.ffn:
        raise UserError(
            f"train.lora.engine=adapter with lora.targets of MLPs: SGLang has room for adapters of intermediate_size="
            f"{sizes.ffn}, and the shared expert has {sizes.shared_ffn} (shared_expert_intermediate_size); expected "
            "targets of attention alone, or merged"
        )


def check_stored(directory: Path, stored: Mapping[str, StoredTensor], precision: Precision | None) -> None:
    """Refuse files in another precision than that of the engine that is to load them.

    SGLang would load fp8 and MXFP4 into an engine of 16 bits without their scales.

    Args:
        directory: of the model.
        stored: the tensors of its files.
        precision: of the engine.

    Raises:
        UserError: names a tensor.
    """
    in_fp8, in_mxfp4 = fp8_tensors(stored), mxfp4_tensors(stored)
    if in_mxfp4:
        raise UserError(
            f"model {directory}: {min(in_mxfp4)} is in MXFP4, which engines load without its scales; expected "
            "bfloat16, or server_args.load_format=dummy where a trainer's weights come before anything is generated"
        )
    if precision is None and in_fp8:
        raise UserError(
            f"model {directory}: {min(in_fp8)} is in fp8, which engines of 16 bits load without its scales; expected "
            "bfloat16, rollout.engine.precision=fp8, or server_args.load_format=dummy where a trainer's weights come "
            "before anything is generated"
        )
    if precision is not None and not in_fp8:
        raise UserError(
            f"model {directory}: no tensor is in fp8, and engines with rollout.engine.precision={precision} load it; "
            f"expected null, or a model that checkpoint export --precision {precision} has written"
        )


def check_files(directory: Path, precision: Precision | None) -> None:
    """Refuse the files of a model that an engine is to load, as `check_stored` does."""
    with TensorFiles(directory) as files:
        try:
            stored = files.tensors
        except UserError:  # of which `check_weights` says what is wrong
            return
        check_stored(directory, stored, precision)


def check_deterministic(spec: ModelSpec, config: RolloutConfig, *, on_gpu: bool) -> None:
    """Refuse deterministic sampling with an attention backend that SGLang does not have it for.

    Its `ServerArgs._handle_deterministic_inference` does so once it has started.

    Raises:
        UserError: names the setting.
    """
    if not config.deterministic:
        return
    latent, backend = spec.sizes.latent is not None, config.attention_backend
    if latent and not on_gpu:
        raise UserError(
            f"rollout.engine.deterministic=true on a CPU: SGLang has it for {spec.family.architecture} only with the "
            "attention backends fa3 and triton, which need a GPU; expected false, or placement.rollout on GPUs"
        )
    accepted = _DETERMINISTIC_LATENT if latent else _DETERMINISTIC if on_gpu else _DETERMINISTIC_ON_CPU
    if backend is not None and backend not in accepted:
        raise UserError(
            f"rollout.engine.attention_backend={backend} with deterministic=true, expected "
            f"{' or '.join(accepted)}, or null for SGLang's choice"
        )


def check_device(config: RolloutConfig, *, on_gpu: bool) -> None:
    """Refuse on a CPU what SGLang's functions for GPUs alone can do, and on GPUs what was not tried there.

    Raises:
        UserError: names the setting.
    """
    if config.cascade_attention and not on_gpu:
        raise UserError(
            "rollout.engine.cascade_attention=true on a CPU: SGLang has FlashAttention-3 on GPUs alone; "
            "expected false, or placement.rollout on GPUs"
        )
    if config.local_experts_only and not on_gpu:
        raise UserError(
            "rollout.engine.local_experts_only=true on a CPU: SGLang computes experts there by other functions; "
            "expected false, or placement.rollout on GPUs"
        )
    if config.precision is not None and config.deterministic and on_gpu:
        raise UserError(
            f"rollout.engine.precision={config.precision} was not tried with deterministic=true on GPUs; expected one "
            "of them"
        )
    if config.draft_tokens and on_gpu:
        raise UserError(
            f"rollout.engine.draft_tokens={config.draft_tokens} was not tried on GPUs; expected 0, or "
            "placement.rollout on a CPU"
        )
    if config.kv_cache_dtype is not None and on_gpu:
        raise UserError(
            f"rollout.engine.kv_cache_dtype={config.kv_cache_dtype} was not tried on GPUs; expected null, or "
            "placement.rollout on a CPU"
        )


def check_on_gpus(spec: ModelSpec) -> None:
    """Refuse models that were not tried in engines on GPUs.

    Raises:
        UserError: names the model.
    """
    if spec.sizes.delta is not None:
        raise UserError(
            f"model: {spec.family.architecture} has gated delta nets, which were not tried in engines on GPUs; "
            "expected another model, or placement.rollout on a CPU"
        )


def check_input_blocks(spec: ModelSpec, config: RolloutConfig) -> None:
    """Refuse engines in fp8 on GPUs whose kernels cannot quantise inputs, in groups as long as a block.

    Source: SGLang's `per_token_group_quant_fp8`.

    Raises:
        UserError: names the size.
    """
    if config.precision is None:
        return
    inputs = {"hidden_size": spec.sizes.hidden}
    if spec.sizes.latent is not None:
        inputs["num_attention_heads * v_head_dim"] = spec.sizes.heads * spec.sizes.value_dim
    for key, size in inputs.items():
        if size % BLOCK:
            raise UserError(
                f"rollout.engine.precision={config.precision} on GPUs: {key}={size}, expected a multiple of {BLOCK}, "
                "of which SGLang's kernels quantise inputs"
            )


def _check_architecture(spec: ModelSpec) -> None:
    """SGLang's classes that pass over a key of the config which transformers and Megatron-Core obey."""
    sizes, name = spec.sizes, spec.family.architecture
    if spec.family.name in ("qwen2_moe", "qwen3_moe") and not all(sizes.sparse):
        key = "mlp_only_layers" if spec.hf_config.get("mlp_only_layers") else "decoder_sparse_step"
        raise UserError(
            f"model: {key}={spec.hf_config.get(key)}: SGLang builds experts in every layer of {name}; "
            "expected mlp_only_layers=[] and decoder_sparse_step=1"
        )
    if spec.family.name == "mixtral" and not spec.rope.base.is_integer():
        raise UserError(f"model: rope_theta={spec.rope.base}: SGLang rounds it for {name}; expected a whole number")
    if sizes.mlp_bias:
        raise UserError(f"model: mlp_bias=true: SGLang builds {name} without biases in its MLPs; expected false")


def _check_sinks(spec: ModelSpec, config: RolloutConfig) -> None:
    """Refuse kernels that know no attention sinks, and those that keep weights of experts transposed."""
    if config.attention_backend is not None:
        raise UserError(
            f"rollout.engine.attention_backend={config.attention_backend}: expected null, because "
            f"{spec.family.architecture} has attention sinks: SGLang chooses a backend that knows them"
        )
    runner = config.server_args.get("moe_runner_backend", "triton")
    if runner != "triton":
        raise UserError(
            f"rollout.engine.server_args.moe_runner_backend={runner}: expected triton, because others keep weights of "
            f"the experts of {spec.family.architecture} transposed"
        )
    if config.kv_cache_dtype is not None:
        raise UserError(
            f"rollout.engine.kv_cache_dtype={config.kv_cache_dtype}: expected null, because "
            f"{spec.family.architecture} has attention sinks, with which it was not tried"
        )
    if config.routes:
        raise UserError(f"rollout.engine.routes=true: expected false: not tried with {spec.family.architecture}")


def _check_delta_nets(spec: ModelSpec, config: RolloutConfig) -> None:
    """Refuse settings that were not tried with gated delta nets."""
    untried = {
        "attention_dp": (config.attention_dp, 1),
        "cascade_attention": (config.cascade_attention, False),
        "kv_cache_dtype": (config.kv_cache_dtype, None),
        "precision": (config.precision, None),
        "routes": (config.routes, False),
    }
    for name, (value, plain) in untried.items():
        if value != plain:
            raise UserError(
                f"rollout.engine.{name}={_yaml(value)}: expected {_yaml(plain)}, because {spec.family.architecture} "
                "has gated delta nets, with which it was not tried"
            )


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower()


def _check_blocks(spec: ModelSpec, config: RolloutConfig) -> None:
    """Refuse ranks that would have a part of a block (SGLang's `validate_block_quant_shapes`).

    Matrices that SGLang joins, such as gate and up, need complete blocks without parallel sizes too.
    """
    check_experts(spec)
    sizes, tp = spec.sizes, config.tp
    if spec.family.name in ("llama", "mistral"):
        raise UserError(
            f"rollout.engine.precision={config.precision}: SGLang loads no scales of blocks into "
            f"{spec.family.architecture}; expected null"
        )
    queries = sizes.heads * sizes.head_dim // tp
    lengths = {"rows of gate and up of an expert (moe_intermediate_size)": sizes.expert_ffn // (tp // config.ep)}
    if quantises_shared_experts(spec):
        lengths["rows of gate and up of the shared expert"] = sizes.shared_ffn // tp
    if not sizes.sparse or not all(sizes.sparse):
        lengths["rows of gate and up of a dense MLP (intermediate_size)"] = sizes.ffn // tp
    if sizes.latent is None:
        lengths |= {
            "rows of queries": queries,
            "rows of keys": sizes.head_dim * max(1, sizes.groups // tp),
        }
    else:
        lengths["rows of q_a_proj (q_lora_rank)"] = sizes.latent.query_rank or 0
        if tp > 1:
            lengths |= {
                "rows of queries": queries,
                "columns of o_proj (v_head_dim)": sizes.heads * sizes.value_dim // tp,
            }
    for what, length in lengths.items():
        if length % BLOCK:
            raise UserError(
                f"rollout.engine.precision={config.precision} with tp={tp} ep={config.ep}: a rank has {length} {what}, "
                f"expected a multiple of {BLOCK}, the rows and columns of a block"
            )


def _divides(key: str, value: int, what: str, size: int) -> None:
    if size % value:
        raise UserError(f"rollout.engine.{key}={value} does not divide the model's {size} {what}")
