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
from hybridflow.data.files.chat import ChatTemplate
from hybridflow.data.files.config import FilesConfig, FileSource
from hybridflow.data.files.cutting import Fit, cut_messages
from hybridflow.data.files.opening import default_cache, files_of, write_once
from hybridflow.data.files.prompts import FACTS, HASHES, NUMBERS, FilePrompts, OpenSource
from hybridflow.data.files.rows import BATCH, Row, Rows, batches, has, needed, value_of
from hybridflow.data.packed_prompts import ENDS, TOKENS
from hybridflow.data.prompts import text_hash
from hybridflow.data.remarks import RemarkCounts, of_prompt
from hybridflow.data.tokenizer import cut, encode_prompts_together, encode_text
from hybridflow.errors.log import log

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORM = 6
"""Of the files in the cache; a change of what is written there is another number."""
_SAY_EVERY_S = 10.0
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
        config: how messages become prompts, and which lengths are let through.
        tokenizer: of the model.
        max_tokens: of a prompt.
        policy: for prompts that have more.

    Raises:
        UserError: naming file and row of what cannot serve.
    """
    template = ChatTemplate(config.chat, tokenizer)
    fit = Fit(config.min_prompt_tokens, config.max_prompt_tokens, max_tokens, policy)
    opened, kept = open_sources(sources, config, tokenizer, template, fit.facts())
    for each in opened:
        check_columns(each.settings, each.rows)
    write_once(kept, lambda part: _write(part, opened, template, tokenizer, fit))
    return FilePrompts.read(kept, opened)


def open_sources(
    sources: Sequence[FileSource],
    config: FilesConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    facts: Sequence[Any],
) -> tuple[list[OpenSource], Path]:
    """The rows of some sources, and the directory of the cache for what is made of them.

    Args:
        sources: with their files.
        config: how messages become text.
        tokenizer: of the model.
        template: its chat template.
        facts: what else decides what is made.

    Raises:
        UserError: naming what cannot be read.
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
    opened = [OpenSource.open(source, template, each, cache) for source, each in zip(sources, files, strict=True)]
    everything = [
        *(_FORM, [[(file.reading, file.identity) for file in each] for each in files]),
        [_identity(source) for source in sources],
        *(config.chat.model_dump(mode="json", exclude={"template", "learn"}), template.source, list(facts)),
        *(_tokenizer_identity(tokenizer), tokenizers.__version__, transformers.__version__, jinja2.__version__),
    ]
    key = hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:32]
    return opened, cache / "tokens" / key


def _identity(source: FileSource) -> dict[str, Any]:
    return source.model_dump(mode="json", exclude={"path", "name", "weight", "format"})


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # Each call of a tokenizer sets these; they are what the last call needed.
    facts = {name: value for name, value in backend.items() if name not in ("truncation", "padding")}
    others = [tokenizer.special_tokens_map, getattr(tokenizer, "split_special_tokens", False)]
    return hashlib.sha256(json.dumps([facts, *others], default=str).encode()).hexdigest()


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
    (directory / FACTS).write_text(json.dumps(writer.facts()))


@dataclass
class _Prompt:
    """A row on its way to its tokens."""

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
        fit: which lengths there may be.
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

    def facts(self) -> dict[str, Any]:
        """What `FilePrompts.read` needs beside the files."""
        return {
            "spans": self._spans,
            "dropped": self._dropped,
            "with_tools": self._with_tools,
            "remarks": [each.counts for each in self._remarks],
            "overlong": self._overlong,
            "columns": list(self._columns),
            "answers": [asdict(each) for each in self._answers],
            "raw": self._raw,
        }

    def write(self, source: OpenSource) -> None:
        """All rows of a source. Raises UserError where none has the column of the answer."""
        self._answers.append(AnswerCounts(source.settings.answer))
        begin, dropped, ids = self._prompts, Counter[str](), array("Q")  # a list of ten million takes 400 MB
        rows, settings = source.rows, source.settings
        count = min(len(rows), settings.rows or len(rows))
        filter_, said = RowFilter(source), time.monotonic()
        self._with_tools.append(0)
        self._remarks.append(RemarkCounts())
        for first, some in batches(rows, 0, count):
            taken = self._taken(source, first, some, filter_, dropped)
            if settings.id is not None:
                ids.extend(text_hash(source.row_id(each.number, each.row)) for each in taken)
            self._encode(source, taken)
            self._keep(source, taken, dropped)
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                log.info(f"data: {first + len(some):,} of {count:,} rows of {settings.label} are read")
        filter_.check()
        answers = self._answers[-1]
        if settings.answer is not None and answers.first_missing is not None and answers.missing == answers.rows:
            needed(rows[answers.first_missing], settings.answer, rows.place(answers.first_missing))
        self._spans.append((begin, self._prompts))
        self._dropped.append(dict(dropped))
        _check_ids(source, ids)

    def _taken(
        self, source: OpenSource, first: int, some: Sequence[Row], filter_: RowFilter, dropped: Counter[str]
    ) -> list[_Prompt]:
        taken = []
        for number, row in enumerate(some, start=first):
            place = source.rows.place(number)
            if (failed := filter_.first_failed(row, place)) is not None:
                dropped[f"another {failed} (where)"] += 1
                continue
            source.check(row, place)
            self._columns |= dict.fromkeys(row)
            self._with_tools[-1] += source.has_tools(row, place)
            taken.append(_Prompt(number, row, source.text(row, place), source.is_raw(row), []))
        return taken

    def _encode(self, source: OpenSource, prompts: Sequence[_Prompt]) -> None:
        """Encode texts; those of a template have the special tokens that it wrote, and no others."""
        for raw in (False, True):
            some = [each for each in prompts if each.is_raw is raw]
            if not some:
                continue
            texts = [each.text for each in some]
            try:
                if raw:
                    found = encode_prompts_together(self._tokenizer, texts)
                else:
                    found = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
            except Exception:  # of one of them: which one is found out
                for each in some:
                    encode_text(self._tokenizer, each.text, source.rows.place(each.number))
                raise
            for each, tokens in zip(some, found, strict=True):
                each.tokens = list(tokens)
            self._raw += len(some) if raw else 0

    def _keep(self, source: OpenSource, prompts: Sequence[_Prompt], dropped: Counter[str]) -> None:
        kept = []
        for each in prompts:
            if (reason := self._fit.reason_to_drop(len(each.tokens))) is not None:
                dropped[reason] += 1
                self._overlong += reason == self._fit.overlong_reason
                continue
            if len(each.tokens) > self._fit.most:
                self._overlong += 1
                each.tokens = self._cut(source, each)
            if not each.tokens:
                raise UserError(f"{source.rows.place(each.number)}: the prompt has no tokens, expected at least one")
            self._answers[-1].add(each.number, source.answer(each.row))
            kept.append(each)
            of_tokens = of_prompt(self._tokenizer, each.tokens, is_text=each.is_raw)
            self._remarks[-1].add(each.number, itertools.chain(source.remarks(each.row), of_tokens))
        lengths = np.array([len(each.tokens) for each in kept], dtype=np.int64)
        ends = self._tokens + np.cumsum(lengths)
        self._files[TOKENS].write(np.array([token for each in kept for token in each.tokens], dtype=np.int32).tobytes())
        self._files[ENDS].write(ends.tobytes())
        self._files[NUMBERS].write(np.array([each.number for each in kept], dtype=np.int64).tobytes())
        self._files[HASHES].write(np.array([text_hash(each.text) for each in kept], dtype=np.uint64).tobytes())
        self._prompts, self._tokens = self._prompts + len(kept), int(ends[-1]) if len(ends) else self._tokens

    def _cut(self, source: OpenSource, prompt: _Prompt) -> list[int]:
        place = source.rows.place(prompt.number)
        if self._fit.policy == "refuse":
            raise UserError(
                f"{place}: the prompt has {len(prompt.tokens):,} tokens, expected at most {self._fit.most:,}; or "
                "data.overlong_prompts=drop, cut_left, cut_right or cut_middle"
            )
        if prompt.is_raw:
            return cut(self._tokenizer, prompt.text, prompt.tokens, self._fit.most, self._fit.policy)
        messages = source.messages(prompt.row)
        tools = source.tools(prompt.row, place)
        return cut_messages(self._tokenizer, self._template, messages, prompt.tokens, self._fit, place, tools)


class RowFilter:
    """Which rows of a source meet its conditions.

    Args:
        source: with its rows.
    """

    def __init__(self, source: OpenSource) -> None:
        self._source = source
        self._asked, self._found = dict[str, None](), set[str]()

    def first_failed(self, row: Row, place: str) -> str | None:
        """The first column whose condition a row does not meet.

        Raises:
            UserError: it is a column of texts, and the condition is of others.
        """
        for column, condition in self._source.settings.where.items():
            self._asked[column] = None
            try:
                value = value_of(row, column)
            except KeyError:
                return column
            self._found.add(column)
            if isinstance(value, str) and self._source.rows.in_columns and not condition.is_of_texts:
                raise UserError(
                    f"{place}: column {column!r} is of texts, such as {json_text(value, 40)}, and where compares "
                    "it with others; expected one_of or none_of with texts, in quotes"
                )
            if not condition.holds(value):
                return column
        return None

    def check(self) -> None:
        """Raises UserError where no row had a column of which a condition was asked."""
        if missing := next((column for column in self._asked if column not in self._found), None):
            raise _missing(missing, self._source.rows)


def _check_ids(source: OpenSource, ids: array[int]) -> None:
    """Raises UserError where two rows have the same name."""
    if len(ids) and len(np.unique(np.frombuffer(ids, dtype=np.uint64))) < len(ids):
        raise UserError(
            f"{source.settings.path[0]}: column {source.settings.id!r} has a value twice, expected one that names a "
            "row; or id=null, and rows are named by their numbers"
        )


def check_columns(source: FileSource, rows: Rows) -> None:
    """Whether there are the columns that a source names, by the first row, unless it has conditions.

    Raises:
        UserError: names the first that is missing.
    """
    place, row = rows.place(0), rows[0]
    for name in (source.prompt, source.answer, source.id, source.tools, *source.where):
        column = name if name is None or name in rows.columns else name.partition(".")[0]
        if column in rows.left_out:
            raise UserError(f"{place}: column {column!r} has bytes that are no text in UTF-8, expected text")
    for name in source.where if rows.in_columns else ():  # lines of JSON may have others later
        if name not in rows.columns and name.partition(".")[0] not in rows.columns:
            raise _missing(name, rows)
    if source.tools is not None and not any(has(each, source.tools) for each in rows.read(0, min(len(rows), BATCH))):
        needed(row, source.tools, place)
    if source.where:
        return
    for column in (source.prompt, source.id):
        if column is not None:
            needed(row, column, place)
    answer = source.answer  # some rows may lack it
    if answer is not None and not {answer, answer.partition(".")[0]} & set(rows.columns):
        needed(row, answer, place)


def _missing(column: str, rows: Rows) -> UserError:
    there = shortened(", ".join(map(repr, rows.columns)), 200)
    return UserError(f"{rows.place(0)}: where has column {column!r}, and there are only {there}")
