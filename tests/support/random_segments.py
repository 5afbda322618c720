"""Random segments between random buffers, and what they make of the target, element by element."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine3d.reshard.plan.transfers import Segments

DTYPES = (torch.bfloat16, torch.float32, torch.bfloat16, torch.uint8, torch.float16)


def random_sources(seed: int, elements: int = 4000) -> list[torch.Tensor]:
    """One flat tensor for each of DTYPES, of values that all of them hold."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 200, (elements,), generator=generator).to(dtype) for dtype in DTYPES]


def empty_targets(elements: int = 6000) -> list[torch.Tensor]:
    return [torch.zeros(elements, dtype=dtype) for dtype in DTYPES]


def random_segments(seed: int, count: int = 60, elements: tuple[int, int] = (4000, 6000)) -> Segments:
    """Segments with one and many rows, aligned and not, of one dtype and of two.

    Args:
        elements: of each source buffer and each target buffer.
    """
    random = np.random.default_rng(seed)
    used = [0] * len(DTYPES)
    columns = []
    for _ in range(count):
        source, target = (int(index) for index in random.integers(0, len(DTYPES), 2))
        if random.random() < 0.7:
            source = target
        aligned = 16 if random.random() < 0.5 else 1
        rows = 1 if random.random() < 0.4 else int(random.integers(2, 9))
        length = int(random.integers(1, 40 // min(aligned, 8))) * aligned
        target_stride, source_stride = (
            length if rows == 1 or random.random() < 0.2 else length + aligned * int(random.integers(0, 4))
            for _ in range(2)
        )
        offset = -(-used[target] // aligned) * aligned
        end = offset + (rows - 1) * target_stride + length
        slack = elements[0] - ((rows - 1) * source_stride + length)
        if end > elements[1] or slack < 0:
            continue
        used[target] = end
        start = int(random.integers(0, slack // aligned + 1)) * aligned
        columns.append((target, offset, source, start, source_stride, target_stride, rows, length))
    columns.sort()
    target, offset, source, start, source_stride, target_stride, rows, length = np.array(columns, dtype=np.int64).T
    return Segments(source, start, source_stride, target, offset, target_stride, rows, length)


def copied(segments: Segments, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """The plainest loop over rows, on numpy arrays where the dtype is the same."""
    for number in range(len(segments)):
        source = sources[segments.source_buffer[number]]
        target = targets[segments.target_buffer[number]]
        length = int(segments.length[number])
        for row in range(int(segments.rows[number])):
            start = int(segments.source_offset[number] + row * segments.source_stride[number])
            to = int(segments.target_offset[number] + row * segments.target_stride[number])
            values = source[start : start + length]
            if source.dtype == target.dtype:
                size = source.dtype.itemsize
                raw = target.view(torch.uint8).numpy()
                raw[to * size : (to + length) * size] = values.view(torch.uint8).numpy()
            else:
                target[to : to + length] = values.to(target.dtype)


def nbytes(segments: Segments) -> int:
    sizes = np.array([dtype.itemsize for dtype in DTYPES])
    return int((segments.rows * segments.length * sizes[segments.target_buffer]).sum())
