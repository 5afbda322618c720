"""Report on the prompts of a recipe: their number, lengths and dropped rows, and some as the model reads them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine3d.errors import shortened
from hybridflow.config.initial_model import initial_spec, initial_tokenizer
from hybridflow.config.recipe import Recipe
from hybridflow.data.files.conversations.supervised import SupervisedPrompts
from hybridflow.data.files.prompts import FilePrompts, SourceSpan
from hybridflow.data.packed_prompts import PackedPrompts
from hybridflow.data.prompts import Prompts
from hybridflow.planning.checks.prompt import check_token_ids
from hybridflow.planning.data.recipe_prompts import RecipePrompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BARS = 40
_BINS = 10


def data_lines(recipe: Recipe, *, show: int, characters: int) -> list[str]:
    """Describe all phases of a recipe's data.

    Args:
        recipe: of the run.
        show: prompts of each phase that are shown, evenly from all of it.
        characters: of each text, at most.

    Raises:
        UserError: naming what cannot serve.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer, _ = initial_tokenizer(recipe.model, Path(scratch))
    prompts = RecipePrompts(recipe, tokenizer)
    encoded = prompts.of_training
    of_sets = {f"evaluation.{name}": encoded_set for name, encoded_set in prompts.sets.items()}
    lines = [
        f"tokenizer: {len(tokenizer):,} tokens, {'with' if tokenizer.chat_template else 'without'} a chat template; "
        f"prompts have room for {prompts.limit:,} tokens"
    ]
    for name, phase in (prompts.phases | of_sets).items():
        if not len(phase):
            continue
        check_token_ids(f"{name} prompt", phase.tokens, initial_spec(recipe.model).vocab_size)
        lines += ["", *_phase_lines(name, phase)]
        for index in spread(len(phase), show):
            lines += _prompt_lines(tokenizer, phase, index, characters)
            if isinstance(phase, SupervisedPrompts) and encoded.masks is not None:
                lines += _learned_lines(tokenizer, encoded.answers[index], encoded.masks[index], characters)
    notes = prompts.notes()
    return [*lines, *(["", *notes] if notes else [])]


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` indices, spread evenly over all, the first among them."""
    few = min(count, most)
    return [index * count // few for index in range(few)]


def first_prompt(tokenizer: PreTrainedTokenizerBase, prompts: Prompts, characters: int = 300) -> str:
    """Describe the first prompt as the model reads it, in a line."""
    tokens = prompts.tokens[0]
    text = shortened(repr(str(tokenizer.decode(tokens))), characters)
    return f"data: the first training prompt has {len(tokens):,} tokens, and is {text}"


def _phase_lines(name: str, phase: Prompts) -> Iterator[str]:
    lengths = PackedPrompts.of(phase.tokens).lengths()
    yield f"{name}: {len(phase):,} prompts of {int(lengths.sum()):,} tokens"
    spans: Sequence[SourceSpan] = phase.spans if isinstance(phase, FilePrompts | SupervisedPrompts) else ()
    for span in spans:
        dropped = sum(span.dropped.values())
        kept = span.end - span.begin
        yield f"  {span.label}: {kept:,} of {kept + dropped:,} rows" + ("" if not dropped else "; dropped are")
        if span.with_tools:
            yield f"    {span.with_tools:,} with tools"
        yield from (f"    {count:,} with {reason}" for reason, count in span.dropped.items())
    for counts, first in phase.answer_counts():
        if counts.missing:
            yield f"  reference answers: {counts.missing:,} of {counts.rows:,} rows have none, first {first}"
    yield f"  tokens: {_quantiles(lengths)}"
    yield from _histogram(lengths)


def _quantiles(lengths: np.ndarray[Any, Any]) -> str:
    shares = {"least": 0.0, "median": 0.5, "95 %": 0.95, "99 %": 0.99, "most": 1.0}
    quantiles = np.quantile(lengths, list(shares.values()), method="lower").tolist()
    return ", ".join(f"{name} {int(value):,}" for name, value in zip(shares, quantiles, strict=True))


def _histogram(lengths: np.ndarray[Any, Any]) -> Iterator[str]:
    """Count lengths in ranges of whole tokens."""
    least, most = int(lengths.min()), int(lengths.max())
    width = -(-(most - least + 1) // _BINS)
    edges = list(range(least, most + 1, width))
    counts = np.bincount((lengths - least) // width, minlength=len(edges)).tolist()
    for begin, count in zip(edges, counts, strict=True):
        last = min(begin + width - 1, most)
        span = f"{begin:,}" if last == begin else f"{begin:,} to {last:,}"
        yield f"    {span:>15} {count:>10,} {'#' * round(_BARS * count / max(counts))}".rstrip()


def _prompt_lines(tokenizer: PreTrainedTokenizerBase, phase: Prompts, index: int, characters: int) -> Iterator[str]:
    tokens, example = phase.tokens[index], phase.examples[index]
    name = example.identity or f"prompt {index:,}"
    text = str(tokenizer.decode(tokens))
    yield f"  {name}, {len(tokens):,} tokens: {shortened(repr(text), characters)}"
    if example.answer != "":
        yield f"    answer: {shortened(repr(example.answer), characters)}"
    if tokens[0] == tokenizer.bos_token_id and tokens[:2] == [tokenizer.bos_token_id] * 2:
        yield f"    begins with {tokenizer.bos_token!r} twice: the text has one, and the tokenizer puts one before it"


def _learned_lines(
    tokenizer: PreTrainedTokenizerBase, answer: list[int], mask: list[bool], characters: int
) -> Iterator[str]:
    """Yield the trained and the masked sections of a supervised example."""
    sections: list[tuple[bool, list[int]]] = []
    for token, learned in zip(answer, mask, strict=True):
        if not sections or sections[-1][0] != learned:
            sections.append((learned, []))
        sections[-1][1].append(token)
    for learned, tokens in sections:
        text = shortened(repr(str(tokenizer.decode(tokens))), characters)
        yield f"    {'learned' if learned else 'read'}, {len(tokens):,} tokens: {text}"
