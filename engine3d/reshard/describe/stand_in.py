"""Tensors without data, which stand in for a checkpoint's in SGLang's weight loader and tell where they are copied to.

A stand-in is a tensor subclass, so that what happens to it is seen in whichever thread it happens; a dispatch mode
would see one thread only, and SGLang loads some models from a pool of them.
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
        order: its place in the order of loading.
        copied: what to tell of copies.
    """

    name: str
    shape: tuple[int, ...]
    order: int
    copied: Copied


@dataclass(frozen=True, slots=True)
class Part:
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

    parts: tuple[Part, ...]
    casts: tuple[torch.dtype, ...]
    """Every dtype that the values went through, the checkpoint's first."""

    @staticmethod
    def __new__(cls, parts: tuple[Part, ...], shape: Sequence[int], casts: tuple[torch.dtype, ...]) -> StandIn:
        strides = parts[0].view.stride() if len(parts) == 1 else None
        wrapper: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: StandIn = wrapper(cls, shape, strides=strides, dtype=casts[-1], device="meta")
        made.parts = parts
        made.casts = casts
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandIn({self.origin}, shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def of(cls, source: SourceTensor, dtype: torch.dtype) -> StandIn:
        """The whole of a tensor."""
        view = torch.empty(source.shape, dtype=torch.uint8, device="meta")
        return cls((Part(source, view, (0,) * len(source.shape)),), source.shape, (dtype,))

    @property
    def origin(self) -> str:
        return ", ".join(part.source.name for part in self.parts)

    @property
    def order(self) -> int:
        return max(part.source.order for part in self.parts)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if func is _aten.copy_.default and not isinstance(first, StandIn):
            source = args[1]
            source.parts[0].source.copied(first, source)
            return first
        if isinstance(first, StandIn):
            if func in _CONVERSIONS:
                return first._converted(kwargs.get("dtype"))
            if _is_view(func):
                return first._viewed(func, args[1:], kwargs)
        if func is _aten.cat.default:
            return _concatenated(first, args[1] if len(args) > 1 else kwargs.get("dim", 0))
        names = sorted({each.origin for each in _stand_ins([*args, *kwargs.values()])})
        raise EngineError(
            f"tracing SGLang's weight loader: {', '.join(names)}: the loader calls {func}, which is not a copy: its "
            f"result cannot be followed back to the checkpoint"
        )

    def _converted(self, dtype: torch.dtype | None) -> StandIn:
        if dtype is None or dtype == self.dtype:
            return self._with(self.parts, self.shape)
        return StandIn(self.parts, self.shape, (*self.casts, dtype))

    def _viewed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if len(self.parts) > 1:
            return self._viewed_in_parts(func, args, kwargs)
        (part,) = self.parts
        if func is _aten.view.dtype:
            raise EngineError(
                f"tracing SGLang's weight loader: {self.origin}: the loader reads its bytes as another dtype, which "
                f"cannot be followed"
            )
        views = func(part.view, *args, **kwargs)
        if isinstance(views, Tensor):
            return self._of_view(part, views)
        return [self._of_view(part, view) for view in views]

    def _of_view(self, part: Part, view: Tensor) -> StandIn:
        return self._with((Part(part.source, view, (0,) * view.dim()),), view.shape)

    def _viewed_in_parts(self, func: Any, args: Any, kwargs: Any) -> StandIn:
        """A view of a concatenation: the whole of it, or a slice."""
        if func in (_aten.detach.default, _aten.alias.default):
            return self._with(self.parts, self.shape)
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
        parts = []
        for part in self.parts:
            at = part.start[dimension]
            begins, ends = max(start, at), min(stop, at + part.view.shape[dimension])
            if begins < ends:
                begin = list(part.start)
                begin[dimension] = begins - start
                view = part.view.narrow(dimension, begins - at, ends - begins)
                parts.append(Part(part.source, view, tuple(begin)))
        return self._with(tuple(parts), shape)

    def _with(self, parts: tuple[Part, ...], shape: Sequence[int]) -> StandIn:
        return StandIn(parts, shape, self.casts)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _concatenated(tensors: Sequence[Tensor], dimension: int) -> StandIn:
    stand_ins = list(_stand_ins(tensors))
    first = stand_ins[0]
    if len(stand_ins) != len(tensors) or any(each.casts != first.casts for each in stand_ins):
        names = ", ".join(each.origin for each in stand_ins)
        raise EngineError(
            f"tracing SGLang's weight loader: {names}: the loader joins it with a tensor that is not of the "
            f"checkpoint, or that has another dtype, which cannot be followed"
        )
    shape = torch.cat([torch.empty(each.shape, device="meta") for each in stand_ins], dimension).shape
    parts, at = [], 0
    for each in stand_ins:
        for part in each.parts:
            start = list(part.start)
            start[dimension] += at
            parts.append(Part(part.source, part.view, tuple(start)))
        at += each.shape[dimension]
    return StandIn(tuple(parts), shape, first.casts)


def _stand_ins(values: Iterable[Any]) -> Iterable[StandIn]:
    for value in values:
        if isinstance(value, StandIn):
            yield value
        elif isinstance(value, list | tuple):
            yield from _stand_ins(value)
