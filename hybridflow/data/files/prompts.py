"""Prompts whose token ids and rows lie in files."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine3d.errors import UserError
from engine3d.input_files import MOST_LIST_BYTES, json_text, read_json_object
from hybridflow.data.answers import AnswerCounts, as_answer
from hybridflow.data.files.config import FileSource
from hybridflow.data.files.conversations.chat import ChatTemplate
from hybridflow.data.files.conversations.messages import Tools, from_text, read_tools
from hybridflow.data.files.formats.opening import DataFile, open_rows
from hybridflow.data.files.formats.rows import Row, Rows, needed, value_of, without_nulls
from hybridflow.data.packed_prompts import PackedPrompts, mapped
from hybridflow.data.prompts import Prompts
from hybridflow.data.remarks import TOOLS, Remarks, located
from hybridflow.data.tasks import Example

NUMBERS, HASHES, SUMMARY = "numbers.bin", "hashes.bin", "summary.json"
"""Files next to the token ids: the row of each prompt in its source, as int64; a hash of its text, as uint64."""
_NO_TEXT = ("image", "video", "audio")
"""Marks of a prompt, in the layout of verl, and columns, also in the plural, of what they stand for."""


@dataclass(frozen=True)
class SourceSpan:
    """The prompts of one source among those of a phase.

    Args:
        label: name of the source.
        begin, end: the range of their indices.
        dropped: count of rows that are no prompt, by the reason.
        with_tools: count of prompts that describe tools.
        remarks: on their rows.
    """

    label: str
    begin: int
    end: int
    dropped: Mapping[str, int]
    with_tools: int = 0
    remarks: Remarks = field(default_factory=dict)

    @classmethod
    def of(cls, sources: Sequence[OpenSource], summary: Mapping[str, Any]) -> tuple[SourceSpan, ...]:
        """Spans of sources, by their summary."""
        keys = ("spans", "dropped", "with_tools", "remarks")
        return tuple(
            cls(source.settings.label, begin, end, dropped, with_tools, located(remarks, source.rows.location))
            for source, (begin, end), dropped, with_tools, remarks in zip(
                sources, *(summary[key] for key in keys), strict=True
            )
        )


@dataclass(frozen=True)
class OpenSource:
    """A source with its rows.

    Args:
        settings: of the source.
        rows: all of them.
        template: of messages.
        files: that the rows are in.
        cache: directory of the cache.
        whole_answers: true if an answer 5.0 stands for 5.
    """

    settings: FileSource
    rows: Rows
    template: ChatTemplate
    files: tuple[DataFile, ...]
    cache: Path
    whole_answers: bool = True

    @classmethod
    def open(
        cls,
        settings: FileSource,
        template: ChatTemplate,
        files: Sequence[DataFile],
        cache: Path,
        whole_answers: bool = True,
    ) -> OpenSource:
        """Open the files of a source. Raises UserError naming the one that cannot be read."""
        return cls(settings, open_rows(files, cache), template, tuple(files), cache, whole_answers)

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenSource.open, (self.settings, self.template, self.files, self.cache, self.whole_answers)

    def is_raw(self, row: Row) -> bool:
        """True if the prompt is a text that no template is applied to."""
        return isinstance(self.prompt(row, ""), str) and self.template.config.texts == "raw"

    def messages(self, row: Row) -> list[Any]:
        """The messages of a prompt that is not raw."""
        prompt = self.prompt(row, "")
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    def text(self, row: Row, location: str) -> str:
        """The prompt as the text that the model reads."""
        prompt = self.prompt(row, location)
        if isinstance(prompt, str) and self.template.config.texts == "raw":
            return prompt
        return self.template.prompt(self.messages(row), location, self.tools(row, location))

    def tools(self, row: Row, location: str) -> Tools | None:
        """Tools of a row. None if they are those of the recipe. Raises UserError if they are invalid."""
        if self.settings.tools is None:
            return None
        try:
            value = value_of(row, self.settings.tools)
        except KeyError:  # lines of JSON may have them in some rows alone
            return ()
        return read_tools(without_nulls(value) if self.rows.in_columns else value, location)

    def has_tools(self, row: Row, location: str) -> bool:
        """True if the prompt of a row describes tools."""
        tools = self.tools(row, location)
        return bool(self.template.config.tools if tools is None else tools) and not self.is_raw(row)

    def remarks(self, row: Row) -> Iterator[str]:
        """The kinds of remarks on a row, without those on its tokens."""
        if self.settings.tools is None and row.get(TOOLS) and not self.is_raw(row):
            yield "tools"

    def answer(self, row: Row) -> Any:
        """The reference answer of a row; None where it lacks the column, and "" where the source has none."""
        if self.settings.answer is None:
            return ""
        try:
            return value_of(row, self.settings.answer)
        except KeyError:
            return None

    def check(self, row: Row, location: str) -> None:
        """Raises UserError if the prompt of a row is no prompt."""
        prompt = self.prompt(row, location)
        if not isinstance(prompt, str | list) or not prompt:
            raise UserError(
                f"{location}: column {self.settings.prompt!r} is {json_text(prompt)}, expected a text or a list "
                "of messages, not empty"
            )
        for kind in _NO_TEXT:
            column = next((name for name in (f"{kind}s", kind) if row.get(name)), None)
            if column is not None and f"<{kind}>" in repr(prompt):
                raise UserError(
                    f"{location}: column {column!r} has what <{kind}> in the prompt stands for, and models here read "
                    "text alone; expected rows without (where leaves rows out)"
                )
        if self.tools(row, location) and self.is_raw(row):
            raise UserError(
                f"{location}: column {self.settings.tools!r} has tools, and the prompt is a text, to which no template "
                "is applied; expected messages, or data.files.chat.texts=user"
            )

    def row_id(self, number: int, row: Row) -> str:
        """Name of a row in its source."""
        if self.settings.id is None:
            return str(number)
        value = needed(row, self.settings.id, self.rows.location(number))
        if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
            raise UserError(
                f"{self.rows.location(number)}: column {self.settings.id!r} is {json_text(value)}, expected a "
                "text or a whole number that names the row"
            )
        return str(value)

    def example(self, number: int) -> Example:
        """A row as an example."""
        row, location = self.rows[number], self.rows.location(number)
        answer = as_answer(self.answer(row), whole_numbers=self.whole_answers)
        return Example(
            self.text(row, location), answer, row, f"{self.settings.label}:{self.row_id(number, row)}", location
        )

    def identity(self, number: int) -> str:
        """The name of a row, as "SOURCE:ROW"."""
        row = {} if self.settings.id is None else self.rows[number]
        return f"{self.settings.label}:{self.row_id(number, row)}"

    def prompt(self, row: Row, location: str) -> Any:
        """Prompt of a row: a text or messages. Raises UserError if the row lacks the column."""
        value = needed(row, self.settings.prompt, location)
        # In columns, each call of a tool has the arguments of all calls, as nulls.
        value = without_nulls(value) if self.rows.in_columns else value
        return from_text(value, f"{location}: column {self.settings.prompt!r}")


class FileExamples(Sequence[Example]):
    """Examples that are read from their files on access.

    Args:
        sources: with their rows.
        ends: where the prompts of each source end.
        directory: with the row of each prompt in its source.
    """

    def __init__(self, sources: Sequence[OpenSource], ends: Sequence[int], directory: Path) -> None:
        self._sources, self._ends, self._directory = tuple(sources), tuple(ends), directory
        self._numbers = mapped(directory / NUMBERS, np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return FileExamples, (self._sources, self._ends, self._directory)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override]
        source, number = self._locate(index)
        return source.example(number)

    def identity(self, index: int) -> str:
        """The name of the row that a prompt is of."""
        source, number = self._locate(index)
        return source.identity(number)

    def _locate(self, index: int) -> tuple[OpenSource, int]:
        if not 0 <= index < len(self._numbers):
            raise IndexError(index)
        return self._sources[bisect.bisect_right(self._ends, index)], int(self._numbers[index])


@dataclass(frozen=True)
class FilePrompts(Prompts):
    """Prompts of one phase from files.

    Args:
        spans: the range of each source.
        hashes: (P,) uint64, of their texts.
        columns: every column of their rows.
        counts: of the reference answers of each source, with the location of the first missing one.
        raw: count of texts to which no template is applied.
    """

    spans: tuple[SourceSpan, ...] = ()
    hashes: np.ndarray[Any, Any] | None = None
    columns: tuple[str, ...] = ()
    counts: tuple[tuple[AnswerCounts, str], ...] = ()
    raw: int = 0

    @classmethod
    def read(cls, directory: Path, sources: Sequence[OpenSource]) -> FilePrompts:
        """Read the prompts of a directory of the cache."""
        summary = read_json_object(directory / SUMMARY, MOST_LIST_BYTES)
        spans = SourceSpan.of(sources, summary)
        answers = [AnswerCounts(**counts) for counts in summary["answers"]]
        sources = [
            replace(source, whole_answers=counts.whole_numbers) for source, counts in zip(sources, answers, strict=True)
        ]
        locations = [
            "" if counts.first_missing is None else source.rows.location(counts.first_missing)
            for source, counts in zip(sources, answers, strict=True)
        ]
        return cls(
            FileExamples(sources, [span.end for span in spans], directory),
            PackedPrompts.mapped(directory),
            summary["overlong"],
            spans,
            mapped(directory / HASHES, np.uint64),
            tuple(summary["columns"]),
            tuple(zip(answers, locations, strict=True)),
            summary["raw"],
        )

    def text_hashes(self) -> np.ndarray[Any, Any]:
        assert self.hashes is not None
        return self.hashes

    def fields(self) -> tuple[str, ...]:
        return self.columns

    def identities(self, indices: Iterable[int]) -> dict[int, str]:
        assert isinstance(self.examples, FileExamples)
        return {index: self.examples.identity(index) for index in indices}

    def sources(self) -> tuple[tuple[str, int], ...]:
        return tuple((span.label, span.end) for span in self.spans)

    def answers(self) -> Iterable[Any]:
        return [answer for counts, _ in self.counts for answer in counts.no_texts()]

    def answer_counts(self) -> tuple[tuple[AnswerCounts, str], ...]:
        return self.counts
