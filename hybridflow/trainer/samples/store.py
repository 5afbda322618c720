"""The samples that a run has trained on, written to its directory in a thread during the next step.

The driver holds references: tokens lie in the object store, from which the thread has a bounded number of them at a
time. Training does not depend on it: what cannot be written of a step is missing, and said to be.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import pyarrow.parquet as pq
import torch

from engine3d.errors import first_line
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_fields import ROUTES
from hybridflow.batch.sample_table import ANSWER, DATA_ROW, ByName, ScoreColumns, sample_schema, table_of
from hybridflow.batch.worker_output import ROUTE_BYTES
from hybridflow.cluster.processes.termination import termination
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.rundir.samples.config import SamplesConfig
from hybridflow.rundir.samples.files import forget_later_steps, forget_oldest_steps, replacing, sample_file

FORMAT = 1
BASELINE = "baseline"
"""The column of what rewards were compared with."""
_MB = 1_000_000
_MOST_TOKENS = 1 << 20
"""Tokens in the driver's memory at a time: some `_TOKEN_BYTES` for each, with what Arrow makes of them."""
_TOKEN_BYTES = 200
_ROUTE_COPIES = 6
"""Bytes in memory for each byte of routes: of the batch, and of int16 entries in Arrow."""
_MOST_HELD = 2
"""Steps whose samples are kept in the object store for being written."""
_PATIENCE_S = 30.0
"""Time that a step waits for earlier ones to be written; a slower disk gets no more until it has caught up."""
_END_S = 60.0
_FAILED_END_S = 5.0
_COMPRESSED = {"compression": "zstd", "use_byte_stream_split": ["logprobs.list.element"]}
_REPEATED = [
    DATA_ROW,
    ANSWER,
    *("prompt_tokens.list.element", "response_tokens.list.element", "token_versions.list.element"),
    f"{ROUTES}.list.element",
    *("step", "group_id", "prompt_index", "policy_version", "reward", "engine", "finish_reason", "began", "ended"),
]
"""Columns whose values are written once, with numbers for where they stand."""


@dataclass(frozen=True, eq=False)
class TrainedSamples:
    """The samples that a step has trained on.

    Args:
        step: its number.
        version: of the weights that it has made.
        batches: the samples, in the order in which they were trained on.
        by_name: what functions and models have given them, such as "reward/exact_match".
        baselines: what rewards were compared with, by group, where that is no reward of the group's samples.
        data_rows: the row of the data that each prompt is of, by its index, where rows have names.
        answers: the reference answer of each prompt as text, by its index.
    """

    step: int
    version: int
    batches: tuple[RemoteBatch, ...]
    by_name: Mapping[str, ByName] = field(default_factory=dict)
    baselines: Mapping[int, float] = field(default_factory=dict)
    data_rows: Mapping[int, str] = field(default_factory=dict)
    answers: Mapping[int, str] = field(default_factory=dict)


class SampleStore:
    """The store of one run.

    Args:
        settings: whether there is one, and how much it may hold.
        directory: of its files; made once it is needed.
        steps_done: that the run resumes after: files of later ones are removed.
    """

    def __init__(self, settings: SamplesConfig, directory: Path, steps_done: int) -> None:
        self._settings, self._directory, self._steps_done = settings, directory, steps_done
        self._changed = threading.Condition()
        self._waiting: deque[TrainedSamples] = deque()
        self._writing: TrainedSamples | None = None
        self._began = 0.0
        self._thread: threading.Thread | None = None
        self._closing = self._stuck = self._left = False
        self._missing: tuple[int, int] | None = None
        self._prunes = True
        self._written: list[tuple[int, float]] = []
        """Bytes and seconds of each step that was written."""

    def __enter__(self) -> SampleStore:
        try:
            forget_later_steps(self._directory, self._steps_done)
        except OSError as error:
            log.warning(f"samples: {self._directory} has steps that the run makes again: {error.strerror}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for what is being written, but not for long in a run that has failed."""
        limit_s = _END_S if kind is None else _FAILED_END_S
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(limit_s)
        with self._changed:
            unwritten = [samples.step for samples in (self._writing, *self._waiting) if samples is not None]
            self._waiting.clear()
            if unwritten:
                self._miss(unwritten[0], f"not written within {limit_s:g} s of the end")
            self._left = True

    def keep(self, learned: TrainedSamples) -> None:
        """Queue the samples of a step for writing. Wait for earlier ones if the disk is slower than training."""
        if not self._settings.store or not any(map(len, learned.batches)):
            return
        generated = replace(learned, batches=tuple(batch.as_generated() for batch in learned.batches))
        with self._changed:
            if self._changed.wait_for(self._has_room, 0.0 if self._stuck else _PATIENCE_S):
                self._waiting.append(generated)
                self._changed.notify_all()
            else:
                self._stuck = True
                self._miss(learned.step, f"those of {_MOST_HELD} earlier steps have been waiting for the disk too long")
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="sample-store", daemon=True)
            self._thread.start()

    def written(self, step: int) -> bool:
        """True if the samples of the steps up to this one are on the disk, or the disk is too slow or too full for
        them.
        """
        with self._changed:
            late = self._writing is not None and time.monotonic() - self._began > _PATIENCE_S
            in_flight = [
                samples for samples in (self._writing, *self._waiting) if samples is not None and samples.step <= step
            ]
            return not in_flight or late or self._stuck

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the steps written since the last call, by name; none if none was."""
        with self._changed:
            written, self._written = self._written, []
        if not written:
            return {}
        return {
            metrics.SAMPLES_BYTES: sum(nbytes for nbytes, _ in written),
            metrics.SAMPLES_TIME: 1000 * sum(seconds for _, seconds in written),
        }

    def _has_room(self) -> bool:
        return len(self._waiting) + (self._writing is not None) < _MOST_HELD

    # In the thread

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._writing = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                learned = self._writing = self._waiting.popleft()
                self._began = time.monotonic()
            self._write(learned)

    def _write(self, learned: TrainedSamples) -> None:
        began = time.perf_counter()
        try:
            self._directory.mkdir(exist_ok=True)  # not its parents: a run's directory that is gone stays so
            with replacing(sample_file(self._directory, learned.step)) as file:
                write_samples(file, learned)
                nbytes = file.tell()
        except Exception as error:  # of the disk, of Ray or of Arrow: it costs this step's samples and nothing else
            with self._changed:
                self._miss(learned.step, getattr(error, "strerror", None) or first_line(error))
            return
        with self._changed:
            self._written.append((nbytes, time.perf_counter() - began))
            self._stuck = False
            if self._missing is not None and not self._left:
                first, last = self._missing
                of = f"step {first}" if first == last else f"steps {first} to {last}"
                log.info(f"samples: written again from step {learned.step} on; those of {of} are missing")
            self._missing = None
        self._prune()

    def _prune(self) -> None:
        if self._settings.keep_mb is None:
            return
        try:
            forget_oldest_steps(self._directory, self._settings.keep_mb * _MB)
            self._prunes = True
        except OSError as error:
            if self._prunes:
                log.warning(f"samples: old ones in {self._directory} could not be removed: {error.strerror}")
            self._prunes = False

    def _miss(self, step: int, reason: str) -> None:
        """A step's samples are not there; said once, until others are written again."""
        if self._missing is None and not self._left:
            continues = "" if self._closing else termination.unless_ending("; training continues")
            log.warning(f"samples: {self._directory} lacks those of step {step} on: {reason}{continues}")
        self._missing = (step if self._missing is None else self._missing[0]), step


def write_samples(file: BinaryIO, learned: TrainedSamples, *, most_tokens: int = _MOST_TOKENS) -> None:
    """Write the samples of a step as Parquet, with a bounded number of tokens in memory (but for a longer sample).

    Raises:
        OSError: they could not be written.
    """
    by_name = _with_baselines(learned)
    schema = sample_schema(tuple(by_name))
    metadata = {
        "format": FORMAT,
        "step": learned.step,
        "version": learned.version,
        "batches": list(map(len, learned.batches)),
    }
    schema = schema.with_metadata({"hybridflow": json.dumps(metadata)})
    with pq.ParquetWriter(file, schema, use_dictionary=_REPEATED, **_COMPRESSED) as writer:
        for batch in learned.batches:
            for rows in _chunks(_weighted_lengths(batch), most_tokens):
                few = batch.select(rows)
                shared = few.per_sample.get("advantages")
                advantages = None if shared is None else ByName(few.per_sample["sample_ids"], shared.float())
                table = table_of(
                    few.fetch(), ScoreColumns(by_name, advantages, learned.data_rows, learned.answers), learned.step
                )
                writer.write_table(table.replace_schema_metadata(schema.metadata))


def _weighted_lengths(batch: RemoteBatch) -> list[int]:
    """Tokens of each sample, and as many more as its routes take the memory of."""
    lengths = batch.lengths
    if (nbytes := batch.per_sample.get(ROUTE_BYTES)) is not None:
        lengths = lengths + nbytes * _ROUTE_COPIES // _TOKEN_BYTES
    weighted: list[int] = lengths.tolist()
    return weighted


def _with_baselines(learned: TrainedSamples) -> Mapping[str, ByName]:
    """Columns by name, and what the reward of each sample was compared with, where that is none of its group's."""
    if not learned.baselines:
        return learned.by_name
    ids = torch.cat([batch.per_sample["sample_ids"] for batch in learned.batches])
    groups = [group for batch in learned.batches for group in batch.per_sample["group_ids"].tolist()]
    values = torch.tensor([learned.baselines[group] for group in groups])
    return {**learned.by_name, BASELINE: ByName(ids, values)}


def _chunks(lengths: list[int], most_tokens: int) -> Iterator[torch.Tensor]:
    """Consecutive samples that have no more tokens together, or one that has more."""
    first, tokens = 0, 0
    for row, length in enumerate(lengths):
        if row > first and tokens + length > most_tokens:
            yield torch.arange(first, row)
            first, tokens = row, 0
        tokens += length
    yield torch.arange(first, len(lengths))
