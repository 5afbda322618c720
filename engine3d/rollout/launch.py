"""Inputs of a rollout engine's start: sizes of its model, SGLang's arguments, and the environment."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine3d.errors import UserError
from engine3d.input_files import read_model_config
from engine3d.models import FAMILIES, load_model_spec, sglang_overrides
from engine3d.models.families.gpt_oss import GPT_OSS
from engine3d.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from engine3d.models.families.qwen3_next import QWEN3_NEXT
from engine3d.models.files.safetensors_files import read_header
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.peft_files import peft_config
from engine3d.models.lora.spec import target_names
from engine3d.models.precision import (
    NOTHING_LEFT_OUT,
    Fp8Settings,
    Precision,
    quantisation_config,
    quantised_as_stored,
    quantises_shared_experts,
)
from engine3d.models.quantisation.stored import QUANTISATION_KEY, fp8_tensors
from engine3d.platform import platform
from engine3d.rollout.cache import (
    PAGE_TOKENS,
    STATES_OF_A_REQUEST,
    reserved_tokens,
    tokens_needed,
)
from engine3d.rollout.config import ADAPTER_SLOTS, RolloutConfig
from engine3d.rollout.host.generation import ADAPTER_VARIABLE
from engine3d.rollout.host.log import temporary_log
from engine3d.rollout.host.process import HostProcess
from engine3d.rollout.scheduler.drafts import DRAFT_VARIABLE
from engine3d.rollout.scheduler.plugin import (
    CASCADE_VARIABLE,
    FUSED_SAMPLING_VARIABLE,
    LOCAL_EXPERTS_VARIABLE,
    MEETING_TIMEOUT_VARIABLE,
    MEETING_VARIABLE,
    PEERS_VARIABLE,
)
from engine3d.rollout.scheduler.rank import RELEASE_VARIABLE, SOURCES_TIMEOUT_VARIABLE, SOURCES_VARIABLE
from engine3d.rollout.scheduler.routes import ROUTES_VARIABLE
from engine3d.rollout.scheduler.versions import VERSIONS_VARIABLE
from engine3d.rollout.served import check_device, check_stored
from engine3d.rollout.server_arguments import check_against_platform
from engine3d.rollout.shard import SINGLE_HOST, EngineShard
from engine3d.sglang_source import attention_arguments, sglang_directory

# Of a launcher's own process group, which SGLang's processes are no part of.
_LAUNCHER_VARIABLES = re.compile(
    r"^(RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|ENGINE3D_STORE)$"
)

# Variables by which SGLang would give other log-probs than those of the sampling temperature, or choose kernels that
# rearrange the experts' weights.
_OTHER_RESULTS = frozenset({"SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_CUTLASS_MOE"})


_WITH_DELTA_NETS = frozenset(family.architecture for family in (QWEN3_NEXT, QWEN3_5_MOE, QWEN3_5))
_WITH_VISION_TOWER = frozenset(family.architecture for family in FAMILIES if family.text is not None)


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """Sizes and names in a HuggingFace model directory."""

    directory: Path
    architectures: tuple[str, ...]
    vocab_size: int
    max_positions: int
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the config that SGLang is to read otherwise than the file has them, and their values."""
    adapters: LoraConfig | None = None
    """Adapters that SGLang adds to the model."""
    fp8: Fp8Settings = NOTHING_LEFT_OUT
    """Matrices that stay in the engine's dtype where it is in fp8 and loads no files."""
    in_fp8: frozenset[str] | None = None
    """Tensors of the files in fp8; None for an engine that does not load them."""


def read_model(
    directory: Path,
    weights_needed: bool,
    adapters: LoraConfig | None = None,
    fp8: Fp8Settings = NOTHING_LEFT_OUT,
    precision: Precision | None = None,
) -> ModelDirectory:
    """Read a model directory's config.json and the headers of its weights.

    Args:
        directory: of the model.
        weights_needed: True for an engine that loads the weights of the files.
        adapters, fp8: see `ModelDirectory`.
        precision: of the engine's weights.

    Raises:
        UserError: names what is missing, or the precision that weights have.
    """
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise UserError(f"model directory {directory} has no config.json")
    try:
        config = read_model_config(directory)
        overrides = sglang_overrides(config)
        vocab_size, max_positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
        architectures = tuple(overrides.get("architectures") or config["architectures"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{config_path} is not a model's configuration: {type(error).__name__} {error}") from error
    files = sorted(directory.glob("*.safetensors"))
    if weights_needed and not files:
        raise UserError(f"model directory {directory} holds no *.safetensors")
    stored = {name: tensor for file in files for name, tensor in read_header(file).items()}
    if weights_needed:
        check_stored(directory, stored, precision)
    in_fp8 = frozenset(fp8_tensors(stored)) if weights_needed else None
    return ModelDirectory(directory, architectures, vocab_size, max_positions, overrides, adapters, fp8, in_fp8)


def context_length(config: RolloutConfig, model: ModelDirectory) -> int:
    """Tokens of prompt and response together. Raises UserError when the model cannot have that many."""
    if config.context_length is None:
        return model.max_positions
    if config.context_length > model.max_positions:
        raise UserError(
            f"context_length is {config.context_length}; {model.directory} has {model.max_positions} positions"
        )
    return config.context_length


def server_arguments(config: RolloutConfig, model: ModelDirectory, shard: EngineShard = SINGLE_HOST) -> dict[str, Any]:
    """Arguments of `sglang.Engine`: ours, then what the platform needs, then what the user gave for SGLang.

    Args:
        config: of the engine.
        model: that it serves.
        shard: of the engine on this host.

    Raises:
        UserError: names a setting that this platform cannot have.
    """
    requests, groups = config.most_requests, config.attention_dp
    if shard.count > 1:
        _check_several_hosts(config, model, shard.count)
    arguments: dict[str, Any] = {
        "model_path": str(model.directory),
        "skip_tokenizer_init": True,
        "tp_size": config.tp,
        "ep_size": config.ep,
        "dtype": config.dtype,
        "context_length": context_length(config, model) + reserved_tokens(config.draft_tokens),
        "mem_fraction_static": config.mem_fraction_static,
        "max_running_requests": requests * groups,  # which SGLang distributes
        "random_seed": config.seed,
        "enable_deterministic_inference": config.deterministic,
        "disable_cuda_graph": not config.cuda_graph,
        "enable_memory_saver": config.memory_saver,
        "enable_return_routed_experts": config.routes,
        "weight_version": "0",
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "log_level": "info",
    }
    fixed = platform.rollout_server_arguments(requests)
    if GPT_OSS.architecture in model.architectures:
        fixed |= platform.sink_arguments()
    if model.adapters is not None:
        arguments |= _adapter_arguments(model, model.adapters)
    if config.draft_tokens:
        arguments |= _draft_arguments(config.draft_tokens)
    if _WITH_DELTA_NETS.intersection(model.architectures):
        fixed["max_mamba_cache_size"] = STATES_OF_A_REQUEST * requests
    if _WITH_VISION_TOWER.intersection(model.architectures):
        fixed["enable_multimodal"] = False  # text alone, for which SGLang needs no processor of pictures
    check_against_platform(config.server_args, config.attention_backend, fixed)
    check_device(config, on_gpu=platform.gpus > 0)
    arguments |= fixed
    if config.kv_cache_dtype is not None:
        arguments["kv_cache_dtype"] = config.kv_cache_dtype
    if config.has_own_graphs:
        arguments.pop("cuda_graph_bs_decode", None)
    if config.attention_kernels is not None:
        arguments["attention_backend"] = config.attention_kernels
    if groups > 1:
        # A group that sleeps until it is asked for something keeps those waiting that were. They sleep while memory is
        # released (`engine3d.rollout.scheduler.plugin`).
        arguments |= attention_arguments(groups) | {"sleep_on_idle": False}
    if shard.count > 1:
        arguments |= {"nnodes": shard.count, "node_rank": shard.index}
    overrides = dict(model.overrides)
    if config.precision is not None:
        spec, in_fp8 = load_model_spec(model.directory), model.in_fp8
        spec = model.fp8.applied(spec) if in_fp8 is None else quantised_as_stored(spec, in_fp8)
        overrides[QUANTISATION_KEY] = quantisation_config(spec, in_fp8 or ())
        if not quantises_shared_experts(spec):
            arguments["disable_shared_experts_fusion"] = True  # DeepSeek-V3's would be one more of the routed experts
    if overrides:
        arguments["json_model_override_args"] = json.dumps(overrides)
    needed = tokens_needed(
        requests=config.requests_of_a_group,
        sequence_tokens=context_length(config, model),
        page_tokens=PAGE_TOKENS[platform.device_type],
        draft_tokens=config.draft_tokens,
    )
    given = config.max_total_tokens
    arguments["max_total_tokens"] = needed if given is None else -(-given // groups)
    return arguments | config.server_args


def _check_several_hosts(config: RolloutConfig, model: ModelDirectory, hosts: int) -> None:
    """Refuse settings that were not tried with an engine on several hosts."""
    untried = (
        (config.attention_dp > 1, f"attention_dp={config.attention_dp}", "1"),
        (model.adapters is not None, "lora.engine=adapter", "merged"),
        (config.draft_tokens > 0, f"draft_tokens={config.draft_tokens}", "0"),
        *((True, f"{name}={value}", "null") for name, value in config.altered_policy.items()),
    )
    for used, setting, expected in untried:
        if used:
            raise UserError(f"{setting} was not tried with an engine on {hosts} hosts, expected {expected}")


def _draft_arguments(tokens: int) -> dict[str, Any]:
    """SGLang's arguments for chains of drafted tokens."""
    return {
        "speculative_algorithm": "EAGLE",  # its name for layers for multi-token prediction too
        "speculative_num_steps": tokens,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": tokens + 1,
        "speculative_draft_load_format": "auto",
    }


def _adapter_arguments(model: ModelDirectory, adapters: LoraConfig) -> dict[str, Any]:
    """SGLang's arguments for one adapter."""
    return {
        "enable_lora": True,
        "max_lora_rank": adapters.rank,
        "lora_target_modules": _targets(model, adapters),
        "max_loras_per_batch": ADAPTER_SLOTS,
        "lora_backend": "torch_native",
    }


def _targets(model: ModelDirectory, adapters: LoraConfig) -> list[str]:
    return list(adapters.targets or target_names(load_model_spec(model.directory)))


def environment(
    config: RolloutConfig,
    model: ModelDirectory,
    devices: tuple[int, ...],
    weight_sources: tuple[Path | None, ...] = (),
    shard: EngineShard = SINGLE_HOST,
) -> dict[str, str]:
    """The environment of the engine's processes on one host.

    Args:
        config: of the engine.
        model: that it serves.
        devices: of its ranks here, by index among those that this process sees; empty for all of them.
        weight_sources: of all of its ranks.
        shard: of the engine on this host.
    """
    architectures = model.architectures
    if config.draft_tokens:
        architectures += tuple(f"{name}NextN" for name in architectures)
    variables = server_environment(config.tp, architectures, devices, memory_saver=config.memory_saver)
    for name in _OTHER_RESULTS:
        variables.pop(name, None)
    if platform.gpus and not _compiles(config):
        # A handful of operations next to the large kernels, which CUDA graphs hold anyway: half a minute of every first
        # start.
        variables.setdefault("TORCH_COMPILE_DISABLE", "1")
    if shard.count > 1:
        variables[MEETING_VARIABLE] = shard.store
        variables[MEETING_TIMEOUT_VARIABLE] = str(config.start_timeout_s)
        # Without it a shard that is not the first would serve HTTP, and the first one listen for others' objects.
        variables["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
        variables["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"
    if platform.gpus and config.precision is not None:
        # It runs its kernels with every number of rows up to 16,384 otherwise: 10 to 20 minutes of a start.
        variables.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    if config.release_weights:
        variables[RELEASE_VARIABLE] = "1"
    if config.token_versions:
        variables[VERSIONS_VARIABLE] = "1"
    if config.fused_sampling:
        variables[FUSED_SAMPLING_VARIABLE] = "1"
    if config.peer_collectives:
        variables[PEERS_VARIABLE] = "1"
    if config.cascade_attention:
        variables[CASCADE_VARIABLE] = "1"
    if config.draft_tokens:
        variables[DRAFT_VARIABLE] = str(config.draft_tokens)
    if config.local_experts_only:
        variables[LOCAL_EXPERTS_VARIABLE] = "1"
    if config.routes:
        variables[ROUTES_VARIABLE] = "1"
    if model.adapters is not None:
        targets = _targets(model, model.adapters)
        variables[ADAPTER_VARIABLE] = json.dumps(peft_config(model.adapters.rank, model.adapters.alpha, targets))
    if any(weight_sources):
        variables[SOURCES_VARIABLE] = os.pathsep.join(str(source or "") for source in weight_sources)
        variables[SOURCES_TIMEOUT_VARIABLE] = str(config.start_timeout_s)
        # Stages of a pipeline leave unequal parts of their devices: SGLang goes by the smallest.
        variables["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    if _WITH_DELTA_NETS.intersection(model.architectures):
        # SGLang keeps the tokens before the next one, which the convolution sees, in bfloat16 whatever the model has.
        variables["SGLANG_MAMBA_CONV_DTYPE"] = config.dtype
    # For `reserved_tokens`: no position beyond the model's is used.
    return variables | {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}


def server_environment(
    tp: int, architectures: tuple[str, ...], devices: tuple[int, ...], *, memory_saver: bool = False
) -> dict[str, str]:
    """The environment of SGLang's processes on one host, whatever they serve.

    Args:
        tp: tensor parallel size.
        architectures: of the model.
        devices: of its ranks here, by index among those that this process sees; empty for all of them.
        memory_saver: it is to give memory back.
    """
    variables = {name: value for name, value in os.environ.items() if not _LAUNCHER_VARIABLES.match(name)}
    variables |= platform.rollout_environment(tp, memory_saver=memory_saver)
    if devices:
        variables |= platform.visible_devices(devices)
    return variables | {
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_model_modules(architectures)),
        "PYTHONUNBUFFERED": "1",
    }


def start_host(
    config: RolloutConfig,
    model: ModelDirectory,
    devices: tuple[int, ...],
    weight_sources: tuple[Path | None, ...],
    shard: EngineShard,
    log_path: Path | None,
) -> HostProcess:
    """Start the process that owns this host's shard of an engine.

    Args:
        config: of the engine.
        model: that it serves.
        devices: of its ranks here, by index among those that this process sees; empty for all of them.
        weight_sources: of all of its ranks; empty for none.
        shard: of the engine on this host.
        log_path: for all that its processes print; a temporary file if None.
    """
    return HostProcess(
        server_arguments(config, model, shard),
        environment(config, model, devices, weight_sources, shard),
        log_path or temporary_log("rollout"),
    )


def check_shard(
    config: RolloutConfig, shard: EngineShard, devices: Sequence[int], weight_sources: Sequence[Path | None]
) -> None:
    """Check the devices and weight sources of an engine's shard.

    Raises:
        UserError: their number is not that of the ranks.
    """
    ranks = shard.ranks(config)
    if devices and len(devices) != ranks:
        here = f", of which {ranks} are on this host" if shard.count > 1 else ""
        raise UserError(f"{len(devices)} devices for a rollout engine of tp {config.tp}{here}")
    if weight_sources and len(weight_sources) != config.tp:
        raise UserError(f"{len(weight_sources)} weight sources for a rollout engine of tp {config.tp}")


def _compiles(config: RolloutConfig) -> bool:
    """True if torch.compile speeds the engine up, or it needs it: deterministic sampling, among others."""
    asks = config.deterministic or config.attention_backend == "flex_attention"
    return asks or bool(config.server_args.get("enable_torch_compile"))


def _other_model_modules(architectures: tuple[str, ...]) -> list[str]:
    """SGLang's model modules that this model is not in: importing them all costs every start ten seconds.

    A module that the model's own imports is imported all the same. None are left out for a model that SGLang has not.
    """
    modules = {path.stem: path.read_text() for path in (sglang_directory() / "srt" / "models").glob("*.py")}
    classes = re.compile(rf"^class ({'|'.join(map(re.escape, architectures))})\b", re.MULTILINE)
    needed = {name for name, text in modules.items() if classes.search(text)}
    return sorted(modules.keys() - needed - {"__init__"}) if needed else []
