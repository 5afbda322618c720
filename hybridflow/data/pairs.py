"""Prompts with responses of which some are better: of the arithmetic task, and from JSON-lines files."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine3d.errors import UserError, shortened
from hybridflow.data.config import DataConfig, PairsConfig
from hybridflow.data.tasks import Example, arithmetic_splits, listed, parse_fields, parse_lines, with_error

Text = str | list[int]
"""A text, or its token ids."""


@dataclass(frozen=True)
class Pair:
    """A prompt with a better and a worse response, or only one of the two.

    Args:
        prompt: not empty.
        chosen, rejected: the responses; at least one is there.
        place: where it is from, for errors.
    """

    prompt: Text
    chosen: Text | None
    rejected: Text | None
    place: str


@dataclass(frozen=True)
class PairSplits:
    """The pairs to learn from, and to evaluate with."""

    train: Sequence[Pair]
    evaluation: Sequence[Pair]


def load_pairs(config: DataConfig, *, unpaired: bool) -> PairSplits:
    """The pairs that `config` asks for.

    Args:
        config: with files of pairs, or the arithmetic task: right against wrong answers.
        unpaired: whether one response to each prompt is enough.

    Raises:
        UserError: naming file and line of what cannot serve.
    """
    if (pairs := config.pairs) is not None:
        return PairSplits(*(read_pairs(path, pairs, unpaired=unpaired) for path in (pairs.train_path, pairs.eval_path)))
    splits, seed = arithmetic_splits(config.arithmetic), config.arithmetic.seed
    return PairSplits(
        arithmetic_pairs(splits.train, f"{seed}:train pairs"),
        arithmetic_pairs(splits.evaluation, f"{seed}:held-out pairs"),
    )


def arithmetic_pairs(problems: Iterable[Example], seed: str) -> list[Pair]:
    """The right answer of each problem against one that is off by one or by ten."""
    generator = random.Random(seed)
    return [
        Pair(problem.prompt, problem.answer, with_error(problem, generator).answer, f"problem {number}")
        for number, problem in enumerate(problems)
    ]


def read_pairs(path: Path, config: PairsConfig, *, unpaired: bool) -> list[Pair]:
    """Pairs from a file of one JSON object a line, in order; lines of white space are skipped.

    Raises:
        UserError: naming the file and the line.
    """

    def parse(line: str, place: str) -> Pair:
        return _parse_pair(line, place, config, unpaired=unpaired)

    return parse_lines(path, parse, what="pairs")


def _parse_pair(line: str, place: str, config: PairsConfig, *, unpaired: bool) -> Pair:
    fields = parse_fields(line, place, config.prompt_field)
    both = [config.chosen_field, config.rejected_field]
    needed = [config.prompt_field, *([] if unpaired else both)]
    for name in needed:
        if name not in fields:
            raise UserError(f"{place}: no field {name!r}, only {listed(fields)}")
    if not any(name in fields for name in both):
        raise UserError(f"{place}: no field {both[0]!r} or {both[1]!r}, only {listed(fields)}")
    prompt, chosen, rejected = (
        _text(fields[name], place, name) if name in fields else None for name in (config.prompt_field, *both)
    )
    assert prompt is not None
    return Pair(prompt, chosen, rejected, place)


def _text(value: Any, place: str, name: str) -> Text:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(each) is int and each >= 0 for each in value):
        return value
    raise UserError(
        f"{place}: field {name!r} is {shortened(repr(value))}, expected a non-empty string or a list of token ids"
    )
