"""Remarks on rows: special tokens that are probably unintended, and tools that no prompt has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TOOLS = "tools"
"""The column in which data sets have tools."""
_LINES = {
    "tools": f"have tools in a column {TOOLS!r} that the prompts leave out; the setting tools of a source "
    "(tools_field of pairs) renders them",
    "bos": "begin with {bos!r} twice: the text has one, and the tokenizer puts one before it",
    "eos": "end with {eos!r}, after which a model has nothing to continue",
    "inner": "have tokens to train on after {eos!r}, where a model stops",
}
Remarks = Mapping[str, tuple[int, str]]
"""Number of rows and location of the first, by kind."""


class RemarkCounts:
    """Counts of remarks on rows, by their kind."""

    def __init__(self) -> None:
        self.counts: dict[str, tuple[int, int]] = {}
        """Number of rows and number of the first, by kind."""

    def add(self, number: int, kinds: Iterator[str]) -> None:
        """Count a row with its remarks."""
        for kind in kinds:
            count, first = self.counts.get(kind, (0, number))
            self.counts[kind] = count + 1, first


def located(counts: Mapping[str, Sequence[int]], location: Callable[[int], str]) -> Remarks:
    """Add the location of each first row to counts."""
    return {kind: (count, location(first)) for kind, (count, first) in counts.items()}


def lines(remarks: Remarks, tokenizer: PreTrainedTokenizerBase, rows: str) -> list[str]:
    """A line for each kind of remark.

    Args:
        remarks: of one source or phase.
        tokenizer: of the tokens.
        rows: their name after a number.
    """
    names = {"bos": tokenizer.bos_token, "eos": tokenizer.eos_token}
    return [
        f"data: {count:,} {rows} {_LINES[kind].format(**names)}; the first is {first}"
        for kind, (count, first) in remarks.items()
    ]


def of_prompt(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, is_text: bool) -> Iterator[str]:
    """The kinds of remarks on a prompt.

    Args:
        tokenizer: of the tokens.
        tokens: of the prompt.
        is_text: true if no template was applied to it.
    """
    if len(tokens) > 1 and tokens[0] == tokens[1] == tokenizer.bos_token_id:
        yield "bos"
    if is_text and tokens and tokens[-1] == tokenizer.eos_token_id:
        yield "eos"


def of_response(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], mask: Sequence[bool]) -> Iterator[str]:
    """The kinds of remarks on a response, of which the tokens of a mask are trained on."""
    end = tokenizer.eos_token_id
    if any(token == end and this and following for token, this, following in zip(tokens, mask, mask[1:], strict=False)):
        yield "inner"
