"""SGLang's engine arguments: which of them a user may give, which have a setting of their own, and why no others.

SGLang takes ten seconds to import, so its argument names are read from its source instead.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from engine3d.errors import UserError
from engine3d.sglang_source import sglang_directory


@dataclass(frozen=True, slots=True)
class Accepted:
    """An argument of SGLang's that may be given.

    Args:
        why: what it changes, and what it leaves as it is.
        expected: the accepted values, as errors name them.
        accepts: whether a value is one.
    """

    why: str
    expected: str
    accepts: Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_of(why: str, *values: str) -> Accepted:
    return Accepted(why, " or ".join(values), lambda value: isinstance(value, str) and value in values)


def _count(why: str) -> Accepted:
    return Accepted(why, "a whole number of at least 1", lambda value: _is_integer(value) and value >= 1)


def _seconds(why: str) -> Accepted:
    def accepts(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf

    return Accepted(why, "a number above 0", accepts)


def _flag(why: str) -> Accepted:
    return Accepted(why, "true or false", lambda value: isinstance(value, bool))


ACCEPTED: Mapping[str, Accepted] = {
    "load_format": _one_of(
        "which weights an engine starts with; the trainer's come before anything is generated",
        "auto",
        "safetensors",
        "dummy",
    ),
    "chunked_prefill_size": Accepted(
        "tokens of prompts that are read at a time; the memory estimate goes by it",
        "a whole number of at least 1, or -1 for whole prompts",
        lambda value: _is_integer(value) and (value >= 1 or value == -1),
    ),
    "max_prefill_tokens": _count("the same where prompts are not cut; the memory estimate goes by it"),
    "cuda_graph_max_bs_decode": _count("the largest batch with a CUDA graph; larger ones run kernel by kernel"),
    "enable_torch_compile": _flag("the same operations, compiled"),
    "disable_shared_experts_fusion": _flag("how the shared expert lies in memory, which the transfer finds out"),
    "enforce_shared_experts_fusion": _flag("how the shared expert lies in memory, which the transfer finds out"),
    "schedule_policy": _one_of("the order of waiting requests, not what is drawn for them", "fcfs", "lpm"),
    "schedule_conservativeness": _seconds("how many requests are begun before others have ended"),
    "moe_runner_backend": _one_of(
        "the kernel of experts: this one leaves their weights where they are written", "triton"
    ),
    "watchdog_timeout": _seconds("seconds after which SGLang ends itself if a batch has not ended"),
    "decode_log_interval": _count("batches between two lines of the log"),
    "log_level": _one_of("what goes to the log", "debug", "info", "warning", "error"),
}
"""Arguments that were tried, and keep log-probs, weights and memory right."""

_OWNED = {
    "model_path": "the model directory given to the engine",
    "tp_size": "tp",
    "ep_size": "ep",
    "dp_size": "attention_dp; several engines for several replicas",
    "enable_dp_attention": "attention_dp",
    "enable_dp_lm_head": "attention_dp",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "context_length": "context_length",
    "mem_fraction_static": "mem_fraction_static",
    "max_running_requests": "max_running_requests",
    "max_total_tokens": "max_total_tokens",
    "random_seed": "seed",
    "enable_deterministic_inference": "deterministic",
    "disable_cuda_graph": "cuda_graph",
    "cuda_graph_bs_decode": "max_running_requests: graphs reach as far",
    "attention_backend": "attention_backend",
    "prefill_attention_backend": "attention_backend",
    "decode_attention_backend": "attention_backend",
    "enable_memory_saver": "memory_saver",
    "skip_tokenizer_init": "nothing: the engine works in token ids",
    "enable_return_routed_experts": "routes",
    "weight_version": "nothing: the version is given with the weights",
}
"""SGLang's argument -> what to set instead."""

_REASONS = {
    r"speculative_.*|decoupled_spec_.*|spec_.*|enable_multi_layer_eagle|dllm_.*": (
        "draft_tokens drafts with the model's own layer; no transfer writes the weights of another draft model"
    ),
    r"(enable_)?eplb.*|ep_.*|init_expert_location|(enable_)?elastic_ep.*|enable_elastic_expert_backup|max_ep_size"
    r"|enable_waterfill": "experts move in memory, and the transfer would write to where they were",
    r"(pp|attn_cp|moe_dp|dcp)_.*|enable_(dp|attn_tp|prefill_c|prefill_context|dsa_prefill)_?.*|moe_(a2a|dense).*"
    r"|deepep_.*|cp_strategy|disable_attn_tp_gather|load_balance_method": (
        "the model is cut over ranks otherwise than by tp and ep, which is what the transfer was tried with"
    ),
    r"nnodes|node_rank|dist_init_addr|nccl_port|use_ray": "placement.rollout says on which hosts an engine is",
    r"quantization.*|torchao_config|modelopt_.*|quantize_and_serve|rl_quant_profile|fp[48]_gemm_.*"
    r"|enable_quant_communications|flashinfer_mxfp4_.*": (
        "the engine computes in another precision than the log-probs that are learned from"
    ),
    r"cpu_offload_gb|offload_.*|kt_.*|enable_(draft_)?weights_cpu_backup": (
        "weights lie in host memory, where no transfer writes them"
    ),
    r"(enable_)?(hierarchical_cache|hicache.*|hisparse.*|lmcache.*|flexkv.*)|radix_cache_backend"
    r"|enable_(streaming_session|session_radix_cache)": (
        "keys and values of old weights outlive them: a new version drops the cache on the device alone"
    ),
    r"disaggregation_.*|encoder_.*|language_only|enable_pdmux|pdmux_.*|sm_group_num|num_reserved_decode_tokens": (
        "a second engine reads the prompts, whose weights no transfer writes"
    ),
    r".*lora.*": "engines get the adapters of train.lora, merged or as train.lora.engine says",
    r"json_model_override_args|model_impl|model_config_parser|trust_remote_code|revision|decrypted_.*|is_embedding"
    r"|enable_multimodal": "the engine serves another model than is trained",
    r"custom_weight_loader|remote_instance_.*|checkpoint_engine_.*|modelexpress_.*|delete_ckpt_after_loading"
    r"|download_dir|model_checksum|.*weight_loader_.*|model_loader_extra_config": "the weights come from the trainer",
    r"enable_custom_logit_processor|preferred_sampling_params|sampling_.*|enable_strict_thinking|grammar_backend"
    r"|constrained_.*|enable_return_.*": "rollout.sampling says how tokens are drawn, which their log-probs go by",
    r"host|port|.*api_key|ssl_.*|fastapi_.*|.*grpc.*|.*http.*|sidecar.*|served_model_name|warmups|enable_ssl_refresh": (
        "there is no HTTP server: the run talks to its engines itself"
    ),
    r".*tokenizer.*|.*chat_template.*|completion_template|reasoning_parser|tool_.*": "the engine works in token ids",
    r"device|base_gpu_id|gpu_id_step|numa_node": "placement.rollout says which devices an engine has",
    r"page_size|disable_overlap_schedule|disable_prefill_cuda_graph|cuda_graph_.*": (
        "the engine chooses it for the machine that it runs on"
    ),
}
"""Names of arguments -> why they are refused."""

_NOT_TRIED = "it was not tried, so that nobody knows whether log-probs, weights and memory stay right"

ATTENTION_BACKENDS = ("fa3", "flashinfer", "triton", "flex_attention", "torch_native")
"""Attention backends that were tried: they read the keys and values that SGLang's own pools hold, in the engine's
dtype.
"""


@cache
def server_argument_names() -> frozenset[str]:
    """The fields of SGLang's `ServerArgs`."""
    tree = ast.parse((sglang_directory() / "srt" / "server_args.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
            return frozenset(
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            )
    raise ImportError("the installed sglang has no class ServerArgs in srt/server_args.py")


def check_server_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse every argument but those in `ACCEPTED`, and values that they cannot have.

    Raises:
        ValueError: names the argument, why it is refused, and what is accepted.
    """
    for name, value in arguments.items():
        if name in _OWNED:
            raise ValueError(f"server_args.{name} is not set here; set {_OWNED[name]}")
        if name not in server_argument_names():
            near = difflib.get_close_matches(name, ACCEPTED, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"server_args.{name} is not an argument of SGLang's ServerArgs{hint}")
        if name not in ACCEPTED:
            raise ValueError(f"server_args.{name} is refused: {refusal(name)}; accepted are {', '.join(ACCEPTED)}")
        accepted = ACCEPTED[name]
        if not accepted.accepts(value):
            raise ValueError(f"server_args.{name} = {value!r}: expected {accepted.expected} ({accepted.why})")


def refusal(name: str) -> str:
    """Why an argument of SGLang's is not accepted."""
    reasons = (reason for pattern, reason in _REASONS.items() if re.fullmatch(pattern, name))
    return next(reasons, _NOT_TRIED)


def check_attention_backend(name: str) -> str:
    """The name, if SGLang's attention backend of it was tried. Raises ValueError."""
    if name not in ATTENTION_BACKENDS:
        raise ValueError(f"{name!r} was not tried, expected {', '.join(ATTENTION_BACKENDS)}, or null for SGLang's own")
    return name


def check_against_platform(
    arguments: Mapping[str, Any], attention_backend: str | None, fixed: Mapping[str, Any]
) -> None:
    """Refuse what SGLang cannot run with on a machine.

    Args:
        arguments: as a user gives them.
        attention_backend: the same of the setting.
        fixed: the arguments that this kind of machine needs.

    Raises:
        UserError: names the setting and the value that the machine needs.
    """
    given = {f"server_args.{name}": (value, name) for name, value in arguments.items()}
    if attention_backend is not None:
        given["attention_backend"] = (attention_backend, "attention_backend")
    for setting, (value, name) in given.items():
        if name in fixed and fixed[name] != value:
            raise UserError(f"rollout.engine.{setting}={value}: on this device SGLang runs with {fixed[name]} alone")
