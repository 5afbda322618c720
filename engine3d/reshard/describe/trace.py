"""What SGLang's own `load_weights` would put where, found by running it on tensors without data.

Nothing here knows SGLang's fused names, shard orders or paddings: the model's loader is run as it is, on stand-ins for
the checkpoint's tensors, and every copy into the model is noted in place of being made. Only zeros with which a loader
fills padding are really written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine3d.errors import EngineError, UserError
from engine3d.models.rules import Box
from engine3d.reshard.describe.grid import Grid
from engine3d.reshard.describe.shards import Buffer, Holding
from engine3d.reshard.describe.stand_in import SourceTensor, StandIn
from engine3d.reshard.describe.strided import NotABox, boxes_of_view

Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of every tensor of a HuggingFace model, by name."""

_aten = torch.ops.aten
_FILLS = {_aten.fill_.Scalar, _aten.zero_.default}


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """What a rank's model holds, of the checkpoint's tensors, after its `load_weights`.

    Args:
        buffers: the model's parameters, and those of its registered buffers that are loaded.
        holdings: what lies in them, sorted by buffer and offset. No two overlap in memory. The elements in none are
            padding, which the loader fills with zeros.
        tensors: the buffers' memory, in the same order; empty where there is no model. No part of a comparison.
    """

    buffers: tuple[Buffer, ...]
    holdings: tuple[Holding, ...]
    tensors: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)


def trace_load(model: nn.Module, tensors: Tensors) -> LoadTrace:
    """Find what the model's `load_weights` makes of a checkpoint with these tensors, without changing the model.

    Zeros that the loader writes into padding are really written. The model may be on any device, meta included. What
    a family computes after loading is not computed: see `refresh_derived`.

    Raises:
        UserError: the loader refuses a tensor, such as one of another shape than the model's.
        EngineError: the loader does what cannot be followed, or leaves elements of a parameter unwritten; or SGLang
            keeps the parameters in another form than its loader leaves them in.
    """
    _check_as_loaded(model)
    recorder = _Recorder(model)
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
    """Compute again what SGLang derives from loaded parameters, after new values were written into those.

    That is the `post_load_weights` of a family: for DeepSeek's latent attention, the absorbed projections `w_kc` and
    `w_vc`, which are rearranged copies of `kv_b_proj.weight`. It copies into the tensors that exist, so that CUDA
    graphs which captured their addresses stay right. Models of other families have nothing to refresh.

    Raises:
        EngineError: a derived tensor is not where it was.
    """
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


def derived_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that modules keep as plain attributes, neither parameters nor registered buffers."""
    return {
        f"{prefix}.{name}": value
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


# Attributes of SGLang's layers, and what is done to their weights after loading where they are true.
_REARRANGED = {
    "use_flashinfer_trtllm_moe": "moe_runner_backend=flashinfer_trtllm permutes the experts' weights",
    "use_intel_amx_backend": "the AMX backend packs weights",
}


def _check_as_loaded(model: nn.Module) -> None:
    """Refuse models whose weights are rearranged after loading: values written where the loader puts them are lost."""
    if getattr(model, "quant_config", None) is not None:
        raise EngineError("SGLang's model is quantized: its parameters are not what its loader is given")
    for name, module in model.named_modules():
        for attribute, reason in _REARRANGED.items():
            if getattr(module, attribute, False):
                raise EngineError(f"module {name} of SGLang's model is not kept as it is loaded: {reason}")


@contextmanager
def _without_post_load(model: nn.Module) -> Iterator[None]:
    """DeepSeek's `load_weights` ends with `post_load_weights`, which would compute with the values that are there."""
    if hasattr(model, "post_load_weights"):
        model.__dict__["post_load_weights"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        model.__dict__.pop("post_load_weights", None)


@dataclass(frozen=True, slots=True)
class _Target:
    """Memory of the model that may be loaded."""

    name: str
    tensor: Tensor
    is_parameter: bool

    @property
    def buffer(self) -> Buffer:
        return Buffer(self.name, str(self.tensor.dtype).removeprefix("torch."), tuple(self.tensor.shape))


@dataclass(frozen=True, slots=True)
class _Write:
    """One copy or fill: the boxes of the target that it writes, and what then lies there (nothing, for a fill)."""

    order: int
    boxes: tuple[Box, ...]
    holdings: tuple[Holding, ...]


class _Recorder:
    """What a loader does, write by write."""

    def __init__(self, model: nn.Module) -> None:
        self._targets: list[_Target] = []
        self._by_storage: dict[int, list[int]] = {}
        self._lock = threading.Lock()
        self._writes: dict[int, list[_Write]] = {}
        self._current: SourceTensor | None = None
        for is_parameter, named in ((True, model.named_parameters()), (False, model.named_buffers())):
            for name, tensor in named:
                self._add_target(_Target(name, tensor.detach(), is_parameter))

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
        return _storage(tensor) in self._by_storage

    def copied(self, destination: Tensor, source: StandIn) -> None:
        """A loader copies a stand-in into the model."""
        if destination.shape != source.shape:
            raise self._refused(source.parts[0].source, f"SGLang copies {list(source.shape)} of it", destination.shape)
        if not source.numel():
            return
        _check_casts(source, destination.dtype)
        index = self._find(destination, source.origin)
        for part in source.parts:
            region = destination
            for dimension, (start, size) in enumerate(zip(part.start, part.view.shape, strict=True)):
                region = region.narrow(dimension, start, size)
            self._write(index, region, source.order, part.source, part.view)

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
                held = boxes_of_view(source.shape, _offset(view), sizes, view.stride(), offset, strides)
                holdings = tuple(Holding(source.name, each.box, index, each.offset, each.strides) for each in held)
        except NotABox as error:
            name = source.name if source else "a fill"
            raise EngineError(
                f"tracing SGLang's weight loader: {name}: what is copied into {self._targets[index].name} is no box of "
                f"it: {error}"
            ) from error
        write = _Write(order, tuple(each.box for each in written), holdings)
        with self._lock:
            self._writes.setdefault(index, []).append(write)

    def result(self) -> LoadTrace:
        """What is loaded in the end. Raises EngineError if not all of the parameters is."""
        buffers: list[Buffer] = []
        holdings: list[Holding] = []
        tensors: list[Tensor] = []
        for index, target in enumerate(self._targets):
            if not target.is_parameter and index not in self._writes:
                continue  # computed by the model itself, such as the rotary embedding's cosines
            # A pool's threads come in any order, a checkpoint's tensors in one.
            writes = sorted(self._writes.get(index, ()), key=lambda write: write.order)
            found = _last_writes(target, writes)
            holdings += [replace(holding, buffer=len(buffers)) for holding in sorted(found, key=_by_offset)]
            buffers.append(target.buffer)
            tensors.append(target.tensor)
        return LoadTrace(tuple(buffers), tuple(holdings), tuple(tensors))

    def forget(self) -> None:
        """Leave the model's memory to the model: stand-ins and the recorder know each other, until Python collects."""
        self._targets.clear()

    def refusal(self, error: Exception) -> UserError | EngineError:
        """What an error inside a loader means: it refuses the tensor that it was given last."""
        reason = " ".join(str(error).split()) or type(error).__name__
        if self._current is None:
            return EngineError(f"tracing SGLang's weight loader: {type(error).__name__}: {reason}")
        return self._refused(self._current, f"{type(error).__name__}: {reason}", _parameter_shape(error))

    def _refused(self, source: SourceTensor, reason: str, shape: Sequence[int] | None) -> UserError:
        into = f" into a parameter of shape {list(shape)}" if shape is not None else ""
        return UserError(f"tensor {source.name} of shape {list(source.shape)}: SGLang does not load it{into}: {reason}")


class _PlainWrites(TorchDispatchMode):
    """Sees what a loader writes into the model that comes from no stand-in, in the thread that called the loader.

    Only zeros are expected. Those of other threads are not seen: what they fill then counts as written by nobody.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        destination = args[0] if args and func._schema.is_mutable and StandIn not in types else None
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
    grid = Grid([box for write in writes for box in write.boxes], shape)
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
                f"parameter {target.name} of SGLang's model: a part of what is loaded into it is written over"
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
    """What identifies a tensor's memory, on the meta device too, where every address is 0."""
    return tensor.untyped_storage()._cdata


def _by_offset(holding: Holding) -> tuple[int, str]:
    return holding.offset, holding.tensor
