"""The kernel that quantises matrices on a GPU, compared with the quantiser of the contract."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from engine3d.models import precision
from engine3d.models.precision import matrices_of, quantise, scale_box, scale_shape
from engine3d.models.rules import Box, TensorSlice
from tests.support.interpreted import run_interpreted

SHAPES = [(300, 200), (1, 5)]


def matrices(dtype: torch.dtype) -> list[torch.Tensor]:
    """Values of many magnitudes, a block of zeros, and peaks next to 448 times a power of two."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for rows, columns in SHAPES:
        values = torch.randn(rows, columns, generator=generator) * torch.rand(rows, columns, generator=generator) ** 12
        values[:2, 0] = torch.tensor([448.0 * 2, -448.0])[: len(values)]
        if rows > 128:
            values[128:256, :128] = 0
            values[256:, :128] = values[256:, :128].clamp(-1, 1)
            values[256, 0] = math.nextafter(448.0, 449.0) / 256
        made.append(values.to(dtype))
    return made


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


def _compare(device: str) -> None:
    from engine3d.models.quantisation.kernels import quantise_bands

    bands = partial(
        quantise_bands,
        block=precision.BLOCK,
        largest=precision.LARGEST,
        smallest_peak=precision._SMALLEST_PEAK,
    )
    given = [*matrices(torch.bfloat16), *matrices(torch.float32)]
    # A matrix is rows of a wider one, as gate and up are of a parameter that has both.
    wide = [torch.cat([values, values.new_full((len(values), 3), torch.nan)], dim=1).to(device) for values in given]
    memory = [
        (
            torch.full(values.shape, math.nan, device=device).to(torch.float8_e4m3fn),
            torch.full(scale_shape(tuple(values.shape)), math.nan, device=device),
        )
        for values in given
    ]
    run = bands(
        [(wider[:, :-3], values, scales) for wider, (values, scales) in zip(wide, memory, strict=True)],
    )
    for factor in (1, 0.7):  # the current elements count
        for wider, values in zip(wide, given, strict=True):
            wider[:, :-3] = (values * factor).to(device)
        run()
        for values, written in zip(given, memory, strict=True):
            expected = quantise((values * factor).to(values.dtype))
            assert same_bits(written[1], expected[1]), (values.shape, values.dtype)
            if device == "cuda":
                assert same_bits(written[0], expected[0]), (values.shape, values.dtype)
                continue
            # Triton's interpreter does not carry what it rounds into the exponent, and misreads subnormal numbers.
            difference = (written[0].float() - expected[0].float()).abs()
            assert (difference <= (expected[0].float().abs() / 2).clamp(2**-6)).all()
            assert difference.count_nonzero() < 0.1 * values.numel() + 1
    bands([])()


@pytest.mark.processes
def test_the_kernel_interpreted() -> None:
    run_interpreted(_compare)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_on_a_gpu() -> None:
    _compare("cuda")


def test_slices_that_begin_with_a_block_are_not_joined() -> None:
    parameter = torch.arange(512.0 * 8).view(512, 8)

    def slices(rows: int) -> list[TensorSlice]:
        """Two slices of the tensor in the parameter, with others between them."""
        return [
            TensorSlice("q", ((first, first + rows), (0, 8)), ((2 * first, 2 * first + rows), (0, 8)))
            for first in (1000, 1000 + rows)
        ]

    def views_of(rows: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None:
        box: Box = ((1000, 1000 + 2 * rows), (0, 8))
        moved = [
            TensorSlice(one.hf_name, one.hf_box, ((2 * rows * number, 2 * rows * number + rows), (0, 8)))
            for number, one in enumerate(slices(rows))
        ]
        sizes = [stop - start for start, stop in box]
        blocks = [stop - start for start, stop in scale_box(((0, sizes[0]), (0, 8)))]
        return matrices_of(parameter, box, moved, torch.zeros(sizes), torch.zeros(blocks))

    assert views_of(64) is None
    views = views_of(128)
    assert views is not None
    assert [view[0][0, 0].item() for view in views] == [0.0, 256 * 8]
    assert [tuple(view[1].shape) for view in views] == [(128, 8)] * 2
    assert [tuple(view[2].shape) for view in views] == [(1, 1)] * 2
