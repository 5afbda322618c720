"""Capacity for the rows of experts, predicted before their number is known, so that no host waits for a GPU.

Where each layer's host waits, the forward pass is as slow as the slowest host: GPUs have nothing queued meanwhile.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine3d.collectives import all_reduce

SLACK = 1 / 16
"""Capacity above the most rows that a layer has had, as a share of them."""
LEAST_TOKENS = 4096
"""Tokens of all ranks below which nothing is predicted: shares differ by chance, and it costs little to wait."""
LEAST_CHUNKS, MOST_CHUNKS = 16, 256
"""Chunks whose rows are known before the first prediction, and the window of chunks over which the maximum is taken."""
MOST_OF_EVEN = 1.5
"""Largest prediction over a rank's rows at an even load. Above it one odd chunk would have all others take as much
memory, so that layers wait."""


class PredictedCapacity:
    """State of a rank's model whose layers predict their capacity, and the overflow of it.

    Args:
        device: device of the layers.
        model_group: the ranks of the model; only this one if None.

    Attributes:
        overflow: () int32 on the device, not 0 once a layer had more rows than capacity.
        waits: True while layers wait for their number of rows.
        recomputed: how often everything was computed again.
    """

    def __init__(self, device: torch.device, model_group: dist.ProcessGroup | None = None) -> None:
        self.overflow = torch.zeros((), dtype=torch.int32, device=device)
        self.waits = False
        self.recomputed = 0
        self._model_group = model_group

    def overflowed(self) -> bool:
        """True if any layer of any rank overflowed since the previous call. A collective of all ranks."""
        if self._model_group is not None:
            all_reduce(self.overflow, dist.ReduceOp.MAX, self._model_group)
        overflowed = bool(self.overflow)
        self.overflow.zero_()
        return overflowed

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Make layers wait for their number of rows."""
        self.waits, self.recomputed = True, self.recomputed + 1
        try:
            yield
        finally:
            self.waits = False


@dataclass(frozen=True)
class _PendingCounts:
    """Counts that a device copies to the host."""

    counts: Tensor
    is_copied: Any
    tokens: Sequence[int]


class RowCapacity:
    """The capacity of one layer: the most rows a token that it has had lately, and a little more.

    Args:
        predicted: state of the layer's model.
    """

    def __init__(self, predicted: PredictedCapacity) -> None:
        self.predicted = predicted
        self._shares = deque[float](maxlen=MOST_CHUNKS)
        self._pending: deque[_PendingCounts] = deque()

    def of(self, tokens: Sequence[int], topk: int, even: float) -> list[int] | None:
        """The capacity of each chunk, in rows.

        Args:
            tokens: of all ranks, of each chunk.
            topk: most rows of a token.
            even: rows of a token where all ranks have as many.

        Returns:
            None where the number of rows has to be known first.
        """
        while self._pending and self._pending[0].is_copied.query():
            pending = self._pending.popleft()
            self.observe(pending.counts.tolist(), pending.tokens)
        if self.predicted.waits or len(self._shares) < LEAST_CHUNKS or min(tokens) < LEAST_TOKENS:
            return None
        share = max(self._shares)
        if not 0 < share <= MOST_OF_EVEN * even:
            return None
        return [min(count * topk, math.ceil(count * share * (1 + SLACK))) for count in tokens]

    def observe(self, counts: Sequence[int], tokens: Sequence[int]) -> None:
        """Record the rows of each chunk, and its tokens of all ranks."""
        self._shares += [rows / count for rows, count in zip(counts, tokens, strict=True) if count >= LEAST_TOKENS]

    def observe_later(self, counts: Tensor, is_copied: Any, tokens: Sequence[int]) -> None:
        """Record the same once an event has occurred.

        Args:
            counts: (P,) int32 in host memory.
            is_copied: the event after which they can be read.
            tokens: as of `observe`.
        """
        self._pending.append(_PendingCounts(counts, is_copied, tokens))
