"""Tree of the tokens of a session. It only grows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Branch:
    """Sequence of a tree that is about to grow.

    Args:
        sequence: its number; the next unused one begins another.
        tokens: to append: those behind all of the sequence, or the complete context of another.
    """

    sequence: int
    tokens: list[int]


class TokenTree:
    """Tree as its linear sequences, each from the root to an end.

    A context continues the longest sequence that it begins with. One that begins with none, since it leaves a sequence
    before its end, is another sequence, and repeats the tokens that it shares.
    """

    def __init__(self) -> None:
        self._sequences: list[list[int]] = []
        self._ends: dict[Hashable, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._sequences)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, those that several share in each."""
        return sum(map(len, self._sequences))

    def branch(self, context: Sequence[int]) -> Branch:
        """Find the branch that a context grows."""
        context = list(context)
        longest = max(
            (number for number, tokens in enumerate(self._sequences) if context[: len(tokens)] == tokens),
            key=lambda number: len(self._sequences[number]),
            default=None,
        )
        if longest is None:
            return Branch(len(self._sequences), context)
        return Branch(longest, context[len(self._sequences[longest]) :])

    def grow(self, branch: Branch, drawn: Sequence[int], key: Hashable) -> None:
        """Append the tokens of a branch, and those that were drawn behind them.

        Args:
            branch: from `branch`, with nothing grown since.
            drawn: by the policy.
            key: by which `upto` finds the end of these tokens; a later end replaces one of the same key.
        """
        if branch.sequence == len(self._sequences):
            self._sequences.append([])
        sequence = self._sequences[branch.sequence]
        sequence += [*branch.tokens, *drawn]
        self._ends[key] = branch.sequence, len(sequence)

    def upto(self, key: Hashable) -> list[int] | None:
        """Tokens from the root to the end of a key; None without it."""
        if (end := self._ends.get(key)) is None:
            return None
        sequence, length = end
        return self._sequences[sequence][:length]
