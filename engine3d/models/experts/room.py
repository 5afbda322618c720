"""Room for the rows of experts before their number is known, so that no host waits for a GPU to say it.

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
"""More room than the most rows that a layer has had."""
LEAST_TOKENS = 4096
"""Of all ranks: of fewer, shares differ by chance, and it costs little to wait."""
LEAST_PIECES, MOST_PIECES = 16, 256
"""Whose rows are known before room is made for those of others; and of how many of the last ones the most counts."""
MOST_OF_EVEN = 1.5
"""Over the rows of a rank where all have as many: above it there is no room ahead, as one odd piece would have all
others take as much memory."""


class RowsAhead:
    """Whether layers of a rank's model make room before they know how many rows they have; and whether it was enough.

    Args:
        device: where the layers compute.
        everyone: the ranks of the model; only this one if None.

    Attributes:
        too_little: () int32 on the device, not 0 once a layer had more rows than room.
        waits: layers know their rows first.
        again: how often all was computed again.
    """

    def __init__(self, device: torch.device, everyone: dist.ProcessGroup | None = None) -> None:
        self.too_little = torch.zeros((), dtype=torch.int32, device=device)
        self.waits = False
        self.again = 0
        self._everyone = everyone

    def was_too_little(self) -> bool:
        """Whether any layer of any rank had too little since this was asked before; all ranks have to ask."""
        if self._everyone is not None:
            all_reduce(self.too_little, dist.ReduceOp.MAX, self._everyone)
        found = bool(self.too_little)
        self.too_little.zero_()
        return found

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While layers wait."""
        self.waits, self.again = True, self.again + 1
        try:
            yield
        finally:
            self.waits = False


@dataclass(frozen=True)
class _Told:
    """What a device tells the host once it has come so far."""

    counts: Tensor
    is_told: Any
    tokens: Sequence[int]


class Room:
    """The room of one layer's rows: the most rows of a token that it has had lately, and a little more.

    Args:
        ahead: of the model that the layer is of.
    """

    def __init__(self, ahead: RowsAhead) -> None:
        self.ahead = ahead
        self._shares = deque[float](maxlen=MOST_PIECES)
        self._told: deque[_Told] = deque()

    def of(self, tokens: Sequence[int], most: int, even: float) -> list[int] | None:
        """Rows to make room for.

        Args:
            tokens: of all ranks, of each piece.
            most: rows of a token.
            even: of a token where all ranks have as many rows.

        Returns:
            Of each piece; None where they have to be known first.
        """
        while self._told and self._told[0].is_told.query():
            told = self._told.popleft()
            self.learn(told.counts.tolist(), told.tokens)
        if self.ahead.waits or len(self._shares) < LEAST_PIECES or min(tokens) < LEAST_TOKENS:
            return None
        share = max(self._shares)
        if not 0 < share <= MOST_OF_EVEN * even:
            return None
        return [min(count * most, math.ceil(count * share * (1 + SLACK))) for count in tokens]

    def learn(self, counts: Sequence[int], tokens: Sequence[int]) -> None:
        """So many rows each piece had, of so many tokens of all ranks."""
        self._shares += [rows / count for rows, count in zip(counts, tokens, strict=True) if count >= LEAST_TOKENS]

    def learn_later(self, counts: Tensor, is_told: Any, tokens: Sequence[int]) -> None:
        """The same, once an event has come.

        Args:
            counts: (P,) int32 in host memory.
            is_told: the event after which they are there.
            tokens: as of `learn`.
        """
        self._told.append(_Told(counts, is_told, tokens))
