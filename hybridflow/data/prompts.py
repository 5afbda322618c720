"""Examples of one phase with their prompts as tokens, and prompts drawn from them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridflow.data.answers import AnswerCounts
from hybridflow.data.tasks import Example, field_names


def text_hash(text: str) -> int:
    """64 bits that stand for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Prompts:
    """Examples of one phase with their prompts as token ids. Both may lie in files and be read on use."""

    examples: Sequence[Example]
    tokens: Sequence[list[int]]
    overlong: int = 0
    """Prompts that were too long, and were cut or dropped."""

    def __len__(self) -> int:
        return len(self.examples)

    def at(self, indices: Iterable[int]) -> dict[int, Example]:
        """Some examples, by their indices."""
        return {index: self.examples[index] for index in dict.fromkeys(indices)}

    def identities(self, indices: Iterable[int]) -> dict[int, str]:
        """Row names of some prompts, by their indices. Empty for data without such names."""
        del indices
        return {}

    def sources(self) -> tuple[tuple[str, int], ...]:
        """Name of each source, and end of its prompts. Empty for data without sources."""
        return ()

    def answers(self) -> Iterable[Any]:
        """All answers. For prompts in files, only the first that is no text, if there is one."""
        return (example.answer for example in self.examples)

    def answer_counts(self) -> tuple[tuple[AnswerCounts, str], ...]:
        """Counts of the reference answers of each source, and the file and row of its first without one."""
        counts = AnswerCounts()
        for index, example in enumerate(self.examples):
            counts.add(index, example.answer)
        first = counts.first_missing
        return ((counts, "" if first is None else self.examples[first].location or f"prompt {first:,}"),)

    def fields(self) -> tuple[str, ...]:
        """Names of the examples' fields, without prompt and answer."""
        return field_names(self.examples)

    def text_hashes(self) -> np.ndarray[Any, Any]:
        """(P,) uint64: of the text of each prompt."""
        return np.array([text_hash(example.prompt) for example in self.examples], dtype=np.uint64)


@dataclass(frozen=True)
class Draw:
    """Some prompts of one phase.

    Args:
        prompts: of the phase.
        indices: of the drawn ones.
        groups: identity of each one's draw.
    """

    prompts: Prompts
    indices: Sequence[int]
    groups: Sequence[int]


@dataclass(frozen=True, slots=True)
class DrawnPrompt:
    """A prompt that was drawn for a step.

    Args:
        tokens: of the prompt.
        index: of the prompt in its data.
        group: identity of this draw; it decides the samples where the engine is deterministic.
        first_sample: id of its first sample; the others follow.
    """

    tokens: list[int]
    index: int
    group: int
    first_sample: int
