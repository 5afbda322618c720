"""A run's sample store, as those read it who look at samples: of large files, no more than is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine3d.errors import UserError, first_line, shortened
from engine3d.input_files import check_regular
from engine3d.rollout.requests import BEGINS
from hybridflow.rundir.file_names import SAMPLE_STORE
from hybridflow.rundir.samples.files import stored_steps

_SUMS = ("reward", "cost")
_PLAIN = ("step", "sample_id", "group_id", "prompt_index", "policy_version", "finish_reason", "advantage")
_WHERE = ("engine", "began", "ended")
_DATA_ROW, _ANSWER = "data_row", "answer"
_TOKENS = ("prompt_tokens", "response_tokens", "response_mask")
_VERSIONS = "token_versions"


@dataclass(frozen=True)
class SampleFilter:
    """Selection of samples.

    Args:
        reward_below, reward_above: of their rewards; any if None.
        group, sample: their ids; any if None.
        data_row: that the prompt is of; any if None.
    """

    reward_below: float | None = None
    reward_above: float | None = None
    group: int | None = None
    sample: int | None = None
    data_row: str | None = None

    @property
    def is_any(self) -> bool:
        """True if every sample is selected."""
        return self == SampleFilter()

    def has(self, row: Mapping[str, Any]) -> bool:
        """True if a sample with these fields is selected."""
        reward = row["reward"]
        reward = math.nan if reward is None else reward
        return (
            (self.group is None or row["group_id"] == self.group)
            and (self.sample is None or row["sample_id"] == self.sample)
            and (self.data_row is None or row.get(_DATA_ROW) == self.data_row)
            and (self.reward_below is None or reward < self.reward_below)
            and (self.reward_above is None or reward > self.reward_above)
        )

    def __str__(self) -> str:
        said = [
            f"a reward {word} {value:g}"
            for word, value in (("below", self.reward_below), ("above", self.reward_above))
            if value is not None
        ]
        ids = (("group", self.group), ("id", self.sample), ("row", self.data_row))
        said += [f"{name} {value}" for name, value in ids if value is not None]
        return " and ".join(said)


@dataclass(frozen=True)
class StoredSample:
    """A sample as it was learned from.

    Args:
        step: that has learned from it.
        sample, group, prompt: its id, that of its group, and the index of the prompt in the data.
        version: of the oldest weights that drew a token of the response.
        finish_reason: stop, length or abort.
        reward: the sum; None without one.
        cost: the sum; None without one.
        by_name: what functions and models have given, such as "reward/exact_match".
        advantage: of all its tokens; None where these have different ones.
        engine: number of the one that drew it; None where that is not known.
        seconds: from asking the engine to the whole response; None where that is not known.
        prompt_tokens, response_tokens: their ids; none where they were not asked for.
        response_mask: which response tokens the policy wrote.
        begins: response tokens at which another sequence of an agent's tree begins.
        data_row: that the prompt is of, as "SOURCE:ROW"; None where rows have no names.
        answer: the reference answer as text; None where the prompt has none.
    """

    step: int
    sample: int
    group: int
    prompt: int
    version: int
    finish_reason: str
    reward: float | None
    cost: float | None
    by_name: Mapping[str, float] = field(default_factory=dict)
    advantage: float | None = None
    engine: int | None = None
    seconds: float | None = None
    prompt_tokens: Sequence[int] = ()
    response_tokens: Sequence[int] = ()
    response_mask: Sequence[bool] = ()
    begins: Sequence[int] = ()
    data_row: str | None = None
    answer: str | None = None

    def verdicts(self, name: str) -> dict[str, float]:
        """Metrics and counts of a function, such as those of "reward/code", without those that are 0 or absent."""
        prefix = f"{name}/"
        values = {key.removeprefix(prefix): value for key, value in self.by_name.items() if key.startswith(prefix)}
        return {key: value for key, value in values.items() if value and not math.isnan(value)}

    @property
    def scores(self) -> dict[str, float]:
        """Scores of functions and models, without the metrics of functions."""
        return {name: value for name, value in self.by_name.items() if name.rpartition("/")[0] not in self.by_name}

    @property
    def sequences(self) -> list[StoredSequence]:
        """Sequences of the tree of tokens: the prompt with its response, and the branches of an agent's episode."""
        ends = [0, *self.begins, len(self.response_tokens)]
        sequences, complete = list[StoredSequence](), list[list[int]]()
        for number, (start, end) in enumerate(pairwise(ends)):
            tokens, shared, parent = list(self.response_tokens[start:end]), 0, None
            for earlier, other in enumerate(complete):
                common = _common(other, tokens)
                if parent is None or common > shared:
                    parent, shared = earlier, common
            depth = 0 if parent is None else sequences[parent].depth + 1
            mask = self.response_mask[start + shared : end]
            pairs = groupby(zip(mask, tokens[shared:], strict=True), key=itemgetter(0))
            spans = [(drawn, [token for _, token in span]) for drawn, span in pairs]
            sequences.append(StoredSequence(parent, shared, depth, spans))
            complete.append(tokens if number else [*self.prompt_tokens, *tokens])
        return sequences


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


@dataclass(frozen=True)
class StoredSequence:
    """A sequence of a sample's tree of tokens.

    Args:
        parent: index of the sequence that has its first tokens too; None of the first sequence.
        shared: count of these tokens, the parent's prompt or context included.
        depth: count of the sequences above it.
        spans: further tokens in pieces: True and those of a turn that the policy wrote, False and those between two.
    """

    parent: int | None
    shared: int
    depth: int
    spans: list[tuple[bool, list[int]]]

    @property
    def title(self) -> str:
        """The branch in words."""
        return f"branch of sequence {(self.parent or 0) + 1}, after {self.shared} tokens"


@dataclass(frozen=True)
class SampleLocation:
    """Location of a sample in a file."""

    row_group: int
    row: int


class StepFile:
    """The samples of one step.

    Args:
        path: of the file.

    Raises:
        UserError: it cannot be read, or is none of samples.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        check_regular(path)
        self._file: pq.ParquetFile = self._try(lambda: pq.ParquetFile(path, memory_map=False))
        names = self._file.schema_arrow.names
        if missing := [name for name in (*_PLAIN, *_SUMS, *_WHERE, *_TOKENS) if name not in names]:
            raise UserError(f"{path} has no column {missing[0]}, expected the samples of a step")
        self._named = [name for name in names if name.startswith(tuple(f"{total}/" for total in _SUMS))]
        self._rest = [name for name in (_DATA_ROW, _ANSWER) if name in names]  # files of earlier versions lack it
        self._of_tokens = [*_TOKENS, *(name for name in (_VERSIONS,) if name in names)]

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def rewards(self) -> list[float]:
        """Return the rewards of all samples that have one."""
        table = self._try(lambda: self._file.read(["reward"]))
        return [value for value in table["reward"].to_pylist() if value is not None and not math.isnan(value)]

    def find(self, sample_filter: SampleFilter) -> list[tuple[SampleLocation, StoredSample]]:
        """Return the selected samples in the order of the file, without their tokens."""
        names = [*_PLAIN, *_SUMS, *_WHERE, *self._named, *self._rest]
        samples = []
        for number in range(self._file.num_row_groups):
            rows = self._rows(number, names)
            samples += [
                (SampleLocation(number, row), self._sample(values))
                for row, values in enumerate(rows)
                if sample_filter.has(values)
            ]
        return samples

    def with_tokens(self, locations: Sequence[SampleLocation]) -> list[StoredSample]:
        """The samples at some places, in that order."""
        samples: dict[SampleLocation, StoredSample] = {}
        for number in dict.fromkeys(location.row_group for location in locations):
            here = [location for location in locations if location.row_group == number]
            names = [*_PLAIN, *_SUMS, *_WHERE, *self._named, *self._rest, *self._of_tokens]
            rows = self._rows(number, names, [location.row for location in here])
            samples |= {location: self._sample(values) for location, values in zip(here, rows, strict=True)}
        return [samples[location] for location in locations]

    def _rows(self, number: int, names: Sequence[str], rows: Sequence[int] | None = None) -> list[dict[str, Any]]:
        def read() -> list[dict[str, Any]]:
            table = self._file.read_row_group(number, list(names))
            if rows is not None:  # by slices: `take` imports pandas for a second
                table = pa.concat_tables(table.slice(row, 1) for row in rows)
            values: list[dict[str, Any]] = table.to_pylist()
            return values

        read_rows: list[dict[str, Any]] = self._try(read)
        return read_rows

    def _sample(self, row: Mapping[str, Any]) -> StoredSample:
        engine, began, ended = (row[name] for name in _WHERE)
        seconds = None if began is None or ended is None else ended - began
        return StoredSample(
            step=row["step"],
            sample=row["sample_id"],
            group=row["group_id"],
            prompt=row["prompt_index"],
            version=row["policy_version"],
            finish_reason=row["finish_reason"],
            reward=row["reward"],
            cost=row["cost"],
            by_name={name: row[name] for name in self._named if row[name] is not None},
            advantage=row["advantage"],
            engine=engine if engine is not None and engine >= 0 else None,
            seconds=None if seconds is None or math.isnan(seconds) else seconds,
            prompt_tokens=row.get("prompt_tokens") or (),
            response_tokens=row.get("response_tokens") or (),
            response_mask=row.get("response_mask") or (),
            begins=[token for token, version in enumerate(row.get(_VERSIONS) or ()) if version == BEGINS],
            data_row=row.get(_DATA_ROW),
            answer=row.get(_ANSWER),
        )

    def _try(self, read: Any) -> Any:
        try:
            return read()
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            reason = shortened(" ".join(first_line(error).split()), 120)
            raise UserError(f"{self._path} holds no samples that can be read: {reason}") from None


def has_store(run: Path) -> bool:
    """True if the store has samples of any step. Raises OSError where it cannot be read."""
    return bool(stored_steps(run / SAMPLE_STORE))


def store_of(run: Path) -> dict[int, Path]:
    """The files of a run's samples by step, the oldest first.

    Raises:
        UserError: there are none, or they cannot be listed.
    """
    store = run / SAMPLE_STORE
    try:
        files = stored_steps(store)
    except OSError as error:
        raise UserError(f"{store} cannot be read: {error.strerror}") from None
    if not files:
        raise UserError(f"no samples in {store}; a run writes them after each step unless samples.store=false")
    return files


def newest_first(files: Mapping[int, Path]) -> Iterator[tuple[int, StepFile]]:
    """Each step's samples; those that a run removes meanwhile, to stay within its bound, are left out."""
    for step in sorted(files, reverse=True):
        if files[step].exists():
            yield step, StepFile(files[step])
