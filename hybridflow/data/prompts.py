"""Examples of one phase with their prompts as tokens."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.data.tasks import Example


@dataclass(frozen=True)
class Prompts:
    """Examples of one phase with their prompts as token ids."""

    examples: list[Example]
    tokens: list[list[int]]
    overlong: int = 0
    """How many were too long, and were cut or dropped."""

    def __len__(self) -> int:
        return len(self.examples)
