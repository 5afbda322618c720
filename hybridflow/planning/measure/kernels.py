"""Rates of one device: matrix multiplications, attention, experts, memory, Adam, and copies to and from the host.

Everything is PyTorch's: a GPU's training kernels are others, and reach a little more. Sizes are those of a layer of a
small model on a machine without GPUs, whose dtype is float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from engine3d.platform import platform
from hybridflow.planning.measure.rates import MeasuredRate, seconds_of

_LATENT_HEAD, _LATENT_VALUE = 192, 128
"""Width of a head of queries and keys, and of values, of DeepSeek-V3's attention."""


@dataclass(frozen=True)
class KernelSizes:
    """KernelSizes of the measured operations.

    Args:
        dtype: of weights.
        tokens: rows of a matrix multiplication.
        widths: sides of its square weight.
        experts, expert_tokens, hidden, expert_ffn: of a layer with experts.
        sequence, heads, head_dim: of attention.
        elements: of the tensors that memory and Adam are measured with.
    """

    dtype: torch.dtype
    tokens: int
    widths: tuple[int, ...]
    experts: int
    expert_tokens: int
    hidden: int
    expert_ffn: int
    sequence: int
    heads: int
    head_dim: int
    elements: int


ON_GPU = KernelSizes(
    torch.bfloat16, 16384, (256, 512, 1024, 2048, 4096, 8192), 32, 512, 2048, 768, 2048, 32, 128, 2**28
)
ON_CPU = KernelSizes(torch.float32, 512, (64, 128, 256, 512, 1024), 4, 128, 96, 96, 256, 4, 64, 2**24)


def measured_kernels(sizes: KernelSizes, peak: float | None) -> Iterator[tuple[str, MeasuredRate]]:
    """Measure the rates of this process's device.

    Args:
        sizes: of the operations.
        peak: FLOP/s that the maker states; the fastest multiplication if None.

    Yields:
        Name and rate, as `Hardware` has them.
    """
    device = platform.device(0)
    kind = str(sizes.dtype).removeprefix("torch.")
    # The widest first: a GPU's clocks are low when it has had nothing to do.
    rates = {width: _multiplication(sizes, width, device) for width in sorted(sizes.widths, reverse=True)}
    flops = peak or max(rates.values())
    of = "" if peak else ", the fastest of them"
    yield "flops", MeasuredRate(flops, "datasheet" if peak else f"measured, {kind} multiplications{of}")
    linear, half = fitted_rates({width: rate / flops for width, rate in rates.items()})
    widths = ", ".join(map(str, sizes.widths))
    origin = f"measured, {kind} multiplications of {sizes.tokens:,} tokens by square weights of {widths}"
    yield "linear", MeasuredRate(linear, origin)
    yield "linear_half", MeasuredRate(half, origin)
    grouped, apart = _experts(sizes, device)
    origin = f"measured, {sizes.experts} experts of {sizes.hidden} by {sizes.expert_ffn}, {sizes.expert_tokens} tokens"
    yield "experts", MeasuredRate(grouped / flops, f"{origin} each, batched")
    yield "unfused_experts", MeasuredRate(apart / flops, f"{origin} each, one after the other")
    for name, head, value in (
        ("attention", sizes.head_dim, sizes.head_dim),
        ("latent_attention", _LATENT_HEAD, _LATENT_VALUE),
    ):
        rate = _attention(sizes, head, value, device)
        origin = f"measured, PyTorch's attention of {sizes.sequence:,} tokens, heads of {head} and {value}, {kind}"
        yield name, MeasuredRate(rate / flops, f"{origin}, forwards and backwards")
    copied = _memory_rate(sizes, device)
    origin = f"of {sizes.elements:,} float32 elements"
    yield "memory_rate", MeasuredRate(copied, f"measured, a copy {origin}")
    yield "adam", MeasuredRate(_adam(sizes, device) / copied, f"measured, PyTorch's fused Adam {origin}")
    yield "host_rate", MeasuredRate(_host_rate(sizes, device), f"measured, a copy {origin} to the device and back")


def fitted_rates(shares: dict[int, float]) -> tuple[float, float]:
    """Fit share = linear * width / (width + half) to measured shares by width.

    The reciprocal is linear in 1 / width: least squares of its relative errors, because the reciprocal of a small share
    would outweigh all others. `half` is at least 0.

    Returns:
        `linear` and `linear_half` of `Hardware`.
    """
    # 1 = intercept * share + slope * share / width, for each width.
    points = [(share, share / width) for width, share in shares.items()]
    squares, products, other_squares = (
        sum(point[one] * point[other] for point in points) for one, other in ((0, 0), (0, 1), (1, 1))
    )
    sums = [sum(point[index] for point in points) for index in (0, 1)]
    determinant = squares * other_squares - products**2
    intercept = (sums[0] * other_squares - sums[1] * products) / determinant
    slope = (squares * sums[1] - products * sums[0]) / determinant
    if slope <= 0 or intercept <= 0:
        return max(shares.values()), 0.0
    return 1 / intercept, slope / intercept


def _multiplication(sizes: KernelSizes, width: int, device: torch.device) -> float:
    rows = torch.randn(sizes.tokens, width, device=device, dtype=sizes.dtype)
    weight = torch.randn(width, width, device=device, dtype=sizes.dtype)
    return 2.0 * sizes.tokens * width**2 / seconds_of(lambda: rows @ weight)


def _experts(sizes: KernelSizes, device: torch.device) -> tuple[float, float]:
    """FLOP/s of all experts' rows at once, and of one expert after the other."""
    rows = torch.randn(sizes.experts, sizes.expert_tokens, sizes.hidden, device=device, dtype=sizes.dtype)
    weights = torch.randn(sizes.experts, sizes.hidden, sizes.expert_ffn, device=device, dtype=sizes.dtype)
    flops = 2.0 * sizes.experts * sizes.expert_tokens * sizes.hidden * sizes.expert_ffn

    def apart() -> None:
        for index in range(sizes.experts):
            rows[index] @ weights[index]

    return flops / seconds_of(lambda: torch.bmm(rows, weights)), flops / seconds_of(apart)


def _attention(sizes: KernelSizes, head: int, value: int, device: torch.device) -> float:
    """FLOP/s of causal attention, of which half of the pairs count, forwards and backwards."""
    shape = (1, sizes.heads, sizes.sequence)
    query, key = (torch.randn(*shape, head, device=device, dtype=sizes.dtype, requires_grad=True) for _ in range(2))
    values = torch.randn(*shape, value, device=device, dtype=sizes.dtype, requires_grad=True)

    def both() -> None:
        output = functional.scaled_dot_product_attention(query, key, values, is_causal=True)
        torch.autograd.grad(output.sum(), (query, key, values))

    return 3.0 * sizes.heads * sizes.sequence**2 * (head + value) / seconds_of(both)


def _memory_rate(sizes: KernelSizes, device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(sizes.elements, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / seconds_of(lambda: target.copy_(source))


def _adam(sizes: KernelSizes, device: torch.device) -> float:
    """Bytes a second of Adam: it reads gradients, and reads and writes weights and two moments."""
    parameter = torch.nn.Parameter(torch.zeros(sizes.elements, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam([parameter], fused=True)
    return 7.0 * parameter.nbytes / seconds_of(optimizer.step)


def _host_rate(sizes: KernelSizes, device: torch.device) -> float:
    """Bytes a second of a copy into the device and out of it, one after the other."""
    on_device = torch.zeros(sizes.elements, device=device)
    on_host = platform.host_memory(on_device.nbytes).view(torch.float32)

    def both() -> None:
        on_host.copy_(on_device, non_blocking=True)
        on_device.copy_(on_host, non_blocking=True)

    return 2.0 * on_device.nbytes / seconds_of(both)
