"""Settings of prompts from files."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from engine3d.settings import MOST_TOKENS, AbsolutePath, Settings
from hybridflow.data.answers import is_missing

Format = Literal["jsonl", "json", "csv", "parquet", "arrow", "dataset"]
Texts = Literal["raw", "user"]
TrainedOn = Literal["all", "last"]

SUFFIXES: Mapping[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Format of a file by how its name ends; a directory is a saved data set."""
COMPRESSED: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
"""Compression by the suffix that may follow one of a text format."""


def absolute(path: str) -> str:
    """A path of this machine made absolute; an address of another file system, such as s3://bucket/file, as it is."""
    return path if "://" in path else str(Path(path).expanduser().absolute())


class Condition(Settings):
    """Condition on a column. Every setting of it has to hold. A row that lacks the column, or has null, fails."""

    min: float | None = None
    """Smallest number."""
    max: float | None = None
    """Largest number."""
    one_of: tuple[Any, ...] | None = None
    """Values that pass."""
    none_of: tuple[Any, ...] | None = None
    """Values that do not pass."""
    present: Literal[True] | None = None
    """True for rows that have a value, such as a reference answer: no null, NaN, blank text, or empty list."""

    @field_validator("one_of", "none_of", mode="after")
    @classmethod
    def _as_rows_have_them(cls, given: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        dates = datetime.date | datetime.time  # rows have them as text
        return (
            None
            if given is None
            else tuple(value.isoformat() if isinstance(value, dates) else value for value in given)
        )

    @model_validator(mode="after")
    def _says_something(self) -> Condition:
        if all(setting is None for setting in (self.min, self.max, self.one_of, self.none_of, self.present)):
            raise ValueError(
                "no condition is set, expected a value, a list of them, or some of min, max, one_of, none_of, present"
            )
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min={self.min:g} is above max={self.max:g}")
        return self

    def holds(self, value: Any) -> bool:
        """True if a value passes."""
        if value is None or (self.present and is_missing(value)):
            return False
        if self.min is not None or self.max is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                return False
            # Neither comparison holds for NaN.
            if not (self.min is None or value >= self.min) or not (self.max is None or value <= self.max):
                return False
        if self.one_of is not None and value not in self.one_of:
            return False
        return self.none_of is None or value not in self.none_of

    @property
    def is_of_texts(self) -> bool:
        """True if it compares with texts alone, so that it may apply to a column of texts."""
        values = [*(self.one_of or ()), *(self.none_of or ())]
        return self.min is None and self.max is None and all(isinstance(value, str) for value in values)


def _condition(given: Any) -> Any:
    """A value or a list of values stands for `one_of`."""
    if isinstance(given, Condition | Mapping):
        return given
    return {"one_of": given if isinstance(given, list | tuple) else [given]}


class WeightFrom(Settings):
    """The weight of a source from a step on."""

    step: int = Field(ge=1)
    """First step, from 1."""
    weight: float = Field(ge=0)
    """Weight, relative to the other sources."""


def _steps(given: Any) -> Any:
    """A number stands for a weight that does not change; null for that of the number of prompts."""
    if given is None:
        return []
    if isinstance(given, int | float) and not isinstance(given, bool):
        return [{"step": 1, "weight": given}]
    return given


class FileSource(Settings):
    """Rows of one or several files of the same columns."""

    path: tuple[str, ...]
    """Files, in order: a path, or a list of them; each may have wildcards (`*`, `?`, `[...]`), whose files are taken by
    name, or be an address that fsspec knows, such as `s3://bucket/train.parquet`."""
    format: Format | None = None
    """`jsonl` (one object a line), `json` (one list of objects, or such lines), `csv`, `parquet`, `arrow`, or
    `dataset`, a directory that `datasets` has saved; by the name of the file if null. All columns of CSV are texts."""
    name: str | None = Field(None, min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the source in metrics, samples and the report. That of its first file if null."""
    split: str | None = None
    """Split of a saved data set that has several."""
    prompt: str = "prompt"
    """Column of the prompt: a text, or a list of messages with `role` and `content`. A dot goes into an object:
    `extra_info.question`."""
    answer: str | None = "answer"
    """Column of what reward functions get as `answers`: strings and whole numbers as text (5.0 too, unless a number of
    the column has a fraction), all other JSON as it is. A row may lack it: `check` counts those rows where a function
    needs answers. Null where none does. A function that has a parameter of the name of any column gets that column's
    values."""
    tools: str | None = None
    """Column of the tools that the template describes to the model: a list of objects, or its JSON text; null, or
    nothing, in rows without any. `chat.tools` for all rows if null."""
    id: str | None = None
    """Column that names a row, once in the source; a row is named by its number, from 0, if null."""
    where: dict[str, Annotated[Condition, BeforeValidator(_condition)]] = Field(default_factory=dict)
    """Rows to take, by what columns are: `level: [1, 2]`, `subject: algebra`, `rate: {min: 0.1, max: 0.9}`,
    `answer: {present: true}`, `answer: {none_of: [proof, notfound]}`."""
    rows: int | None = Field(None, ge=1)
    """Only the first rows, before `where`; all of them if null."""
    weight: Annotated[tuple[WeightFrom, ...], BeforeValidator(_steps)] = ()
    """Share of the training prompts, relative to the other sources: a number, or a list of `{step, weight}`, each in
    force from its step on; its number of prompts if null. A source begins again when all of its prompts were drawn."""

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str | Path) else given

    @field_validator("path", mode="after")
    @classmethod
    def _are_absolute(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if not given or not all(given):
            raise ValueError(f"{list(given)}, expected at least one file, and no empty name")
        return tuple(absolute(path) for path in given)

    @model_validator(mode="after")
    def _check(self) -> FileSource:
        steps = [entry.step for entry in self.weight]
        if steps and (steps[0] != 1 or steps != sorted(set(steps))):
            raise ValueError(f"weight has steps {steps}, expected ascending ones from 1")
        if steps and not any(entry.weight for entry in self.weight):
            raise ValueError("weight is never above 0, expected so at some step")
        if self.split is not None and self.format not in (None, "dataset"):
            raise ValueError(f"split={self.split} with format={self.format}, expected it of a saved data set alone")
        return self

    def weight_at(self, step: int) -> float:
        """The weight in a step, from 1, where it is not null."""
        return next(entry.weight for entry in reversed(self.weight) if entry.step <= step)

    @property
    def label(self) -> str:
        """The name of the source."""
        if self.name is not None:
            return self.name
        stem = self.path[0].rstrip("/").rpartition("/")[2]
        for suffix in (*COMPRESSED, *SUFFIXES):
            stem = stem.removesuffix(suffix)
        return re.sub(r"[^A-Za-z0-9._-]", "_", stem).lstrip("._-") or "data"


class ChatConfig(Settings):
    """Conversion of messages to the token ids of a prompt, by the chat template of the tokenizer."""

    template: AbsolutePath | None = None
    """File of a Jinja chat template in place of the tokenizer's."""
    system: str | None = None
    """System prompt, before the messages of a row that has none of its own."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the template, such as {enable_thinking: false}; the template has to read each of them."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools that the template describes to the model, for the messages of every row whose source names no column of
    them: objects such as `{type: function, function: {name: weather, description: ..., parameters: {...}}}`."""
    date: datetime.date | None = None
    """Date for a template that writes today's date (`strftime_now`), such as 2026-01-31. It is the same every day, so
    that a run that is resumed tomorrow has the same prompts.
    """
    generation_prompt: bool = True
    """End with the text that the template puts before an answer of the assistant."""
    texts: Texts = "raw"
    """Treatment of a prompt that is a text: "raw", its own tokens without a template; or "user", one message of the
    user. The start of a run logs which of the two, if the tokenizer has a template.
    """
    train_on: TrainedOn = "all"
    """Messages of the assistant that supervised conversations are trained on: all, or the last one."""


class DifficultyConfig(Settings):
    """A curriculum by difficulty: prompts are drawn by the pass rate that was measured when they were drawn before."""

    low: float = Field(0.0, ge=0, le=1)
    """Smallest pass rate of a prompt that is drawn again."""
    high: float = Field(1.0, ge=0, le=1)
    """Largest pass rate of a prompt that is drawn again."""
    keep: float = Field(0.1, ge=0, le=1)
    """Share of the other prompts that an epoch draws all the same, so that their rates are measured again."""
    passing: float = 1.0
    """Smallest reward of a response that passes."""

    @model_validator(mode="after")
    def _check(self) -> DifficultyConfig:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} is above high={self.high:g}")
        return self


class FilesConfig(Settings):
    """Prompts from files of rows. Held-out prompts are those of the sets in `evaluation`."""

    train: tuple[FileSource, ...] = Field(min_length=1)
    """Sources of the training prompts; each item has the settings below."""
    sft: tuple[FileSource, ...] = ()
    """Sources of supervised examples, for `warmup`: a prompt with its answer as a text, or a conversation, whose
    messages of the assistant are trained on."""
    chat: ChatConfig = ChatConfig()
    min_prompt_tokens: int = Field(1, ge=1, le=MOST_TOKENS)
    """Prompts with fewer are dropped, and counted."""
    max_prompt_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Prompts with more are dropped, and counted, before `data.overlong_prompts` applies."""
    difficulty: DifficultyConfig | None = None
    """A curriculum by measured pass rates; none if null."""
    cache: AbsolutePath | None = None
    """Directory where files are kept as this system reads them, with the token ids of their prompts, for the next run
    of the same data; `$XDG_CACHE_HOME/hybridflow/data`, or `~/.cache/hybridflow/data`, if null."""

    @model_validator(mode="after")
    def _check(self) -> FilesConfig:
        for what, sources in (("train", self.train), ("sft", self.sft)):
            labels = [source.label for source in sources]
            if twice := next((label for label in labels if labels.count(label) > 1), None):
                raise ValueError(f"{what} has two sources named {twice!r}, expected a name of its own for each")
        if given := next((source.label for source in self.sft if source.weight), None):
            raise ValueError(f"sft has a weight for {given}, expected one of training prompts alone")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < self.min_prompt_tokens:
            raise ValueError(
                f"max_prompt_tokens={self.max_prompt_tokens} is below min_prompt_tokens={self.min_prompt_tokens}"
            )
        weighted = [source.label for source in self.train if source.weight]
        if weighted and len(weighted) < len(self.train):
            others = [source.label for source in self.train if not source.weight]
            raise ValueError(
                f"train has a weight for {weighted[0]} and none for {others[0]}, expected one for every source, or none"
            )
        for step in sorted({entry.step for source in self.train for entry in source.weight}):
            if not any(source.weight_at(step) for source in self.train):
                raise ValueError(f"train has no source with a weight above 0 from step {step} on, expected one")
        return self
