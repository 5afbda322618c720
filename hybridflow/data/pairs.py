"""Prompts with better and worse responses: of the arithmetic task, and from files of rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from engine3d.errors import UserError
from engine3d.input_files import json_text
from hybridflow.data.config import DataConfig, PairsConfig
from hybridflow.data.files.config import FileSource
from hybridflow.data.files.conversations.messages import Tools, from_text, read_messages, read_tools
from hybridflow.data.files.formats.opening import default_cache, files_of, open_rows
from hybridflow.data.files.formats.rows import Row, batches, has, value_of, without_nulls
from hybridflow.data.remarks import TOOLS
from hybridflow.data.tasks import Example, arithmetic_held_out, arithmetic_splits, listed, with_error

Text = str | list[int] | list[dict[str, Any]]
"""A text, its token ids, or messages."""


@dataclass(frozen=True)
class Pair:
    """A prompt with a better and a worse response, or only one of the two.

    Args:
        prompt: not empty.
        chosen, rejected: the responses; at least one is there.
        location: file and row, for errors.
        tools: that the assistant may call; None where they are those of the recipe.
        unread_tools: True if it has a column of tools that the recipe does not name.
    """

    prompt: Text
    chosen: Text | None
    rejected: Text | None
    location: str
    tools: Tools | None = None
    unread_tools: bool = False


def load_pairs(config: DataConfig, *, unpaired: bool) -> list[Pair]:
    """Load the pairs to train on, by `config`.

    Args:
        config: with files of pairs, or the arithmetic task: right against wrong answers.
        unpaired: true if one response to each prompt is enough.

    Raises:
        UserError: naming file and line of what cannot serve.
    """
    if (pairs := config.pairs) is not None:
        return read_pairs(pairs.train_path, pairs, unpaired=unpaired)
    return arithmetic_pairs(arithmetic_splits(config.arithmetic).train, f"{config.arithmetic.seed}:train pairs")


def load_held_out_pairs(config: DataConfig, *, unpaired: bool) -> list[Pair]:
    """Load the pairs that `config` holds out. Arguments and errors as of `load_pairs`."""
    if (pairs := config.pairs) is not None:
        return read_pairs(pairs.eval_path, pairs, unpaired=unpaired)
    return arithmetic_pairs(arithmetic_held_out(config.arithmetic), f"{config.arithmetic.seed}:held-out pairs")


def load_better_responses(config: PairsConfig) -> list[Example]:
    """Load the supervised examples of files of pairs: prompts and their better responses, both texts.

    Raises:
        UserError: naming file and line of what cannot serve.
    """
    if config.sft_path is None:
        return []
    return [_example(pair, config) for pair in read_pairs(config.sft_path, config, unpaired=True)]


def _example(pair: Pair, config: PairsConfig) -> Example:
    for name, text in ((config.prompt_field, pair.prompt), (config.chosen_field, pair.chosen)):
        if not isinstance(text, str):
            there = "is not there" if text is None else "has messages" if is_messages(text) else "has token ids"
            raise UserError(f"{pair.location}: field {name!r} {there}, expected the text of a supervised example")
    return Example(str(pair.prompt), str(pair.chosen))


def arithmetic_pairs(problems: Iterable[Example], seed: str) -> list[Pair]:
    """The right answer of each problem against one that is off by one or by ten."""
    generator = random.Random(seed)
    return [
        Pair(problem.prompt, problem.answer, with_error(problem, generator).answer, f"problem {number}")
        for number, problem in enumerate(problems)
    ]


def read_pairs(path: Path, config: PairsConfig, *, unpaired: bool) -> list[Pair]:
    """Pairs from a file of rows, in order.

    Raises:
        UserError: naming the file and the row.
    """
    cache = default_cache()
    try:
        rows = open_rows(files_of(FileSource(path=(str(path),)), cache), cache)
    except UserError as error:
        raise UserError(f"cannot read pairs from {str(error).removeprefix('cannot read rows from ')}") from None

    def fields(row: Row) -> Row:
        return {name: without_nulls(value) for name, value in row.items()} if rows.in_columns else row

    return [
        _pair(fields(row), rows.location(number), config, unpaired=unpaired)
        for first, some in batches(rows, 0, len(rows))
        for number, row in enumerate(some, start=first)
    ]


def _pair(fields: Mapping[str, Any], location: str, config: PairsConfig, *, unpaired: bool) -> Pair:
    both = [config.chosen_field, config.rejected_field]
    if unpaired:  # where there is none, a column of Parquet has null, and one of CSV an empty text
        fields = {name: value for name, value in fields.items() if value not in (None, "") or name not in both}
    needed = [*([config.prompt_field] if config.prompt_field is not None else []), *([] if unpaired else both)]
    for name in needed:
        if name not in fields:
            raise UserError(f"{location}: no field {name!r}, only {listed(fields)}")
    if not any(name in fields for name in both):
        raise UserError(f"{location}: no field {both[0]!r} or {both[1]!r}, only {listed(fields)}")
    chosen, rejected = (_text(fields[name], location, name) if name in fields else None for name in both)
    if config.prompt_field is not None:
        prompt = _text(fields[config.prompt_field], location, config.prompt_field)
    else:
        prompt = _common_beginning(chosen, rejected, location, both)
    if isinstance(prompt, str) and (is_messages(chosen) or is_messages(rejected)):
        prompt = _messages_before(prompt, chosen, rejected, location, config)
    if is_messages(prompt):
        chosen, rejected = (_after(prompt, response) for response in (chosen, rejected))
    if config.tools_field is None:
        return Pair(prompt, chosen, rejected, location, unread_tools=is_messages(prompt) and bool(fields.get(TOOLS)))
    tools = read_tools(value_of(fields, config.tools_field) if has(fields, config.tools_field) else None, location)
    if tools and not is_messages(prompt):
        raise UserError(
            f"{location}: field {config.tools_field!r} has tools, and the prompt is no messages; expected them"
        )
    return Pair(prompt, chosen, rejected, location, tools)


def _messages_before(text: str, chosen: Text | None, rejected: Text | None, location: str, config: PairsConfig) -> Text:
    """Messages before both responses. One of the user's is the prompt's text."""
    there = [response for response in (chosen, rejected) if response is not None]
    if all(is_messages(response) and len(response) == 1 and response[0]["role"] == "assistant" for response in there):
        return [{"role": "user", "content": text}]
    common = _common_beginning(chosen, rejected, location, [config.chosen_field, config.rejected_field])
    if is_messages(common) and any(
        message["role"] == "user" and message["content"] is not None and message["content"].strip() == text.strip()
        for message in common
    ):
        return common
    raise UserError(
        f"{location}: field {config.prompt_field!r} is a text that is no message of the user before both responses; "
        "expected its messages, or prompt_field=null"
    )


def is_messages(text: Text | None) -> TypeGuard[list[dict[str, Any]]]:
    """True if a text is a list of messages."""
    return isinstance(text, list) and isinstance(text[0], dict)


def _common_beginning(chosen: Text | None, rejected: Text | None, location: str, names: Sequence[str]) -> Text:
    there = [response for response in (chosen, rejected) if response is not None]
    conversations = [response for response in there if is_messages(response)]
    if len(conversations) < len(there):
        raise UserError(
            f"{location}: prompt_field is null, expected lists of messages in {' and '.join(map(repr, names))}"
        )
    if len(conversations) == 1:
        common = conversations[0][:-1]
    else:
        same = itertools.takewhile(lambda both: both[0] == both[1], zip(*conversations, strict=False))
        common = [message for message, _ in same]
        if len(common) == min(map(len, conversations)):
            common = common[:-1]
    if not common:
        raise UserError(f"{location}: both responses begin otherwise, expected messages of the prompt that they share")
    return common


def _after(prompt: list[dict[str, Any]], response: Text | None) -> Text | None:
    """A response without the messages of its prompt."""
    if is_messages(response) and len(response) > len(prompt) and response[: len(prompt)] == prompt:
        return response[len(prompt) :]
    return response


def _text(value: Any, location: str, name: str) -> Text:
    value = from_text(value, f"{location}: field {name!r}")
    if isinstance(value, str) and value:
        return value
    ids = isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
    messages = isinstance(value, list) and all(isinstance(message, dict) for message in value)
    if value and messages:
        return read_messages(value, f"{location}: field {name!r}")
    if value and ids:
        return value  # type: ignore[no-any-return]
    raise UserError(
        f"{location}: field {name!r} is {json_text(value)}, expected a non-empty string, a list of token ids, or a "
        "list of messages"
    )
