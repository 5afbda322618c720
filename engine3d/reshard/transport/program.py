"""All copies that one rank makes to other ranks' memory, built once and run for every transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine3d.platform import platform
from engine3d.platform.copies import Copies, CopyMethod
from engine3d.reshard.plan.transfers import Segments


@dataclass(frozen=True, slots=True)
class Route:
    """Segments, and the memory that they go between.

    Args:
        segments: elements that go.
        sources: for each source buffer a flat tensor of its elements.
        targets: for each target buffer a flat tensor of its elements.
        near: true if the targets lie on the device that copies.
    """

    segments: Segments
    sources: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]
    near: bool = False


def flat(storage: torch.UntypedStorage, dtype: torch.dtype, offset_bytes: int, elements: int) -> torch.Tensor:
    """Part of a storage as the flat tensor of a buffer. It shares the storage's memory.

    Args:
        storage: own, or mapped from another process.
        dtype: of the elements.
        offset_bytes: of the first, a multiple of the element size.
        elements: how many.
    """
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset_bytes // dtype.itemsize, (elements,), (1,))


class CopyProgram:
    """Copies the segments of several routes at once, cast to the targets' dtypes.

    All routes advance together, so that all links between a rank and its targets are busy from the first byte to the
    last. A program keeps the memory of its routes alive.

    Args:
        routes: usually one for each target rank. No two segments write the same memory.
        method: how a GPU copies; a CPU has one way. The default is the platform's.
    """

    def __init__(self, routes: Sequence[Route], method: CopyMethod | None = None) -> None:
        copies = _joined(routes)
        self.nbytes = copies.nbytes
        self._memory = (copies.sources, copies.targets)
        self._run = platform.copy_runner(copies, method)

    def run(self) -> None:
        """Copy everything: on a GPU enqueued on the current stream, on a CPU done when this returns."""
        self._run()


def _joined(routes: Sequence[Route]) -> Copies:
    """The segments of all routes, with the buffers numbered consecutively."""
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    numbered: list[tuple[Segments, int, int]] = []
    for route in routes:
        numbered.append((route.segments, len(sources), len(targets)))
        sources += route.sources
        targets += route.targets
    segments = Segments.joined(numbered)
    return Copies(
        sources=sources,
        targets=targets,
        route=np.repeat(np.arange(len(routes)), [len(route.segments) for route in routes]),
        source=segments.source_buffer,
        source_offset=segments.source_offset,
        source_stride=segments.source_stride,
        target=segments.target_buffer,
        target_offset=segments.target_offset,
        target_stride=segments.target_stride,
        rows=segments.rows,
        length=segments.length,
        near_routes=frozenset(number for number, route in enumerate(routes) if route.near),
    )
