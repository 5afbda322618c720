"""The kernel of `quantiser` for GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 6
"""Columns of a band of rows: addresses of its elements, its values and its scales, stride of a row, rows, columns."""
_WARPS, _STAGES = 8, 3
_WIDEST = 16
"""Bytes of an access."""


def quantise_bands(
    matrices: Sequence[tuple[Tensor, Tensor, Tensor]], *, block: int, largest: float, smallest_peak: float
) -> Callable[[], None]:
    """Return a function that enqueues one kernel for each dtype on the current stream: a program quantises a band.

    Args:
        matrices: elements, values and scales of each, on one device and each with contiguous rows.
        block: rows and columns of a block, and rows of a band; a power of two.
        largest: largest value of float8_e4m3fn.
        smallest_peak: in place of a smaller one.
    """
    by_dtype: dict[torch.dtype, list[list[int]]] = {}
    for elements, values, scales in matrices:
        rows, columns = elements.shape
        assert elements.stride(1) == 1 and values.is_contiguous() and scales.is_contiguous()
        by_dtype.setdefault(elements.dtype, []).extend(
            [
                elements.data_ptr() + first * elements.stride(0) * elements.itemsize,
                values.data_ptr() + first * columns,
                scales.data_ptr() + first // block * scales.stride(0) * scales.itemsize,
                elements.stride(0),
                min(block, rows - first),
                columns,
            ]
            for first in range(0, rows, block)
        )
    device = matrices[0][0].device if matrices else None
    tables = {dtype: torch.tensor(bands, device=device) for dtype, bands in by_dtype.items()}
    alignments = {dtype: _alignment(bands) for dtype, bands in by_dtype.items()}

    def run() -> None:
        for dtype, table in tables.items():
            _quantise[(len(table),)](
                table,
                COLUMNS=_COLUMNS,
                ELEMENT=getattr(tl, str(dtype).removeprefix("torch.")),
                BLOCK=block,
                LARGEST=largest,
                SMALLEST=smallest_peak,
                ALIGNMENT=alignments[dtype],
                STAGES=_STAGES,
                num_warps=_WARPS,
            )

    return run


def _alignment(bands: list[list[int]]) -> int:
    """Return the largest power of two up to 16 that divides addresses, strides and columns, for wide accesses.

    Without it the compiler reads one element at a time.
    """
    return math.gcd(_WIDEST, *(number for band in bands for number in (band[0], band[1], band[3], band[5])))


@triton.jit
def _quantise(  # type: ignore[no-untyped-def]
    table,
    COLUMNS: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    STAGES: tl.constexpr,
):
    entry = table + tl.program_id(0) * COLUMNS
    elements = tl.multiple_of(tl.load(entry).to(tl.pointer_type(ELEMENT)), ALIGNMENT)
    values = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.float8e4nv)), ALIGNMENT)
    scales = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    stride = tl.multiple_of(tl.load(entry + 3).to(tl.int32), ALIGNMENT)
    rows = tl.load(entry + 4).to(tl.int32)
    columns = tl.multiple_of(tl.load(entry + 5).to(tl.int32), ALIGNMENT)
    row = tl.arange(0, BLOCK)[:, None]
    for first in tl.range(0, columns, BLOCK, num_stages=STAGES):
        column = first + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < columns)
        block = tl.load(elements + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        peak = tl.maximum(tl.max(tl.abs(block)), SMALLEST)
        # As `precision._power_of_two`.
        bits = tl.div_rn(peak, LARGEST).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, 1), 254)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        tl.store(scales + first // BLOCK, scale)
        quantised = (block * tl.div_rn(1.0, scale)).to(tl.float8e4nv)
        tl.store(values + row * columns + column, quantised, mask=inside)
