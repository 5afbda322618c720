"""Tensors without data, which stand in for a checkpoint's in SGLang's weight loader and record their copies.

A stand-in is a tensor subclass, so that operations on it are seen in every thread. A dispatch mode would see one
thread only, and SGLang loads some models from a pool of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine3d.errors import EngineError

Copied = Callable[[Tensor, "StandIn"], None]
"""Called with the destination and the stand-in, of the same shape, for each copy out of a stand-in."""

_aten = torch.ops.aten
_CONVERSIONS = {_aten._to_copy.default, _aten.clone.default}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of the checkpoint.

    Args:
        name: its name.
        shape: its shape.
        order: its index in the order of loading.
        copied: callback for copies.
    """

    name: str
    shape: tuple[int, ...]
    order: int
    copied: Copied


@dataclass(frozen=True, slots=True)
class SourceBox:
    """A box of a stand-in that comes from one tensor of the checkpoint.

    Args:
        source: the tensor.
        view: on the meta device, a view of it as a contiguous tensor: its offset and strides say which elements.
        start: where the box begins in the stand-in.
    """

    source: SourceTensor
    view: Tensor
    start: tuple[int, ...]


class StandIn(Tensor):
    """A tensor without data that knows which elements of which tensors of the checkpoint it would hold.

    Views, copies with memory of their own and concatenations of stand-ins are stand-ins. Everything else that would
    look at the data raises EngineError.
    """

    boxes: tuple[SourceBox, ...]
    casts: tuple[torch.dtype, ...]
    """Every dtype that the values went through, the checkpoint's first."""
    is_zero: bool = False
    """True once a loader has overwritten the values with zeros: on ranks that share a bias, on all but the first."""

    @staticmethod
    def __new__(cls, boxes: tuple[SourceBox, ...], shape: Sequence[int], casts: tuple[torch.dtype, ...]) -> StandIn:
        strides = boxes[0].view.stride() if len(boxes) == 1 else None
        wrapper: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: StandIn = wrapper(cls, shape, strides=strides, dtype=casts[-1], device="meta")
        made.boxes = boxes
        made.casts = casts
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandIn({self.origin}, shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def of(cls, source: SourceTensor, dtype: torch.dtype) -> StandIn:
        """Make the stand-in of a complete tensor."""
        view = torch.empty(source.shape, dtype=torch.uint8, device="meta")
        return cls((SourceBox(source, view, (0,) * len(source.shape)),), source.shape, (dtype,))

    @property
    def origin(self) -> str:
        return ", ".join(box.source.name for box in self.boxes)

    @property
    def order(self) -> int:
        return max(box.source.order for box in self.boxes)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if func is _aten.copy_.default and not isinstance(first, StandIn):
            source = args[1]
            source.boxes[0].source.copied(first, source)
            return first
        if isinstance(first, StandIn):
            if func is _aten.zero_.default:
                first.is_zero = True
                return first
            if func in _CONVERSIONS:
                return first._converted(kwargs.get("dtype"))
            if _is_view(func):
                return first._viewed(func, args[1:], kwargs)
        if func is _aten.cat.default:
            return _concatenated(first, args[1] if len(args) > 1 else kwargs.get("dim", 0))
        names = sorted({stand_in.origin for stand_in in _stand_ins([*args, *kwargs.values()])})
        raise EngineError(
            f"tracing SGLang's weight loader: {', '.join(names)}: the loader calls {func}, which is not a copy: its "
            f"result cannot be followed back to the checkpoint"
        )

    def _converted(self, dtype: torch.dtype | None) -> StandIn:
        if dtype is None or dtype == self.dtype:
            return self._with(self.boxes, self.shape)
        return self._with(self.boxes, self.shape, (*self.casts, dtype))

    def _viewed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if len(self.boxes) > 1:
            return self._viewed_in_boxes(func, args, kwargs)
        (box,) = self.boxes
        if func is _aten.view.dtype:
            raise EngineError(
                f"tracing SGLang's weight loader: {self.origin}: the loader reads its bytes as another dtype, which "
                f"cannot be followed"
            )
        views = func(box.view, *args, **kwargs)
        if isinstance(views, Tensor):
            return self._of_view(box, views)
        return [self._of_view(box, view) for view in views]

    def _of_view(self, box: SourceBox, view: Tensor) -> StandIn:
        return self._with((SourceBox(box.source, view, (0,) * view.dim()),), view.shape)

    def _viewed_in_boxes(self, func: Any, args: Any, kwargs: Any) -> StandIn:
        """View a concatenation: all of it, or a slice."""
        if func in (_aten.detach.default, _aten.alias.default):
            return self._with(self.boxes, self.shape)
        if func is not _aten.slice.Tensor:
            raise EngineError(
                f"tracing SGLang's weight loader: {self.origin}: the loader calls {func} on a concatenation of these, "
                f"which cannot be followed"
            )
        given: list[Any] = [*args, *[0, None, None, 1][len(args) :]]
        dimension, first, last, step = given
        if step != 1:
            raise EngineError(f"tracing SGLang's weight loader: {self.origin}: a slice of every {step}th element")
        start, stop, _ = slice(first, last).indices(self.shape[dimension])
        shape = list(self.shape)
        shape[dimension] = max(0, stop - start)
        boxes = []
        for box in self.boxes:
            at = box.start[dimension]
            begins, ends = max(start, at), min(stop, at + box.view.shape[dimension])
            if begins < ends:
                begin = list(box.start)
                begin[dimension] = begins - start
                view = box.view.narrow(dimension, begins - at, ends - begins)
                boxes.append(SourceBox(box.source, view, tuple(begin)))
        return self._with(tuple(boxes), shape)

    def _with(
        self, boxes: tuple[SourceBox, ...], shape: Sequence[int], casts: tuple[torch.dtype, ...] | None = None
    ) -> StandIn:
        made = StandIn(boxes, shape, self.casts if casts is None else casts)
        made.is_zero = self.is_zero
        return made


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _concatenated(tensors: Sequence[Tensor], dimension: int) -> StandIn:
    stand_ins = list(_stand_ins(tensors))
    first = stand_ins[0]
    unlike = any(stand_in.casts != first.casts or stand_in.is_zero for stand_in in stand_ins)
    if unlike or len(stand_ins) != len(tensors):
        names = ", ".join(stand_in.origin for stand_in in stand_ins)
        raise EngineError(
            f"tracing SGLang's weight loader: {names}: the loader joins it with a tensor that is not of the "
            f"checkpoint, or that has another dtype, which cannot be followed"
        )
    shape = torch.cat([torch.empty(stand_in.shape, device="meta") for stand_in in stand_ins], dimension).shape
    boxes, at = [], 0
    for stand_in in stand_ins:
        for box in stand_in.boxes:
            start = list(box.start)
            start[dimension] += at
            boxes.append(SourceBox(box.source, box.view, tuple(start)))
        at += stand_in.shape[dimension]
    return StandIn(tuple(boxes), shape, first.casts)


def _stand_ins(values: Iterable[Any]) -> Iterable[StandIn]:
    for value in values:
        if isinstance(value, StandIn):
            yield value
        elif isinstance(value, list | tuple):
            yield from _stand_ins(value)
