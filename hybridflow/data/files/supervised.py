"""Rows of files as supervised examples: prompts with answers, and conversations of which some messages are learned."""

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
from hybridflow.data.files.chat import ChatTemplate, Rendered
from hybridflow.data.files.config import FilesConfig, FileSource, Learned
from hybridflow.data.files.encoding import RowFilter, check_columns, open_sources
from hybridflow.data.files.messages import Tools, ends_with_assistant, from_text, read_messages
from hybridflow.data.files.opening import write_once
from hybridflow.data.files.prompts import FACTS, HASHES, OpenSource, SourceSpan
from hybridflow.data.files.rows import Row, batches, needed
from hybridflow.data.packed_prompts import ENDS, TOKENS, PackedPrompts, mapped
from hybridflow.data.prompts import Prompts, text_hash
from hybridflow.data.remarks import RemarkCounts, of_prompt, of_response
from hybridflow.data.tasks import Example
from hybridflow.data.tokenizer import encode_prompt, encode_text, ended

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STARTS, _LEARNED = "starts.bin", "learned.bin"
_NAMES = (TOKENS, ENDS, _STARTS, _LEARNED, HASHES)


@dataclass(frozen=True)
class Conversation:
    """A supervised example as tokens.

    Args:
        tokens: of all of it.
        start: how many of them are the prompt, of which nothing is learned.
        learned: of each token after the prompt, whether it is learned.
        prompt: the text before what is learned first.
    """

    tokens: list[int]
    start: int
    learned: list[bool]
    prompt: str


@dataclass(frozen=True)
class SupervisedPrompts(Prompts):
    """Supervised examples from files: `tokens` are of the prompts alone.

    Args:
        whole: prompts and what follows them.
        spans: which are of which source.
        hashes: (P,) uint64, of the texts of the prompts.
    """

    whole: PackedPrompts | None = None
    spans: tuple[SourceSpan, ...] = ()
    hashes: np.ndarray[Any, Any] | None = None

    def text_hashes(self) -> np.ndarray[Any, Any]:
        assert self.hashes is not None
        return self.hashes

    def fields(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class SupervisedFiles:
    """What a warm-up learns from.

    Args:
        prompts: of the examples.
        answers: what follows each prompt, as token ids.
        masks: of each token of an answer, whether it is learned.
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
    with its answer. Its parts are encoded by themselves where what is learned begins and ends, as an engine reads a
    prompt before it writes; the end-of-sequence token is learned with every message, and nothing after it.

    Args:
        sources: with their files.
        config: how messages become text.
        tokenizer: of the model.
        max_tokens: of an example.
        policy: for those that have more: "refuse" them; all others drop them, since an answer that lacks a part would
            be learned as it is.

    Raises:
        UserError: naming file and row of what cannot serve.
    """
    template = ChatTemplate(config.chat, tokenizer)
    facts = ["supervised", max_tokens, policy == "refuse", config.chat.learn]
    opened, kept = open_sources(sources, config, tokenizer, template, facts)
    for each in opened:
        check_columns(each.settings.model_copy(update={"answer": None}), each.rows)
    limit = _Limit(max_tokens, refuse=policy == "refuse")
    write_once(kept, lambda part: _write(part, opened, template, tokenizer, limit))
    found = read_json_object(kept / FACTS, MOST_LIST_BYTES)
    spans = SourceSpan.of(opened, found)
    whole, starts = PackedPrompts.mapped(kept), mapped(kept / _STARTS, np.int64)
    prompts, answers = _Part(whole, starts, after=False), _Part(whole, starts, after=True)
    examples = _Texts(prompts, answers, tokenizer)
    return SupervisedFiles(
        SupervisedPrompts(examples, prompts, found["overlong"], whole, spans, mapped(kept / HASHES, np.uint64)),
        answers,
        _Masks(whole, starts, mapped(kept / _LEARNED, np.uint8)),
    )


class Encoder:
    """Makes tokens of rows.

    Args:
        template: of messages.
        tokenizer: of texts.
    """

    def __init__(self, template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> None:
        self._template, self._tokenizer = template, tokenizer

    def encode(self, source: OpenSource, row: Row, place: str) -> Conversation:
        """The tokens of a row. Raises UserError where it is no example."""
        prompt = source.prompt(row, place)
        if ends_with_assistant(prompt):
            return self.conversation(prompt, place, tools=source.tools(row, place))
        source.check(row, place)
        if source.settings.answer is None:
            raise UserError(f"{place}: the prompt ends without an answer, and answer is null; expected one of both")
        answer = needed(row, source.settings.answer, place)
        if ends_with_assistant(answer := from_text(answer, place)) and not source.is_raw(row):
            given = [each | {"weight": 0} for each in read_messages(source.messages(row), place)]
            return self.conversation([*given, *answer], place, learn="all", tools=source.tools(row, place))
        answer = str(answer) if isinstance(answer, int) and not isinstance(answer, bool) else answer
        if not isinstance(answer, str):
            raise UserError(
                f"{place}: column {source.settings.answer!r} is {json_text(answer)}, expected a text or a "
                "whole number to learn"
            )
        if source.is_raw(row):
            tokens = encode_prompt(self._tokenizer, prompt, f"{place}: the prompt")
            learned = ended(self._tokenizer, self._text(answer, place))
            if not tokens:
                raise UserError(f"{place}: the prompt has no tokens, expected at least one")
            return Conversation([*tokens, *learned], len(tokens), [True] * len(learned), prompt)
        messages = [*source.messages(row), {"role": "assistant", "content": answer}]
        return self.conversation(messages, place, learn="last", tools=source.tools(row, place))

    def conversation(
        self, messages: Any, place: str, learn: Learned | None = None, tools: Tools | None = None
    ) -> Conversation:
        """The tokens of messages. Arguments and errors as of `ChatTemplate.conversation`."""
        return self._rendered(self._template.conversation(messages, place, learn, tools), place)

    def remarks(self, found: Conversation) -> Iterator[str]:
        """The kinds of remarks on a row's tokens."""
        yield from of_prompt(self._tokenizer, found.tokens, is_text=False)
        yield from of_response(self._tokenizer, found.tokens[found.start :], found.learned)

    def _rendered(self, rendered: Rendered, place: str) -> Conversation:
        tokens: list[int] = []
        learned: list[bool] = []
        before = 0
        for begin, end in rendered.learned:
            given = self._text(rendered.text[before:begin], place)
            written = self._text(rendered.text[begin:end], place)
            if self._tokenizer.eos_token_id not in written:
                raise UserError(
                    f"{place}: the chat template ends a message of the assistant without the tokenizer's "
                    f"end-of-sequence token {self._tokenizer.eos_token!r}, so that the model would not learn to end"
                )
            last = written.index(self._tokenizer.eos_token_id) + 1
            tokens += [*given, *written]
            learned += [*[False] * len(given), *[True] * last, *[False] * (len(written) - last)]
            before = end
        end_of_last = len(learned) - learned[::-1].index(True)
        start = learned.index(True)
        prompt = rendered.text[: rendered.learned[0][0]]
        return Conversation(tokens[:end_of_last], start, learned[start:end_of_last], prompt)

    def _text(self, text: str, place: str) -> list[int]:
        return encode_text(self._tokenizer, text, place)


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
                    place = source.rows.place(number)
                    if (failed := filter_.first_failed(row, place)) is not None:
                        dropped[f"another {failed} (where)"] += 1
                        continue
                    found = encoder.encode(source, row, place)
                    if len(found.tokens) > limit.most:
                        overlong += 1
                        _drop_overlong(len(found.tokens), limit, place, dropped)
                        continue
                    with_tools[-1] += source.has_tools(row, place)
                    remarks[-1].add(number, itertools.chain(source.remarks(row), encoder.remarks(found)))
                    tokens, count = tokens + len(found.tokens), count + 1
                    files[TOKENS].write(np.array(found.tokens, dtype=np.int32).tobytes())
                    files[ENDS].write(np.int64(tokens).tobytes())
                    files[_STARTS].write(np.int64(found.start).tobytes())
                    written = [*[False] * found.start, *found.learned]
                    files[_LEARNED].write(np.array(written, dtype=np.uint8).tobytes())
                    files[HASHES].write(np.uint64(text_hash(found.prompt)).tobytes())
            filter_.check()
            spans.append((begin, count))
            dropped_of.append(dict(dropped))
    finally:
        for file in files.values():
            file.close()
    facts = {"spans": spans, "dropped": dropped_of, "with_tools": with_tools, "overlong": overlong}
    facts["remarks"] = [each.counts for each in remarks]
    (directory / FACTS).write_text(json.dumps(facts))


def _drop_overlong(tokens: int, limit: _Limit, place: str, dropped: Counter[str]) -> None:
    if limit.refuse:
        raise UserError(
            f"{place}: the supervised example has {tokens:,} tokens, expected at most {limit.most:,}; or "
            "data.overlong_prompts=drop"
        )
    dropped[f"more than {limit.most:,} tokens"] += 1


class _Part(Sequence[list[int]]):
    """The prompts of examples, or what follows them."""

    def __init__(self, whole: PackedPrompts, starts: np.ndarray[Any, Any], *, after: bool) -> None:
        self._whole, self._starts, self._after = whole, starts, after

    def __len__(self) -> int:
        return len(self._whole)

    def __getitem__(self, index: int) -> list[int]:  # type: ignore[override]
        tokens, start = self._whole[index], int(self._starts[index])
        return tokens[start:] if self._after else tokens[:start]


class _Masks(Sequence[list[bool]]):
    """Which tokens after the prompt are learned."""

    def __init__(self, whole: PackedPrompts, starts: np.ndarray[Any, Any], learned: np.ndarray[Any, Any]) -> None:
        self._of, self._starts = PackedPrompts(learned, whole.ends), starts

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, index: int) -> list[bool]:  # type: ignore[override]
        return [bool(each) for each in self._of[index][int(self._starts[index]) :]]


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
