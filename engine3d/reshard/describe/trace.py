"""Trace of SGLang's own `load_weights`: what it would put where, from a run on tensors without data.

Nothing here knows SGLang's fused names, shard orders or paddings: the model's loader is run as it is, on stand-ins for
the checkpoint's tensors, and every copy into the model is noted in place of being made. Only zeros with which a loader
fills padding are really written.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine3d.errors import EngineError, UserError
from engine3d.models.precision import BLOCK, scale_name
from engine3d.models.rules import Box
from engine3d.reshard.describe.grid import CellGrid
from engine3d.reshard.describe.shards import Buffer, Holding
from engine3d.reshard.describe.stand_in import SourceTensor, StandIn
from engine3d.reshard.describe.strided import NotABox, boxes_of_view

Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of every tensor of a HuggingFace model, by name."""

_aten = torch.ops.aten
_FILLS = {_aten.fill_.Scalar, _aten.zero_.default}


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """Elements of the checkpoint's tensors in a rank's model after its `load_weights`.

    Args:
        buffers: the model's parameters, and those of its registered buffers that are loaded.
        holdings: what lies in them, sorted by buffer and offset. No two overlap in memory. The elements in none are
            padding, which the loader fills with zeros.
        tensors: the buffers' memory, in the same order; empty where there is no model. Not compared.
    """

    buffers: tuple[Buffer, ...]
    holdings: tuple[Holding, ...]
    tensors: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)


def trace_load(model: nn.Module, tensors: Tensors, left_out: Collection[str] = ()) -> LoadTrace:
    """Trace what the model's `load_weights` makes of a checkpoint with these tensors, without changing the model.

    Zeros that the loader writes into padding are really written. The model may be on any device, meta included. What
    a family computes after loading is not computed: see `refresh_derived`.

    Args:
        model: of SGLang.
        tensors: of the checkpoint.
        left_out: names of parameters that none of them is loaded into, because they are another model's.

    Raises:
        UserError: the loader refuses a tensor, such as one of another shape than the model's.
        EngineError: the loader does what cannot be followed, or leaves elements of a parameter unwritten; or SGLang
            keeps the parameters in another form than its loader leaves them in.
    """
    _check_as_loaded(model)
    recorder = _Recorder(model, left_out)
    with torch.no_grad(), _without_post_load(model), _PlainWrites(recorder):
        try:
            cast(Any, model).load_weights(recorder.stand_ins(tensors))
        except (EngineError, UserError):
            raise
        except Exception as error:
            raise recorder.refusal(error) from error
    trace = recorder.result()
    recorder.forget()
    return trace


def refresh_derived(model: nn.Module) -> None:
    """Recompute what SGLang derives from loaded parameters, after new values were written into those.

    That is the `post_load_weights` of a family: for DeepSeek's latent attention, the absorbed projections `w_kc` and
    `w_vc`, which are rearranged copies of `kv_b_proj.weight`. It copies into the tensors that exist, so that CUDA
    graphs which captured their addresses stay right. And it is the float32 copy that GLM's routers make of their
    weight the first time that they are used. Models of other families have nothing to refresh.

    Raises:
        EngineError: a derived tensor is not where it was.
    """
    with torch.no_grad():
        for module in model.modules():
            if (copy := getattr(module, _ROUTER_COPY, None)) is not None:
                copy.copy_(cast(Any, module).weight)
            if (shifted := getattr(module, _SHIFTED_WEIGHT, None)) is not None:
                torch.add(cast(Any, module).weight, 1.0, out=shifted)
    if not hasattr(model, "post_load_weights"):
        return
    before = derived_tensors(model)
    with torch.no_grad():
        cast(Any, model).post_load_weights()
    after = derived_tensors(model)
    for name, tensor in before.items():
        if name not in after or after[name].data_ptr() != tensor.data_ptr():
            raise EngineError(
                f"SGLang's post_load_weights replaced {name} in place of writing into it: what CUDA graphs captured of "
                f"the old one is out of date"
            )


_ROUTER_COPY = "_weight_fp32"
"""Buffer of SGLang's `Glm4MoeGate`."""
_SHIFTED_WEIGHT = "gemma_weight"
"""Buffer of SGLang's `GemmaRMSNorm`."""
_VISION_TOWER = "visual."
"""Beginning of names of parameters of vision towers, which are not trained."""
_VIEW_OF_WEIGHT = "conv_weights"
"""Attribute of SGLang's `RadixLinearAttention`."""


def rebind_views(model: nn.Module) -> None:
    """Renew the view of a parameter that gated delta nets keep, after the parameter got other memory."""
    for module in model.modules():
        if isinstance(getattr(getattr(module, "attn", None), _VIEW_OF_WEIGHT, None), Tensor):
            layer: Any = module
            setattr(layer.attn, _VIEW_OF_WEIGHT, layer.conv1d.weight.detach().squeeze(1))


def derived_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that modules keep as plain attributes, neither parameters nor registered buffers; and shifted weights."""
    plain = {
        f"{prefix}.{name}": value
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }
    return plain | {name: buffer for name, buffer in model.named_buffers() if name.endswith(f".{_SHIFTED_WEIGHT}")}


# Attributes of SGLang's layers, and the transformation of their weights after loading where they are true.
_REARRANGED = {
    "use_flashinfer_trtllm_moe": "moe_runner_backend=flashinfer_trtllm permutes the experts' weights",
    "use_intel_amx_backend": "the AMX backend packs weights",
}
# The same of the methods that quantised layers have.
_REARRANGED_QUANTISED = {
    "use_marlin": "devices without fp8 pack weights for Marlin's kernels",
    "use_mxfp8": "MXFP8 has other scales",
    "is_fp4_expert": "experts are in fp4",
}


def _check_as_loaded(model: nn.Module) -> None:
    """Refuse models whose weights are rearranged after loading: values written where the loader puts them are lost.

    Weights in fp8 blocks are kept as they are loaded, with scales of float32. Of scales that DeepGEMM is to have as
    exponents alone, SGLang makes other scales in their place.
    """
    quantisation = getattr(model, "quant_config", None)
    if quantisation is not None and getattr(quantisation, "weight_block_size", None) != [BLOCK, BLOCK]:
        raise EngineError("SGLang's model is quantized: its parameters are not what its loader is given")
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        for owner, reasons in ((module, _REARRANGED), (method, _REARRANGED_QUANTISED)):
            for attribute, reason in reasons.items():
                if getattr(owner, attribute, False):
                    raise EngineError(f"module {name} of SGLang's model is not kept as it is loaded: {reason}")
        for parameter, tensor in module.named_parameters(recurse=False):
            if getattr(tensor, "format_ue8m0", False) or (_is_scale(parameter) and tensor.dtype != torch.float32):
                raise EngineError(
                    f"parameter {name}.{parameter} of SGLang's model is not kept as it is loaded: its scales are "
                    "exponents, as DeepGEMM has them on Blackwell"
                )


def _is_scale(parameter: str) -> bool:
    return parameter.endswith(scale_name("weight"))


@contextmanager
def _without_post_load(model: nn.Module) -> Iterator[None]:
    """Disable `post_load_weights`, the end of DeepSeek's `load_weights`: it would compute with the current values."""
    if hasattr(model, "post_load_weights"):
        model.__dict__["post_load_weights"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        model.__dict__.pop("post_load_weights", None)


@dataclass(frozen=True, slots=True)
class _Target:
    """Memory of the model that may be loaded; `is_loaded` if it must be."""

    name: str
    tensor: Tensor
    is_parameter: bool
    is_loaded: bool

    @property
    def buffer(self) -> Buffer:
        return Buffer(self.name, str(self.tensor.dtype).removeprefix("torch."), tuple(self.tensor.shape))


@dataclass(frozen=True, slots=True)
class _Write:
    """One copy or fill: the boxes of the target that it writes, and their contents (none, for a fill)."""

    order: int
    boxes: tuple[Box, ...]
    holdings: tuple[Holding, ...]


class _Recorder:
    """Record of a loader's writes, in order."""

    def __init__(self, model: nn.Module, left_out: Collection[str]) -> None:
        self._targets: list[_Target] = []
        self._by_storage: dict[int, list[int]] = {}
        self._lock = threading.Lock()
        self._writes: dict[int, list[_Write]] = {}
        self._current: SourceTensor | None = None
        for is_parameter, named in ((True, model.named_parameters()), (False, model.named_buffers())):
            for name, tensor in named:
                # SGLang marks the scales of a quantised KV cache, which have a default.
                is_loaded = is_parameter and not getattr(tensor, "_skip_weight_check", False)
                is_loaded = is_loaded and not name.startswith(_VISION_TOWER) and name not in left_out
                self._add_target(_Target(name, tensor.detach(), is_parameter, is_loaded))

    def _add_target(self, target: _Target) -> None:
        if target.is_parameter and not target.tensor.is_contiguous():
            raise EngineError(f"parameter {target.name} of SGLang's model is not contiguous in memory")
        self._by_storage.setdefault(_storage(target.tensor), []).append(len(self._targets))
        self._targets.append(target)

    def stand_ins(self, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
        for order, (name, (shape, dtype)) in enumerate(tensors.items()):
            self._current = SourceTensor(name, tuple(shape), order, self.copied)
            yield name, StandIn.of(self._current, dtype)

    def is_target(self, tensor: Tensor) -> bool:
        """True if a tensor is memory of the model that may be loaded."""
        targets = [self._targets[index] for index in self._by_storage.get(_storage(tensor), ())]
        return any(target.is_parameter or not target.name.endswith(f".{_SHIFTED_WEIGHT}") for target in targets)

    def copied(self, destination: Tensor, source: StandIn) -> None:
        """A loader copies a stand-in into the model."""
        if destination.shape != source.shape:
            raise self._refused(source.boxes[0].source, f"SGLang copies {list(source.shape)} of it", destination.shape)
        if not source.numel():
            return
        if source.is_zero:
            self.filled(destination)
            destination.zero_()
            return
        _check_casts(source, destination.dtype)
        index = self._find(destination, source.origin)
        for box in source.boxes:
            region = destination
            for dimension, (start, size) in enumerate(zip(box.start, box.view.shape, strict=True)):
                region = region.narrow(dimension, start, size)
            self._write(index, region, source.order, box.source, box.view)

    def filled(self, destination: Tensor) -> None:
        """A loader fills a region of the model with zeros."""
        if destination.numel():
            order = self._current.order if self._current else 0
            self._write(self._find(destination, "a fill"), destination, order, None, None)

    def _find(self, destination: Tensor, what: str) -> int:
        offset = _offset(destination)
        for index in self._by_storage.get(_storage(destination), ()):
            tensor = self._targets[index].tensor
            if 0 <= offset - _offset(tensor) < tensor.numel():
                return index
        raise EngineError(
            f"tracing SGLang's weight loader: {what}: copied into memory of shape {list(destination.shape)} that is no "
            f"parameter of the model"
        )

    def _write(self, index: int, region: Tensor, order: int, source: SourceTensor | None, view: Tensor | None) -> None:
        target = self._targets[index].tensor
        offset, nothing = _offset(region) - _offset(target), (0,) * region.dim()
        sizes, strides = tuple(region.shape), region.stride()
        holdings: tuple[Holding, ...] = ()
        try:
            written = boxes_of_view(target.shape, offset, sizes, strides, 0, nothing)
            if source is not None and view is not None:
                source_boxes = boxes_of_view(source.shape, _offset(view), sizes, view.stride(), offset, strides)
                holdings = tuple(Holding(source.name, box.box, index, box.offset, box.strides) for box in source_boxes)
        except NotABox as error:
            name = source.name if source else "a fill"
            raise EngineError(
                f"tracing SGLang's weight loader: {name}: what is copied into {self._targets[index].name} is no box of "
                f"it: {error}"
            ) from error
        write = _Write(order, tuple(box.box for box in written), holdings)
        with self._lock:
            self._writes.setdefault(index, []).append(write)

    def result(self) -> LoadTrace:
        """Collect what is loaded in the end. Raises EngineError if elements of a parameter are not."""
        buffers: list[Buffer] = []
        holdings: list[Holding] = []
        tensors: list[Tensor] = []
        for index, target in enumerate(self._targets):
            if not target.is_loaded and index not in self._writes:
                continue  # computed by the model itself, such as the rotary embedding's cosines
            # A pool's threads come in any order, a checkpoint's tensors in one.
            writes = sorted(self._writes.get(index, ()), key=lambda write: write.order)
            remaining = _last_writes(target, writes)
            holdings += [replace(holding, buffer=len(buffers)) for holding in sorted(remaining, key=_by_offset)]
            buffers.append(target.buffer)
            tensors.append(target.tensor)
        return LoadTrace(tuple(buffers), tuple(holdings), tuple(tensors))

    def forget(self) -> None:
        """Leave the model's memory to the model: stand-ins and the recorder know each other, until Python collects."""
        self._targets.clear()

    def refusal(self, error: Exception) -> UserError | EngineError:
        """Translate an error inside a loader: it refuses the tensor that it was given last."""
        reason = " ".join(str(error).split()) or type(error).__name__
        if self._current is None:
            return EngineError(f"tracing SGLang's weight loader: {type(error).__name__}: {reason}")
        return self._refused(self._current, f"{type(error).__name__}: {reason}", _parameter_shape(error))

    def _refused(self, source: SourceTensor, reason: str, shape: Sequence[int] | None) -> UserError:
        into = f" into a parameter of shape {list(shape)}" if shape is not None else ""
        return UserError(f"tensor {source.name} of shape {list(source.shape)}: SGLang does not load it{into}: {reason}")


class _PlainWrites(TorchDispatchMode):
    """Recorder of a loader's writes into the model that come from no stand-in, in the thread that called the loader.

    Only zeros are expected. Writes of other threads are not seen: what they fill counts as unwritten.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        destination = None
        if args and func._schema.is_mutable and StandIn not in types:
            destination = (kwargs or {}).get("out", args[0])
        if isinstance(destination, Tensor) and self._recorder.is_target(destination):
            if func not in _FILLS or any(args[1:]):
                raise EngineError(
                    f"tracing SGLang's weight loader: the loader calls {func} on memory of the model of shape "
                    f"{list(destination.shape)} with what is of no checkpoint"
                )
            self._recorder.filled(destination)
        return func(*args, **(kwargs or {}))


def _last_writes(target: _Target, writes: Sequence[_Write]) -> list[Holding]:
    """The holdings that are left when all writes are done. Raises EngineError if elements are written by none."""
    shape = tuple(target.tensor.shape)
    if len(writes) == 1 and writes[0].boxes == (tuple((0, size) for size in shape),):
        return list(writes[0].holdings)
    grid = CellGrid([box for write in writes for box in write.boxes], shape)
    for number, write in enumerate(writes):
        for box in write.boxes:
            grid.write(box, number)
    if missing := grid.elements(-1):
        raise EngineError(
            f"parameter {target.name} of SGLang's model: no tensor is loaded into {missing} of its "
            f"{target.tensor.numel()} elements"
        )
    kept: list[Holding] = []
    for number, write in enumerate(writes):
        left = set.union(*(grid.numbers(box) for box in write.boxes))
        if left == {number}:
            kept += write.holdings
        elif number in left:
            raise EngineError(
                f"parameter {target.name} of SGLang's model: some of what is loaded into it is overwritten"
            )
    return kept


def _check_casts(source: StandIn, dtype: torch.dtype) -> None:
    """Refuse casts on the way to `dtype` that change what a cast from the checkpoint's dtype would give."""
    first = source.casts[0]
    for middle in source.casts[1:]:
        if middle != dtype and torch.promote_types(first, middle) != middle:
            raise EngineError(
                f"tracing SGLang's weight loader: {source.origin}: the loader casts {first} to {middle} and then "
                f"to {dtype}, which gives other values than one cast"
            )


def _parameter_shape(error: Exception) -> Sequence[int] | None:
    """The shape of the parameter that SGLang was loading: every loader of it calls that `param`."""
    shape, traceback = None, error.__traceback__
    while traceback is not None:
        parameter = traceback.tb_frame.f_locals.get("param")
        if isinstance(parameter, Tensor):
            shape = parameter.shape
        traceback = traceback.tb_next
    return shape


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _storage(tensor: Tensor) -> int:
    """Identity of a tensor's memory, on the meta device too, where every address is 0."""
    return tensor.untyped_storage()._cdata


def _by_offset(holding: Holding) -> tuple[int, str]:
    return holding.offset, holding.tensor
