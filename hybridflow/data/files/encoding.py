"""Rows of files as prompts with token ids, which are kept on disk."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import jinja2
import numpy as np
import tokenizers
import transformers

from engine3d.errors import UserError, shortened
from engine3d.input_files import json_text
from hybridflow.data.answers import AnswerCounts
from hybridflow.data.config import OverlongPolicy
from hybridflow.data.files.config import FilesConfig, FileSource
from hybridflow.data.files.conversations.chat import ChatTemplate
from hybridflow.data.files.conversations.cutting import Fit, cut_messages
from hybridflow.data.files.formats.opening import default_cache, files_of, write_once
from hybridflow.data.files.formats.rows import BATCH, Row, Rows, batches, has, needed, value_of
from hybridflow.data.files.prompts import HASHES, NUMBERS, SUMMARY, FilePrompts, OpenSource
from hybridflow.data.packed_prompts import ENDS, TOKENS
from hybridflow.data.prompts import text_hash
from hybridflow.data.remarks import RemarkCounts, of_prompt
from hybridflow.data.tokenizer import cut, encode_prompts_together, encode_text
from hybridflow.errors.log import log

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORM = 10
"""Version of the files in the cache. A change of their contents increases it."""
_LOG_INTERVAL_S = 10.0
_NAMES = (TOKENS, ENDS, NUMBERS, HASHES)


def encode_files(
    sources: Sequence[FileSource],
    config: FilesConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    policy: OverlongPolicy,
) -> FilePrompts:
    """The prompts of some sources, one source after the other.

    Their token ids go into a file of the cache, which the next run of the same data, tokenizer and settings maps.

    Args:
        sources: with their files.
        config: conversion of messages to prompts, and limits of lengths.
        tokenizer: of the model.
        max_tokens: of a prompt.
        policy: for longer prompts.

    Raises:
        UserError: naming file and row of what cannot serve.
    """
    template = ChatTemplate(config.chat, tokenizer)
    fit = Fit(config.min_prompt_tokens, config.max_prompt_tokens, max_tokens, policy)
    opened, kept = open_sources(sources, config, tokenizer, template, fit.key_values())
    for source in opened:
        check_columns(source.settings, source.rows)
    write_once(kept, lambda temporary: _write(temporary, opened, template, tokenizer, fit))
    return FilePrompts.read(kept, opened)


def open_sources(
    sources: Sequence[FileSource],
    config: FilesConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    key_values: Sequence[Any],
) -> tuple[list[OpenSource], Path]:
    """Open the rows of some sources. Also returns the directory of the cache for their result.

    Args:
        sources: with their files.
        config: conversion of messages to text.
        tokenizer: of the model.
        template: its chat template.
        key_values: further inputs of the result.

    Raises:
        UserError: naming the file or the setting.
    """
    if not tokenizer.is_fast:
        kind = type(tokenizer).__name__
        raise UserError(f"data.files: a {kind}, expected a tokenizer of the tokenizers library (tokenizer.json)")
    cache = config.cache or default_cache()
    files = [files_of(source, cache) for source in sources]
    if unread := next((source for source in sources if source.tools is not None and not template.reads_tools), None):
        raise UserError(
            f"{unread.label}: tools={unread.tools}, and the chat template does not read tools; expected null"
        )
    opened = [
        OpenSource.open(source, template, source_files, cache)
        for source, source_files in zip(sources, files, strict=True)
    ]
    everything = [
        *(_FORM, [[(file.reading, file.identity) for file in source_files] for source_files in files]),
        [_identity(source) for source in sources],
        *(config.chat.model_dump(mode="json", exclude={"template", "train_on"}), template.source, template.tool_source),
        list(key_values),
        *(_tokenizer_identity(tokenizer), tokenizers.__version__, transformers.__version__, jinja2.__version__),
    ]
    key = hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:32]
    return opened, cache / "tokens" / key


def _identity(source: FileSource) -> dict[str, Any]:
    return source.model_dump(mode="json", exclude={"path", "name", "weight", "format"})


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # Each call of a tokenizer sets these: they are those of the last call.
    state = {name: value for name, value in backend.items() if name not in ("truncation", "padding")}
    others = [tokenizer.special_tokens_map, getattr(tokenizer, "split_special_tokens", False)]
    return hashlib.sha256(json.dumps([state, *others], default=str).encode()).hexdigest()


def _write(
    directory: Path,
    sources: Sequence[OpenSource],
    template: ChatTemplate,
    tokenizer: PreTrainedTokenizerBase,
    fit: Fit,
) -> None:
    """Encode all rows into files of a new directory."""
    directory.mkdir()
    files = {name: (directory / name).open("wb") for name in _NAMES}
    try:
        writer = _Writer(files, template, tokenizer, fit)
        for source in sources:
            writer.write(source)
    finally:
        for file in files.values():
            file.close()
    (directory / SUMMARY).write_text(json.dumps(writer.summary()))


@dataclass
class _Prompt:
    """A row that is being encoded."""

    number: int
    row: Row
    text: str
    is_raw: bool
    tokens: list[int]


class _Writer:
    """Writes prompts to files.

    Args:
        files: by their names.
        template: of messages.
        tokenizer: of texts.
        fit: limits of lengths.
    """

    def __init__(
        self,
        files: Mapping[str, IO[bytes]],
        template: ChatTemplate,
        tokenizer: PreTrainedTokenizerBase,
        fit: Fit,
    ) -> None:
        self._files, self._template, self._tokenizer, self._fit = files, template, tokenizer, fit
        self._spans: list[tuple[int, int]] = []
        self._dropped: list[dict[str, int]] = []
        self._with_tools: list[int] = []
        self._remarks: list[RemarkCounts] = []
        self._columns: dict[str, None] = {}
        self._answers: list[AnswerCounts] = []
        self._overlong, self._raw = 0, 0
        self._prompts, self._tokens = 0, 0

    def summary(self) -> dict[str, Any]:
        """Contents of `SUMMARY`, for `FilePrompts.read`."""
        return {
            "spans": self._spans,
            "dropped": self._dropped,
            "with_tools": self._with_tools,
            "remarks": [counts.counts for counts in self._remarks],
            "overlong": self._overlong,
            "columns": list(self._columns),
            "answers": [asdict(counts) for counts in self._answers],
            "raw": self._raw,
        }

    def write(self, source: OpenSource) -> None:
        """Write all rows of a source. Raises UserError if none has the column of the answer."""
        self._answers.append(AnswerCounts(source.settings.answer))
        begin, dropped, ids = self._prompts, Counter[str](), array("Q")  # a list of ten million takes 400 MB
        rows, settings = source.rows, source.settings
        count = min(len(rows), settings.rows or len(rows))
        filter_, logged_at = RowFilter(source), time.monotonic()
        self._with_tools.append(0)
        self._remarks.append(RemarkCounts())
        for first, some in batches(rows, 0, count):
            taken = self._taken(source, first, some, filter_, dropped)
            if settings.id is not None:
                ids.extend(text_hash(source.row_id(prompt.number, prompt.row)) for prompt in taken)
            self._encode(source, taken)
            self._keep(source, taken, dropped)
            if time.monotonic() - logged_at > _LOG_INTERVAL_S:
                logged_at = time.monotonic()
                log.info(f"data: {first + len(some):,} of {count:,} rows of {settings.label} are read")
        filter_.check()
        answers = self._answers[-1]
        if settings.answer is not None and answers.first_missing is not None and answers.missing == answers.rows:
            needed(rows[answers.first_missing], settings.answer, rows.location(answers.first_missing))
        self._spans.append((begin, self._prompts))
        self._dropped.append(dict(dropped))
        _check_ids(source, ids)

    def _taken(
        self, source: OpenSource, first: int, some: Sequence[Row], filter_: RowFilter, dropped: Counter[str]
    ) -> list[_Prompt]:
        taken = []
        for number, row in enumerate(some, start=first):
            location = source.rows.location(number)
            if (failed := filter_.first_failed(row, location)) is not None:
                dropped[f"another {failed} (where)"] += 1
                continue
            source.check(row, location)
            self._columns |= dict.fromkeys(row)
            self._with_tools[-1] += source.has_tools(row, location)
            taken.append(_Prompt(number, row, source.text(row, location), source.is_raw(row), []))
        return taken

    def _encode(self, source: OpenSource, prompts: Sequence[_Prompt]) -> None:
        """Encode texts. Those of a template get no special tokens but the template's own."""
        for raw in (False, True):
            some = [prompt for prompt in prompts if prompt.is_raw is raw]
            if not some:
                continue
            texts = [prompt.text for prompt in some]
            try:
                if raw:
                    encoded = encode_prompts_together(self._tokenizer, texts)
                else:
                    encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
            except Exception:  # one of them fails: find it
                for prompt in some:
                    encode_text(self._tokenizer, prompt.text, source.rows.location(prompt.number))
                raise
            for prompt, tokens in zip(some, encoded, strict=True):
                prompt.tokens = list(tokens)
            self._raw += len(some) if raw else 0

    def _keep(self, source: OpenSource, prompts: Sequence[_Prompt], dropped: Counter[str]) -> None:
        kept = []
        for prompt in prompts:
            if (reason := self._fit.reason_to_drop(len(prompt.tokens))) is not None:
                dropped[reason] += 1
                self._overlong += reason == self._fit.overlong_reason
                continue
            if len(prompt.tokens) > self._fit.most:
                self._overlong += 1
                prompt.tokens = self._cut(source, prompt)
            if not prompt.tokens:
                raise UserError(
                    f"{source.rows.location(prompt.number)}: the prompt has no tokens, expected at least one"
                )
            self._answers[-1].add(prompt.number, source.answer(prompt.row))
            kept.append(prompt)
            of_tokens = of_prompt(self._tokenizer, prompt.tokens, is_text=prompt.is_raw)
            self._remarks[-1].add(prompt.number, itertools.chain(source.remarks(prompt.row), of_tokens))
        lengths = np.array([len(prompt.tokens) for prompt in kept], dtype=np.int64)
        ends = self._tokens + np.cumsum(lengths)
        self._files[TOKENS].write(
            np.array([token for prompt in kept for token in prompt.tokens], dtype=np.int32).tobytes()
        )
        self._files[ENDS].write(ends.tobytes())
        self._files[NUMBERS].write(np.array([prompt.number for prompt in kept], dtype=np.int64).tobytes())
        self._files[HASHES].write(np.array([text_hash(prompt.text) for prompt in kept], dtype=np.uint64).tobytes())
        self._prompts, self._tokens = self._prompts + len(kept), int(ends[-1]) if len(ends) else self._tokens

    def _cut(self, source: OpenSource, prompt: _Prompt) -> list[int]:
        location = source.rows.location(prompt.number)
        if self._fit.policy == "refuse":
            raise UserError(
                f"{location}: the prompt has {len(prompt.tokens):,} tokens, expected at most {self._fit.most:,}; or "
                "data.overlong_prompts=drop, cut_left, cut_right or cut_middle"
            )
        if prompt.is_raw:
            return cut(self._tokenizer, prompt.text, prompt.tokens, self._fit.most, self._fit.policy)
        messages = source.messages(prompt.row)
        tools = source.tools(prompt.row, location)
        return cut_messages(self._tokenizer, self._template, messages, prompt.tokens, self._fit, location, tools)


class RowFilter:
    """Filter of a source's rows by its conditions.

    Args:
        source: with its rows.
    """

    def __init__(self, source: OpenSource) -> None:
        self._source = source
        self._tested, self._present = dict[str, None](), set[str]()

    def first_failed(self, row: Row, location: str) -> str | None:
        """First column whose condition a row does not meet.

        Raises:
            UserError: it is a column of texts, and the condition is of others.
        """
        for column, condition in self._source.settings.where.items():
            self._tested[column] = None
            try:
                value = value_of(row, column)
            except KeyError:
                return column
            self._present.add(column)
            if isinstance(value, str) and self._source.rows.in_columns and not condition.is_of_texts:
                raise UserError(
                    f"{location}: column {column!r} is of texts, such as {json_text(value, 40)}, and where compares "
                    "it with other values; expected one_of or none_of with texts, in quotes"
                )
            if not condition.holds(value):
                return column
        return None

    def check(self) -> None:
        """Raises UserError if no row had a column that has a condition."""
        if missing := next((column for column in self._tested if column not in self._present), None):
            raise _missing(missing, self._source.rows)


def _check_ids(source: OpenSource, ids: array[int]) -> None:
    """Raises UserError if two rows have the same name."""
    if len(ids) and len(np.unique(np.frombuffer(ids, dtype=np.uint64))) < len(ids):
        raise UserError(
            f"{source.settings.path[0]}: column {source.settings.id!r} has a value twice, expected one that names a "
            "row; or id=null, and rows are named by their numbers"
        )


def check_columns(source: FileSource, rows: Rows) -> None:
    """Check by the first row that the columns that a source names exist. Prompt, id and answer are exempt if the source
    has conditions.

    Raises:
        UserError: names the first that is missing.
    """
    location, row = rows.location(0), rows[0]
    for name in (source.prompt, source.answer, source.id, source.tools, *source.where):
        column = name if name is None or name in rows.columns else name.partition(".")[0]
        if column in rows.left_out:
            raise UserError(f"{location}: column {column!r} has bytes that are no text in UTF-8, expected text")
    for name in source.where if rows.in_columns else ():  # lines of JSON may have others later
        if name not in rows.columns and name.partition(".")[0] not in rows.columns:
            raise _missing(name, rows)
    if source.tools is not None and not any(
        has(candidate, source.tools) for candidate in rows.read(0, min(len(rows), BATCH))
    ):
        needed(row, source.tools, location)
    if source.where:
        return
    for column in (source.prompt, source.id):
        if column is not None:
            needed(row, column, location)
    answer = source.answer  # some rows may lack it
    if answer is not None and not {answer, answer.partition(".")[0]} & set(rows.columns):
        needed(row, answer, location)


def _missing(column: str, rows: Rows) -> UserError:
    there = shortened(", ".join(map(repr, rows.columns)), 200)
    return UserError(f"{rows.location(0)}: where has column {column!r}, and there are only {there}")
