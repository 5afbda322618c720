"""Megatron-Core's CUDA calls on a CPU.

Megatron-Core's Python runs on any device. Calls to `torch.cuda`, literal `device="cuda"` arguments and tensor type
names tie it to CUDA. `answer_for_cuda` answers them in this process. Streams and events are empty: on a CPU everything
is done when a call returns.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_GPU_ONLY = ("transformer_engine", "apex")
"""Packages whose kernels Megatron-Core calls wherever they are installed."""


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream(_Event):
    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


_STREAM = _Stream()


class _Generators:
    """The one generator, whichever device it is asked for."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


@contextlib.contextmanager
def _stream_context(stream: Any) -> Iterator[Any]:
    yield stream


def _nothing() -> Callable[..., None]:
    """A new function that does nothing: torch's own tables refuse one object under two names."""
    return lambda *args, **kwargs: None


# What each name of torch.cuda answers. The random state is the CPU generator's.
_ANSWERS: dict[str, Any] = {
    "current_device": lambda: _CPU,
    "set_device": _nothing(),
    "device_count": lambda: 1,
    "is_initialized": lambda: True,
    "init": _nothing(),
    "_lazy_init": _nothing(),
    "_lazy_call": lambda call, **kwargs: call(),
    "synchronize": _nothing(),
    "empty_cache": _nothing(),
    "Stream": _Stream,
    "Event": _Event,
    "stream": _stream_context,
    "set_stream": _nothing(),
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "is_current_stream_capturing": lambda: False,
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "manual_seed_all": lambda seed: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "default_generators": _Generators(),
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "reset_peak_memory_stats": _nothing(),
}


_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor")


def _map_devices() -> None:
    """Map the device "cuda" to the CPU, page-locked memory to any, and a CPU tensor's type name to the CUDA one that
    Megatron-Core knows.

    The functions that take a device are replaced. A `TorchFunctionMode` would run for every operation and property.
    """
    # Those that a `with torch.device(...)` knows. It notes them when it is called for the first time.
    of_torch = {function: name for name, function in vars(torch).items() if callable(function)}
    for name in (*(of_torch[function] for function in _device_constructors() if function in of_torch), *_LIKE):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _NEW:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    to, type_of = _on_cpu(torch.Tensor.to), torch.Tensor.type

    def to_cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(tensor, *(_CPU if _is_cuda(argument) else argument for argument in args), **kwargs)

    def type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_of(tensor, *args, **kwargs)
        return answer if args or kwargs else answer.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.to = to_cpu  # type: ignore[method-assign, assignment]
    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]


def _on_cpu(function: Any) -> Callable[..., Any]:
    """The function with the CPU for the device "cuda", and any memory for page-locked one."""

    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return mapped


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


def _as_list(sizes: Any) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]


def _allowing_uneven_gather(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """gloo gathers tensors of one shape; expert tensor parallelism gathers as many tokens as each rank has."""

    def gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({output.shape for output in outputs}) == 1:
            return all_gather(outputs, tensor, group=group, async_op=async_op)
        for source, output in enumerate(outputs):
            is_source = source == torch.distributed.get_rank(group)
            buffer = tensor.contiguous() if is_source else torch.empty_like(output)
            torch.distributed.broadcast(buffer, group_src=source, group=group)
            output.copy_(buffer)
        return None

    return gather


def _allowing_uneven_scatter(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    def scatter(
        output: torch.Tensor,
        inputs: list[torch.Tensor],
        op: Any = torch.distributed.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({tensor.shape for tensor in inputs}) == 1:
            return reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
        for target, tensor in enumerate(inputs):
            total = tensor.clone()
            torch.distributed.reduce(total, group_dst=target, op=op, group=group)
            if target == torch.distributed.get_rank(group):
                output.copy_(total)
        return None

    return scatter


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Leave functions alone that are decorated with torch.compile, which imports a compiler at the first of them."""
    compile_function = torch.compile

    def as_it_is(function: Any = None, **settings: Any) -> Any:
        return function if function is not None else lambda decorated: decorated

    torch.compile = as_it_is  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_function


_installed = False


def answer_for_cuda() -> None:
    """Answer Megatron-Core's CUDA calls in this process. Does nothing on a machine with a GPU, or a second time."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    # Megatron-Core decorates small functions with torch.compile, which would start a C++ compiler for each.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:  # the variable is only for processes that have not imported it yet
        sys.modules["torch._dynamo"].config.disable = True
    for name in _GPU_ONLY:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    # Imported before torch.cuda is replaced: what it imports in turn asks torch.cuda at import, and needs the truth.
    with _uncompiled():
        import megatron.core.models.gpt.gpt_model  # noqa: F401
    import megatron.core.tensor_parallel.random as megatron_random

    for name, answer in _ANSWERS.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.random.get_rng_state = _ANSWERS["get_rng_state"]
    torch.cuda.random.set_rng_state = _ANSWERS["set_rng_state"]
    torch.cuda.nvtx.range_push = _nothing()
    torch.cuda.nvtx.range_pop = _nothing()

    # gloo wants split sizes as lists, where the all-to-all token dispatcher passes tensors.
    all_to_all_single = torch.distributed.all_to_all_single

    def all_to_all_with_lists(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return all_to_all_single(
            output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), group=group, async_op=async_op
        )

    torch.distributed.all_to_all_single = all_to_all_with_lists
    torch.distributed.all_gather = _allowing_uneven_gather(torch.distributed.all_gather)
    torch.distributed.reduce_scatter = _allowing_uneven_scatter(torch.distributed.reduce_scatter)

    _map_devices()
    _installed = True

    megatron_random._lazy_call = _ANSWERS["_lazy_call"]
    megatron_random._lazy_init = _ANSWERS["_lazy_init"]
