"""Rows of files as supervised examples: prompts with answers, and conversations with messages to train on."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine3d.errors import UserError
from engine3d.input_files import MOST_LIST_BYTES, json_text, read_json_object
from hybridflow.data.config import OverlongPolicy
from hybridflow.data.files.config import FilesConfig, FileSource, TrainedOn
from hybridflow.data.files.conversations.chat import ChatTemplate, Rendered
from hybridflow.data.files.conversations.messages import Tools, ends_with_assistant, from_text, read_messages
from hybridflow.data.files.encoding import RowFilter, check_columns, open_sources
from hybridflow.data.files.formats.opening import write_once
from hybridflow.data.files.formats.rows import Row, batches, needed
from hybridflow.data.files.prompts import HASHES, SUMMARY, OpenSource, SourceSpan
from hybridflow.data.packed_prompts import ENDS, TOKENS, PackedPrompts, mapped
from hybridflow.data.prompts import Prompts, text_hash
from hybridflow.data.remarks import RemarkCounts, of_prompt, of_response
from hybridflow.data.tasks import Example
from hybridflow.data.tokenizer import encode_continuation, encode_prompt, encode_text, ended

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STARTS, _TRAINED_ON = "starts.bin", "trained_on.bin"
_NAMES = (TOKENS, ENDS, _STARTS, _TRAINED_ON, HASHES)


@dataclass(frozen=True)
class Conversation:
    """A supervised example as tokens.

    Args:
        tokens: of all of it.
        start: number of tokens of the prompt, which are not trained on.
        trained_on: for each token after the prompt, true if it is trained on.
        prompt: the text before the first token to train on.
    """

    tokens: list[int]
    start: int
    trained_on: list[bool]
    prompt: str


@dataclass(frozen=True)
class SupervisedPrompts(Prompts):
    """Supervised examples from files: `tokens` are of the prompts alone.

    Args:
        packed: prompts and what follows them.
        spans: the range of each source.
        hashes: (P,) uint64, of the texts of the prompts.
    """

    packed: PackedPrompts | None = None
    spans: tuple[SourceSpan, ...] = ()
    hashes: np.ndarray[Any, Any] | None = None

    def text_hashes(self) -> np.ndarray[Any, Any]:
        assert self.hashes is not None
        return self.hashes

    def fields(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class SupervisedFiles:
    """Supervised examples of a warm-up.

    Args:
        prompts: of the examples.
        answers: what follows each prompt, as token ids.
        masks: for each token of an answer, true if it is trained on.
    """

    prompts: SupervisedPrompts
    answers: Sequence[list[int]]
    masks: Sequence[list[bool]]


def encode_supervised(
    sources: Sequence[FileSource],
    config: FilesConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    policy: OverlongPolicy,
) -> SupervisedFiles:
    """The supervised examples of some sources.

    A row is a conversation where its prompt is a list of messages that ends with one of the assistant, else a prompt
    with its answer. Its text is split at the ends of the spans to train on, and each section is encoded by itself, as
    an engine reads a prompt before it writes. Every message is trained on up to its end-of-sequence token.

    Args:
        sources: with their files.
        config: conversion of messages to text.
        tokenizer: of the model.
        max_tokens: of an example.
        policy: for longer ones: "refuse" them. All other policies drop them, since the model would be trained on an
            incomplete answer.

    Raises:
        UserError: naming file and row of what cannot serve.
    """
    template = ChatTemplate(config.chat, tokenizer)
    key_values = ["supervised", max_tokens, policy == "refuse", config.chat.train_on]
    opened, kept = open_sources(sources, config, tokenizer, template, key_values)
    for source in opened:
        check_columns(source.settings.model_copy(update={"answer": None}), source.rows)
    limit = _Limit(max_tokens, refuse=policy == "refuse")
    write_once(kept, lambda temporary: _write(temporary, opened, template, tokenizer, limit))
    summary = read_json_object(kept / SUMMARY, MOST_LIST_BYTES)
    spans = SourceSpan.of(opened, summary)
    packed, starts = PackedPrompts.mapped(kept), mapped(kept / _STARTS, np.int64)
    prompts, answers = _Segments(packed, starts, after=False), _Segments(packed, starts, after=True)
    examples = _Texts(prompts, answers, tokenizer)
    return SupervisedFiles(
        SupervisedPrompts(examples, prompts, summary["overlong"], packed, spans, mapped(kept / HASHES, np.uint64)),
        answers,
        _Masks(packed, starts, mapped(kept / _TRAINED_ON, np.uint8)),
    )


class Encoder:
    """Encoder of rows.

    Args:
        template: of messages.
        tokenizer: of texts.
    """

    def __init__(self, template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> None:
        self._template, self._tokenizer = template, tokenizer

    def encode(self, source: OpenSource, row: Row, location: str) -> Conversation:
        """The tokens of a row. Raises UserError where it is no example."""
        prompt = source.prompt(row, location)
        if ends_with_assistant(prompt):
            return self.conversation(prompt, location, tools=source.tools(row, location))
        source.check(row, location)
        if source.settings.answer is None:
            raise UserError(f"{location}: the prompt ends without an answer, and answer is null; expected one of both")
        answer = needed(row, source.settings.answer, location)
        if ends_with_assistant(answer := from_text(answer, location)) and not source.is_raw(row):
            given = [message | {"weight": 0} for message in read_messages(source.messages(row), location)]
            return self.conversation([*given, *answer], location, train_on="all", tools=source.tools(row, location))
        answer = str(answer) if isinstance(answer, int) and not isinstance(answer, bool) else answer
        if not isinstance(answer, str):
            raise UserError(
                f"{location}: column {source.settings.answer!r} is {json_text(answer)}, expected a text or a "
                "whole number to train on"
            )
        if source.is_raw(row):
            tokens = encode_prompt(self._tokenizer, prompt, f"{location}: the prompt")
            trained_on = ended(self._tokenizer, encode_continuation(self._tokenizer, answer, location))
            if not tokens:
                raise UserError(f"{location}: the prompt has no tokens, expected at least one")
            return Conversation([*tokens, *trained_on], len(tokens), [True] * len(trained_on), prompt)
        messages = [*source.messages(row), {"role": "assistant", "content": answer}]
        return self.conversation(messages, location, train_on="last", tools=source.tools(row, location))

    def conversation(
        self, messages: Any, location: str, train_on: TrainedOn | None = None, tools: Tools | None = None
    ) -> Conversation:
        """The tokens of messages. Arguments and errors as of `ChatTemplate.conversation`."""
        return self._rendered(self._template.conversation(messages, location, train_on, tools), location)

    def remarks(self, conversation: Conversation) -> Iterator[str]:
        """The kinds of remarks on a row's tokens."""
        yield from of_prompt(self._tokenizer, conversation.tokens, is_text=False)
        yield from of_response(self._tokenizer, conversation.tokens[conversation.start :], conversation.trained_on)

    def _rendered(self, rendered: Rendered, location: str) -> Conversation:
        tokens: list[int] = []
        trained_on: list[bool] = []
        before = 0
        for begin, end in rendered.trained_on:
            given = self._encode(rendered.text, before, begin, location)
            written = self._encode(rendered.text, begin, end, location)
            if self._tokenizer.eos_token_id not in written:
                raise UserError(
                    f"{location}: the chat template ends a message of the assistant without the tokenizer's "
                    f"end-of-sequence token {self._tokenizer.eos_token!r}, so that the model would not learn to end"
                )
            last = written.index(self._tokenizer.eos_token_id) + 1
            tokens += [*given, *written]
            trained_on += [*[False] * len(given), *[True] * last, *[False] * (len(written) - last)]
            before = end
        end_of_last = len(trained_on) - trained_on[::-1].index(True)
        start = trained_on.index(True)
        prompt = rendered.text[: rendered.trained_on[0][0]]
        return Conversation(tokens[:end_of_last], start, trained_on[start:end_of_last], prompt)

    def _encode(self, text: str, begin: int, end: int, location: str) -> list[int]:
        encode = encode_continuation if begin else encode_text
        return encode(self._tokenizer, text[begin:end], location)


@dataclass(frozen=True)
class _Limit:
    most: int
    refuse: bool


def _write(
    directory: Path,
    sources: Sequence[OpenSource],
    template: ChatTemplate,
    tokenizer: PreTrainedTokenizerBase,
    limit: _Limit,
) -> None:
    directory.mkdir()
    files = {name: (directory / name).open("wb") for name in _NAMES}
    encoder, spans, dropped_of, tokens, count, overlong = Encoder(template, tokenizer), [], [], 0, 0, 0
    with_tools: list[int] = []
    remarks: list[RemarkCounts] = []
    try:
        for source in sources:
            begin, dropped, filter_ = count, Counter[str](), RowFilter(source)
            with_tools.append(0)
            remarks.append(RemarkCounts())
            rows = min(len(source.rows), source.settings.rows or len(source.rows))
            for first, some in batches(source.rows, 0, rows):
                for number, row in enumerate(some, start=first):
                    location = source.rows.location(number)
                    if (failed := filter_.first_failed(row, location)) is not None:
                        dropped[f"another {failed} (where)"] += 1
                        continue
                    conversation = encoder.encode(source, row, location)
                    if len(conversation.tokens) > limit.most:
                        overlong += 1
                        _drop_overlong(len(conversation.tokens), limit, location, dropped)
                        continue
                    with_tools[-1] += source.has_tools(row, location)
                    remarks[-1].add(number, itertools.chain(source.remarks(row), encoder.remarks(conversation)))
                    tokens, count = tokens + len(conversation.tokens), count + 1
                    files[TOKENS].write(np.array(conversation.tokens, dtype=np.int32).tobytes())
                    files[ENDS].write(np.int64(tokens).tobytes())
                    files[_STARTS].write(np.int64(conversation.start).tobytes())
                    written = [*[False] * conversation.start, *conversation.trained_on]
                    files[_TRAINED_ON].write(np.array(written, dtype=np.uint8).tobytes())
                    files[HASHES].write(np.uint64(text_hash(conversation.prompt)).tobytes())
            filter_.check()
            spans.append((begin, count))
            dropped_of.append(dict(dropped))
    finally:
        for file in files.values():
            file.close()
    summary = {"spans": spans, "dropped": dropped_of, "with_tools": with_tools, "overlong": overlong}
    summary["remarks"] = [counts.counts for counts in remarks]
    (directory / SUMMARY).write_text(json.dumps(summary))


def _drop_overlong(tokens: int, limit: _Limit, location: str, dropped: Counter[str]) -> None:
    if limit.refuse:
        raise UserError(
            f"{location}: the supervised example has {tokens:,} tokens, expected at most {limit.most:,}; or "
            "data.overlong_prompts=drop"
        )
    dropped[f"more than {limit.most:,} tokens"] += 1


class _Segments(Sequence[list[int]]):
    """The prompts of examples, or what follows them."""

    def __init__(self, packed: PackedPrompts, starts: np.ndarray[Any, Any], *, after: bool) -> None:
        self._packed, self._starts, self._after = packed, starts, after

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: int) -> list[int]:  # type: ignore[override]
        tokens, start = self._packed[index], int(self._starts[index])
        return tokens[start:] if self._after else tokens[:start]


class _Masks(Sequence[list[bool]]):
    """Masks of the tokens after the prompt that are trained on."""

    def __init__(self, packed: PackedPrompts, starts: np.ndarray[Any, Any], trained_on: np.ndarray[Any, Any]) -> None:
        self._of, self._starts = PackedPrompts(trained_on, packed.ends), starts

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, index: int) -> list[bool]:  # type: ignore[override]
        return [bool(flag) for flag in self._of[index][int(self._starts[index]) :]]


class _Texts(Sequence[Example]):
    """Examples as the texts of their tokens."""

    def __init__(
        self, prompts: Sequence[list[int]], answers: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._prompts, self._answers, self._tokenizer = prompts, answers, tokenizer

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        prompt, answer = self._prompts[index], self._answers[index]
        return Example(str(self._tokenizer.decode(prompt)), str(self._tokenizer.decode(answer)))
