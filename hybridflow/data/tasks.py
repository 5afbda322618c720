"""Prompts and their answers: an arithmetic task made on the spot, and JSON-lines files."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine3d.errors import UserError
from hybridflow.data.config import ArithmeticConfig, DataConfig

ARITHMETIC_CHARACTERS = "0123456789+-*="
"""Every character of every arithmetic prompt and answer."""


@dataclass(frozen=True)
class Example:
    """A prompt and its answer: what a reward compares with, and the response to learn in supervised training."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Splits:
    """The examples of each phase. An index into `train` or `evaluation` is the identity of that prompt."""

    sft: Sequence[Example]
    train: Sequence[Example]
    evaluation: Sequence[Example]


def load_splits(config: DataConfig) -> Splits:
    """The examples that `config` asks for. Raises UserError naming file and line for a file that cannot serve."""
    if config.jsonl is None:
        return arithmetic_splits(config.arithmetic)
    jsonl = config.jsonl

    def read(path: str) -> list[Example]:
        return read_jsonl(Path(path), prompt_field=jsonl.prompt_field, answer_field=jsonl.answer_field)

    return Splits(
        sft=[] if jsonl.sft_path is None else read(jsonl.sft_path),
        train=read(jsonl.train_path),
        evaluation=read(jsonl.eval_path),
    )


def arithmetic_splits(config: ArithmeticConfig) -> Splits:
    """Three disjoint samples of the problem space, for example Example("17+25=", "42").

    They are consecutive pieces of one random permutation of all problems, which depends on the seed alone, so no
    problem is in two of them. The evaluation problems do not change with the sizes of the other splits, nor the
    supervised ones with train_size. 17+25 and 25+17 are two problems.
    """
    wanted = config.eval_size + config.sft_size + config.train_size
    drawn = [_problem(config, index) for index in _permutation_head(config.problems, wanted, config.seed)]
    first_train = config.eval_size + config.sft_size
    generator = random.Random(f"{config.seed}:wrong")
    supervised = [
        _with_error(example, generator) if generator.random() < config.sft_wrong else example
        for example in drawn[config.eval_size : first_train]
    ]
    return Splits(evaluation=drawn[: config.eval_size], sft=supervised, train=drawn[first_train:])


def _with_error(example: Example, generator: random.Random) -> Example:
    """The problem with an answer that is off by one or by ten."""
    return Example(example.prompt, str(int(example.answer) + generator.choice((-10, -1, 1, 10))))


def _problem(config: ArithmeticConfig, index: int) -> Example:
    operands = config.largest_operand - config.smallest_operand + 1
    rest, right = divmod(index, operands)
    which_operator, left = divmod(rest, operands)
    operator = config.operators[which_operator]
    left, right = left + config.smallest_operand, right + config.smallest_operand
    answer = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return Example(f"{left}{operator}{right}=", str(answer))


def _permutation_head(size: int, count: int, seed: int) -> list[int]:
    """The first `count` elements of a random permutation of range(size), the same whatever `count` is.

    Fisher and Yates's shuffle with only the displaced elements stored: the space may be far larger than the sample.
    """
    generator = random.Random(seed)
    displaced: dict[int, int] = {}
    head = []
    for position in range(count):
        chosen = generator.randrange(position, size)
        head.append(displaced.get(chosen, chosen))
        displaced[chosen] = displaced.get(position, position)
    return head


def read_jsonl(path: Path, *, prompt_field: str = "prompt", answer_field: str | None = "answer") -> list[Example]:
    """Examples from a file of one JSON object a line, in order; lines of white space are skipped.

    The prompt is a non-empty string, the answer a string or an integer; without `answer_field` answers are empty. Other
    fields are ignored. Raises UserError naming the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read prompts from {path}: {reason}") from None
    lines = text.split("\n")
    examples = [
        _parse_line(line, f"{path}:{number}", prompt_field, answer_field)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not examples:
        raise UserError(f"{path} holds no prompts, expected one JSON object a line")
    return examples


def _parse_line(line: str, place: str, prompt_field: str, answer_field: str | None) -> Example:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{place}: not JSON ({error.msg} at column {error.colno}), expected one object a line"
        ) from None
    if not isinstance(fields, dict):
        raise UserError(f"{place}: a JSON {type(fields).__name__}, expected an object with field {prompt_field!r}")
    for name in (prompt_field, answer_field):
        if name is not None and name not in fields:
            raise UserError(f"{place}: no field {name!r}, only {', '.join(map(repr, fields)) or 'an empty object'}")
    prompt = fields[prompt_field]
    if not isinstance(prompt, str) or not prompt:
        raise UserError(f"{place}: field {prompt_field!r} is {prompt!r}, expected a non-empty string")
    answer = "" if answer_field is None else fields[answer_field]
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        raise UserError(f"{place}: field {answer_field!r} is {answer!r}, expected a string or an integer")
    return Example(prompt, str(answer))
