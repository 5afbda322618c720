"""Prompts and their answers: a generated arithmetic task, and JSON-lines files."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine3d.errors import UserError, shortened
from engine3d.input_files import MOST_DIGITS_OF_DATA, FileError, JsonError, json_kind, json_text, lines, parse_json
from hybridflow.data.answers import AnswerCounts, as_answer
from hybridflow.data.config import ArithmeticConfig, DataConfig, JsonlConfig

ARITHMETIC_CHARACTERS = "0123456789+-*="
"""Every character of every arithmetic prompt and answer."""


@dataclass(frozen=True)
class Example:
    """A prompt and its answer: the reference of a reward, and the response to train on in supervised training.

    Args:
        prompt: the text.
        answer: text. From a JSON-lines file any JSON value, with whole numbers as text.
        fields: every field of its line, as JSON. Reward functions request them by name.
        identity: "SOURCE:ROW" of its row in a file. Empty for other data.
        location: file and line or row, for errors. Empty for other data.
    """

    prompt: str
    answer: Any
    fields: Mapping[str, Any] = field(default_factory=dict)
    identity: str = ""
    location: str = field(default="", compare=False)


@dataclass(frozen=True)
class Splits:
    """The examples of each phase that trains. An index into `train` is the identity of that prompt."""

    sft: Sequence[Example]
    train: Sequence[Example]


def load_splits(config: DataConfig) -> Splits:
    """Load the examples to train on, by `config`, which has no files of pairs.

    Raises:
        UserError: naming file and line of what cannot serve.
    """
    if (jsonl := config.jsonl) is None:
        return arithmetic_splits(config.arithmetic)
    return Splits(
        sft=[] if jsonl.sft_path is None else _read_split(jsonl, jsonl.sft_path, text_answers=True),
        train=_read_split(jsonl, jsonl.train_path),
    )


def load_held_out(config: DataConfig) -> Sequence[Example]:
    """Load the examples that `config` holds out, for the set `eval`.

    Raises:
        UserError: naming file and line of what cannot serve.
    """
    if (jsonl := config.jsonl) is not None:
        return _read_split(jsonl, jsonl.eval_path)
    return arithmetic_held_out(config.arithmetic)


def _read_split(jsonl: JsonlConfig, path: Path, *, text_answers: bool = False) -> list[Example]:
    return read_jsonl(path, prompt_field=jsonl.prompt_field, answer_field=jsonl.answer_field, text_answers=text_answers)


def field_names(examples: Iterable[Example]) -> tuple[str, ...]:
    """Every field that some example has, in the order in which they first appear."""
    return tuple(dict.fromkeys(name for example in examples for name in example.fields))


def arithmetic_splits(config: ArithmeticConfig) -> Splits:
    """Two disjoint samples of the problem space, for example Example("17+25=", "42").

    With those of `arithmetic_held_out`, which come first, they are consecutive ranges of one random permutation of all
    problems, which depends on the seed alone. So no problem is in two of them. The supervised problems do not change
    with train_size. 17+25 and 25+17 are two problems.
    """
    requested = config.eval_size + config.sft_size + config.train_size
    drawn = [_problem(config, index) for index in _permutation_head(config.problems, requested, config.seed)]
    first_train = config.eval_size + config.sft_size
    generator = random.Random(f"{config.seed}:wrong")
    supervised = [
        with_error(example, generator) if generator.random() < config.sft_wrong else example
        for example in drawn[config.eval_size : first_train]
    ]
    return Splits(sft=supervised, train=drawn[first_train:])


def arithmetic_held_out(config: ArithmeticConfig) -> list[Example]:
    """The held-out problems, which do not change with the sizes of the splits of `arithmetic_splits`."""
    head = _permutation_head(config.problems, config.eval_size, config.seed)
    return [_problem(config, index) for index in head]


def with_error(example: Example, generator: random.Random) -> Example:
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


def read_jsonl(
    path: Path, *, prompt_field: str = "prompt", answer_field: str | None = "answer", text_answers: bool = False
) -> list[Example]:
    """Examples from a file of one JSON object a line, in order; lines of white space are skipped.

    Args:
        path: of the file.
        prompt_field: holds a non-empty string.
        answer_field: holds anything; answers are empty if None.
        text_answers: true if answers are trained on, and so have to be strings or whole numbers.

    Raises:
        UserError: naming the file and the line.
    """

    def parse(line: str, location: str) -> Example:
        return _parse_line(line, location, prompt_field, answer_field, text_answers=text_answers)

    examples = parse_lines(path, parse, what="prompts")
    counts = AnswerCounts()
    for number, example in enumerate(examples):
        counts.add(number, example.answer)
    return [
        replace(example, answer=as_answer(example.answer, whole_numbers=counts.whole_numbers)) for example in examples
    ]


def parse_lines[T](path: Path, parse: Callable[[str, str], T], *, what: str) -> list[T]:
    """Parse each line of a file, in order. Lines of white space are skipped.

    Args:
        path: of the file.
        parse: raises UserError for a wrong line.
        what: name of the lines' contents, in errors.

    Raises:
        UserError: naming the file.
    """
    try:
        parsed = [
            parse(line, f"{path}:{number}") for number, (line, _) in enumerate(lines(path), start=1) if line.strip()
        ]
    except FileError as error:
        raise UserError(f"cannot read {what} from {error}") from None
    if not parsed:
        raise UserError(f"{path} holds no {what}, expected one JSON object a line")
    return parsed


def _parse_line(
    line: str, location: str, prompt_field: str, answer_field: str | None, *, text_answers: bool
) -> Example:
    fields = parse_fields(line, location, prompt_field)
    for name in (prompt_field, answer_field):
        if name is not None and name not in fields:
            raise UserError(f"{location}: no field {name!r}, only {listed(fields)}")
    prompt = fields[prompt_field]
    if not isinstance(prompt, str) or not prompt:
        raise UserError(f"{location}: field {prompt_field!r} is {json_text(prompt)}, expected a non-empty string")
    answer = "" if answer_field is None else fields[answer_field]
    if text_answers and (isinstance(answer, bool) or not isinstance(answer, str | int)):
        shown = json_text(answer)
        raise UserError(f"{location}: field {answer_field!r} is {shown}, expected a string or an integer to train on")
    return Example(prompt, answer, fields, location=location)


def parse_fields(line: str, location: str, prompt_field: str) -> dict[str, Any]:
    """The fields of a line that holds one JSON object.

    Raises:
        UserError: it does not. Names its location.
    """
    try:
        fields = parse_json(line, most_digits=MOST_DIGITS_OF_DATA, nan_is_null=True)
    except JsonError as error:
        raise UserError(f"{location}: not JSON ({error}), expected one object a line") from None
    if not isinstance(fields, dict):
        raise UserError(f"{location}: {json_kind(fields)}, expected an object with field {prompt_field!r}")
    return fields


def listed(fields: Mapping[str, object]) -> str:
    """The names of the fields of a line, for an error."""
    return shortened(", ".join(map(repr, fields)), 200) or "an empty object"
