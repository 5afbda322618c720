"""Traces of any rank of any engine layout, made on one machine: no engine, no weights, no process group.

SGLang's own model is built on the meta device, with SGLang's own process groups but for the processes in them, and its
own loader is traced. SGLang 0.5.16 cuts the dense layers of a model over all tp ranks. The experts are cut over ep
groups of tp / ep neighbouring ranks, and each expert over the ranks of its group (`moe_tp`).

Data parallel attention (`attention_dp`) changes the cut: attention, embedding and output head are then cut over
tp / attention_dp ranks. What SGLang decides by the machine it runs on, it decides here by this machine: on a GPU, with
ep=1, DeepSeek-V3's shared expert is one more of its experts (`enforce_shared_experts_fusion` says so on any machine).
"""

from __future__ import annotations

import importlib
import linecache
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from engine3d.errors import UserError
from engine3d.models import sglang_overrides
from engine3d.reshard.describe.same_model import check_same_model
from engine3d.reshard.describe.shards import Buffer, Holding
from engine3d.reshard.describe.trace import LoadTrace, Tensors, trace_load
from engine3d.sglang_source import attention_arguments, complete_configs, sglang_directory
from engine3d.startup.imports import quick_imports

# Of sglang.srt.distributed.parallel_state: one for each kind of process group.
_GROUPS = ("_WORLD", "_TP", "_ATTN_TP", "_ATTN_CP", "_DCP", "_MOE_DP", "_MOE_EP", "_MOE_TP", "_PP")
# Arguments of SGLang's by which an engine is cut in further ways.
_OTHER_CUTS = {"enable_dp_attention", "dp_size", "pp_size", "attn_cp_size", "moe_dp_size", "dcp_size"}
_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def trace_engine_layout(
    hf_config: dict[str, Any],
    tensors: Tensors,
    tp: int,
    ep: int,
    dtype: torch.dtype | None = None,
    server_args: Mapping[str, Any] = _NO_ARGUMENTS,
    attention_dp: int = 1,
    quantisation: Mapping[str, Any] | None = None,
) -> list[LoadTrace]:
    """Trace each tp rank of an engine as `trace_load` would inside that engine, in order of rank.

    Layers with the same tensors are alike: only the model's first layers are built, up to the first of each kind, and
    the others get what their kind has. The traces hold no memory.

    Args:
        hf_config: a model's config.json.
        tensors: the trainer's tensors.
        tp: tensor parallel size: the engine's number of ranks.
        ep: expert parallel size, which divides tp.
        dtype: the engine's; None for what SGLang's dtype "auto" makes of the config's.
        server_args: further arguments of SGLang's that the engine has, such as enforce_shared_experts_fusion.
        attention_dp: groups of ranks with attention of their own.
        quantisation: the engine's `quantization_config`; the tensors are then those of `served_tensors`.

    Raises:
        UserError: SGLang refuses the layout, or the tensors are another model's.
    """
    pattern = _Pattern.of(hf_config, tensors, dtype, quantisation)
    traces = [pattern.trace(tp, ep, rank, server_args, attention_dp) for rank in range(tp)]
    check_same_model(traces, {name: shape for name, (shape, _) in tensors.items()})
    return traces


def trace_engine(
    hf_config: dict[str, Any],
    tensors: Tensors,
    tp: int,
    ep: int,
    rank: int,
    dtype: torch.dtype | None = None,
    server_args: Mapping[str, Any] = _NO_ARGUMENTS,
    attention_dp: int = 1,
) -> LoadTrace:
    """Trace one tp rank of an engine: one of `trace_engine_layout`, unchecked against the other ranks."""
    return _Pattern.of(hf_config, tensors, dtype).trace(tp, ep, rank, server_args, attention_dp)


def auto_dtype(hf_config: dict[str, Any]) -> torch.dtype:
    """Resolve SGLang's dtype "auto" for a model: the config's dtype, with float16 for float32."""
    name = hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    dtype: torch.dtype = getattr(torch, str(name).removeprefix("torch."))
    return torch.float16 if dtype is torch.float32 else dtype


@contextmanager
def engine_rank(
    tp: int,
    ep: int,
    rank: int,
    server_args: Mapping[str, Any] = _NO_ARGUMENTS,
    ropes: dict[Any, Any] | None = None,
    attention_dp: int = 1,
) -> Iterator[None]:
    """Build SGLang's modules as on one rank of an engine, within the context. Not for several threads at a time.

    Args:
        tp: tensor parallel size.
        ep: expert parallel size.
        rank: tp rank.
        server_args: further arguments of SGLang's.
        ropes: the rotary embeddings that were built before. SGLang keeps one for all models of a process, where one
            on the meta device would be of no use to others.
        attention_dp: groups of ranks with attention of their own.

    Raises:
        UserError: SGLang refuses the layout, here or when a model is built.
    """
    with quick_imports():
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers import dp_attention
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.layers.rotary_embedding import factory
        from sglang.srt.runtime_context import get_context

    if other := sorted(_OTHER_CUTS & server_args.keys()):
        raise UserError(
            f"server_args.{other[0]}: engines that are cut otherwise than by tp, ep and attention_dp are not simulated"
        )
    if tp < 1 or ep < 1 or tp % ep:
        raise UserError(f"engine layout tp={tp} ep={ep}: SGLang cuts an expert over tp / ep ranks: ep must divide tp")
    if attention_dp < 1 or tp % attention_dp:
        raise UserError(f"engine layout tp={tp} attention_dp={attention_dp}: attention_dp must divide tp")

    def group_of_rank(group_ranks: Sequence[Sequence[int]], *_: Any, **__: Any) -> _Group:
        return next(_Group(rank, tuple(ranks)) for ranks in group_ranks if rank in ranks)

    context = get_context()
    world = _Group(rank, tuple(range(tp)))
    with ExitStack() as stack:
        stack.enter_context(_changed(parallel_state, **(dict.fromkeys(_GROUPS) | {"_WORLD": world})))
        stack.enter_context(
            _changed(dp_attention, _ATTN_DP_RANK=rank // (tp // attention_dp), _ATTN_DP_SIZE=attention_dp)
        )
        stack.enter_context(_changed(factory, _ROPE_DICT={} if ropes is None else ropes))
        stack.enter_context(context.flags.dp.override(enabled=attention_dp > 1))
        stack.enter_context(context.flags.moe.override(**vars(context.flags.moe)))
        stack.enter_context(context.resources.override(expert_location_metadata=None))
        stack.enter_context(_refusals(tp, ep))
        cut = {"tp_size": tp, "ep_size": ep, **attention_arguments(attention_dp), **server_args}
        initialize_moe_config(stack.enter_context(context.override_server_args(**cut)))
        with (
            _changed(parallel_state, init_model_parallel_group=group_of_rank),
            _changed(torch.distributed, is_initialized=lambda: True, get_world_size=lambda: tp),
        ):
            parallel_state.initialize_model_parallel(tp, ep, attention_data_parallel_size=attention_dp, backend="none")
        yield


def build_model(
    hf_config: dict[str, Any], dtype: torch.dtype, device: str, quantisation: Mapping[str, Any] | None = None
) -> nn.Module:
    """SGLang's model, its parameters not filled, for the rank of SGLang's present process groups."""
    from transformers import CONFIG_MAPPING

    with quick_imports():
        from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY as classes_of_sglang

    complete_configs()
    # A copy, because SGLang's models write into theirs.
    full_config = deepcopy({**hf_config, **sglang_overrides(hf_config)})
    model_type = hf_config["model_type"]
    config_class = classes_of_sglang[model_type] if model_type in classes_of_sglang else CONFIG_MAPPING[model_type]
    config = config_class.from_dict(full_config)
    model_class = _model_class(full_config["architectures"][0])
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return model_class(config=config, quant_config=_quant_config(quantisation))
    finally:
        torch.set_default_dtype(default)


def _quant_config(quantisation: Mapping[str, Any] | None) -> Any:
    """SGLang's configuration of a quantised model, as its loader reads it."""
    if quantisation is None:
        return None
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    return Fp8Config.from_config(dict(quantisation))


@dataclass(frozen=True, slots=True)
class _Group:
    """Process group stand-in while SGLang's models are built: of its `GroupCoordinator`, only the ranks."""

    rank: int
    ranks: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def rank_in_group(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def local_rank(self) -> int:
        return self.rank

    @property
    def is_first_rank(self) -> bool:
        return self.rank == self.ranks[0]

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.ranks[-1]


@contextmanager
def _changed(module: Any, **values: Any) -> Iterator[None]:
    """Replace names of a module within the context."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextmanager
def _refusals(tp: int, ep: int) -> Iterator[None]:
    """Raise SGLang's assertions as errors for the user. One without a text is quoted from its source."""
    try:
        yield
    except (AssertionError, ValueError) as error:
        reason = " ".join(str(error).split()) or _failed_line(error)
        raise UserError(f"engine layout tp={tp} ep={ep}: SGLang refuses it: {reason}") from error


def _failed_line(error: BaseException) -> str:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return type(error).__name__
    return linecache.getline(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno).strip()


@cache
def _model_class(architecture: str) -> type[nn.Module]:
    """SGLang's class of a model, imported from its own module: SGLang's registry would import every model."""
    defines = re.compile(rf"^class {re.escape(architecture)}\b", re.MULTILINE)
    for path in sorted((sglang_directory() / "srt" / "models").glob("*.py")):
        if defines.search(path.read_text()):
            with quick_imports():
                module = importlib.import_module(f"sglang.srt.models.{path.stem}")
            model_class: type[nn.Module] = getattr(module, architecture)
            return model_class
    raise UserError(f"SGLang has no model of the architecture {architecture}")


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Layers of a model that are really built and traced: the first ones, up to the first of each kind.

    Args:
        hf_config: of a model with these layers only.
        tensors: of these layers, and those that are in none.
        kinds: for the first layer of each kind, all layers of the kind.
        dtype: of the engine.
        ropes: SGLang's rotary embeddings, which all ranks share.
        quantisation: the engine's `quantization_config`.
    """

    hf_config: dict[str, Any]
    tensors: Tensors
    kinds: dict[int, list[int]]
    dtype: torch.dtype
    ropes: dict[Any, Any]
    quantisation: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        hf_config: dict[str, Any],
        tensors: Tensors,
        dtype: torch.dtype | None,
        quantisation: Mapping[str, Any] | None = None,
    ) -> _Pattern:
        kinds = _layer_kinds(hf_config, tensors)
        built = max(kinds) + 1
        few = {name: tensor for name, tensor in tensors.items() if (_layer_of(name) or 0) < built}
        return cls(_with_layers(hf_config, built), few, kinds, dtype or auto_dtype(hf_config), {}, quantisation)

    def trace(self, tp: int, ep: int, rank: int, server_args: Mapping[str, Any], attention_dp: int) -> LoadTrace:
        with engine_rank(tp, ep, rank, server_args, self.ropes, attention_dp):
            model = build_model(self.hf_config, self.dtype, "meta", self.quantisation)
            return _for_all_layers(trace_load(model, self.tensors), self.kinds)


def _layer_of(name: str) -> int | None:
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def _in_layer(name: str, layer: int | None) -> str:
    """A name, moved to another layer if it is of one."""
    return name if layer is None else f"model.layers.{layer}.{name.split('.', 3)[3]}"


def _layer_kinds(hf_config: dict[str, Any], tensors: Tensors) -> dict[int, list[int]]:
    """The layers of each kind, by its first: a kind has the same tensors but for the layer in their names.

    Raises:
        UserError: the tensors are of more or of fewer layers than the model.
    """
    of_layer: dict[int, list[Any]] = defaultdict(list)
    for name, (shape, dtype) in tensors.items():
        if match := _LAYER.match(name):
            of_layer[int(match[1])].append((name[match.end() :], tuple(shape), dtype))
    layers = _of_text(hf_config)["num_hidden_layers"]
    if sorted(of_layer) != list(range(layers)):
        raise UserError(f"the tensors are of {len(of_layer)} layers; the engine's model has {layers}")
    kinds: dict[Any, list[int]] = defaultdict(list)
    for layer in range(layers):
        kinds[frozenset(of_layer[layer])].append(layer)
    return {alike[0]: alike for alike in kinds.values()}


def _with_layers(hf_config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config of the model's first layers."""
    config = {**_of_text(hf_config), "num_hidden_layers": layers}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    return {**hf_config, "text_config": config} if "text_config" in hf_config else config


def _of_text(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model's language model."""
    config: dict[str, Any] = hf_config.get("text_config") or hf_config
    return config


def _for_all_layers(trace: LoadTrace, kinds: dict[int, list[int]]) -> LoadTrace:
    """Extend the trace of the first layers to the complete model, with the buffers in that model's order."""
    by_buffer: list[list[Holding]] = [[] for _ in trace.buffers]
    for holding in trace.holdings:
        by_buffer[holding.buffer].append(holding)
    of_layer: dict[int | None, list[tuple[Buffer, list[Holding]]]] = defaultdict(list)
    for entry in zip(trace.buffers, by_buffer, strict=True):
        of_layer[_layer_of(entry[0].name)].append(entry)
    first = next(index for index, buffer in enumerate(trace.buffers) if _layer_of(buffer.name) is not None)
    kind_of = {layer: kind for kind, alike in kinds.items() for layer in alike}

    buffers: list[Buffer] = []
    holdings: list[Holding] = []

    def add(entries: Sequence[tuple[Buffer, list[Holding]]], layer: int | None) -> None:
        for buffer, of_buffer in entries:
            index = len(buffers)
            buffers.append(Buffer(_in_layer(buffer.name, layer), buffer.dtype, buffer.shape))
            holdings.extend(
                Holding(_in_layer(holding.tensor, layer), holding.box, index, holding.offset, holding.strides)
                for holding in of_buffer
            )

    add(of_layer[None][:first], None)
    for layer in sorted(kind_of):
        add(of_layer[kind_of[layer]], layer)
    add(of_layer[None][first:], None)
    return LoadTrace(tuple(buffers), tuple(holdings))
