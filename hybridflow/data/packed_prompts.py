"""Prompts as two arrays, in memory or in files that are mapped into it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TOKENS, ENDS = "tokens.bin", "ends.bin"
"""Files of prompts: token ids as int32, and where each prompt ends as int64."""
_BLOCK = 1 << 22


@dataclass(frozen=True, eq=False)
class PackedPrompts(Sequence[list[int]]):
    """Token ids of prompts, end to end.

    Args:
        tokens: (T,) int32.
        ends: (P,) int64: where each prompt ends.
        directory: of the files that both are mapped from; another process of this host maps them too. None where they
            are in memory.
    """

    tokens: np.ndarray[Any, Any]
    ends: np.ndarray[Any, Any]
    directory: Path | None = None

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]]) -> PackedPrompts:
        """Pack lists."""
        if isinstance(prompts, PackedPrompts):
            return prompts
        ends = np.cumsum([len(prompt) for prompt in prompts], dtype=np.int64)
        tokens = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int32)
        begin = 0
        for prompt, end in zip(prompts, ends.tolist(), strict=True):
            tokens[begin:end] = prompt
            begin = end
        return cls(tokens, ends)

    @classmethod
    def mapped(cls, directory: Path) -> PackedPrompts:
        """Map the files of a directory."""
        return cls(mapped(directory / TOKENS, np.int32), mapped(directory / ENDS, np.int64), directory)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.directory is not None:
            return PackedPrompts.mapped, (self.directory,)
        return PackedPrompts, (self.tokens, self.ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> list[int]:  # type: ignore[override]
        """The token ids of a prompt."""
        if not 0 <= index < len(self.ends):
            raise IndexError(index)
        prompt: list[int] = self.tokens[self._begin(index) : int(self.ends[index])].tolist()
        return prompt

    def compact(self, index: int) -> array[int]:
        """The token ids of a prompt, of four bytes each."""
        return array("i", self.tokens[self._begin(index) : int(self.ends[index])].tobytes())

    def length(self, index: int) -> int:
        """Number of tokens of a prompt."""
        return int(self.ends[index]) - self._begin(index)

    def lengths(self) -> np.ndarray[Any, Any]:
        """(P,) int64: how many tokens each prompt has."""
        return np.diff(self.ends, prepend=0)

    def first_above(self, largest: int) -> tuple[int, int] | None:
        """The first prompt with a token id above `largest`, and that id; None if there is none."""
        for begin in range(0, len(self.tokens), _BLOCK):
            block = self.tokens[begin : begin + _BLOCK]
            above = np.flatnonzero(block > largest)
            if len(above):
                position = begin + int(above[0])
                return int(np.searchsorted(self.ends, position, side="right")), int(self.tokens[position])
        return None

    def _begin(self, index: int) -> int:
        return int(self.ends[index - 1]) if index else 0


def mapped(path: Path, kind: Any) -> np.ndarray[Any, Any]:
    """The numbers of a file, mapped into memory; an empty file cannot be."""
    if not path.stat().st_size:
        return np.empty(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r").view(np.ndarray)  # as which it is indexed in half the time
