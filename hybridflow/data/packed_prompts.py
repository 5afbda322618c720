"""Prompts as two arrays, which the processes of a node read in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class PackedPrompts:
    """Token ids of prompts, end to end.

    Args:
        tokens: (T,) int32.
        ends: (P,) int64: where each prompt ends.
    """

    tokens: np.ndarray[Any, Any]
    ends: np.ndarray[Any, Any]

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]]) -> PackedPrompts:
        """Pack lists."""
        ends = np.cumsum([len(prompt) for prompt in prompts], dtype=np.int64)
        tokens = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int32)
        begin = 0
        for prompt, end in zip(prompts, ends.tolist(), strict=True):
            tokens[begin:end] = prompt
            begin = end
        return cls(tokens, ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> list[int]:
        """The token ids of a prompt."""
        found: list[int] = self.tokens[self._begin(index) : int(self.ends[index])].tolist()
        return found

    def length(self, index: int) -> int:
        """How many tokens a prompt has."""
        return int(self.ends[index]) - self._begin(index)

    def _begin(self, index: int) -> int:
        return int(self.ends[index - 1]) if index else 0
