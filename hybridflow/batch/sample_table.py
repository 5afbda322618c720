"""Samples as a table of Arrow, one row a sample, and back: what the files of a run's sample store hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from engine3d.models.experts.routes import missing
from engine3d.startup.lazy_imports import torch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_fields import ROUTES, FinishReason

if TYPE_CHECKING:
    from torch import Tensor

_OF_SAMPLES = {
    "sample_id": ("sample_ids", pa.int64()),
    "group_id": ("group_ids", pa.int64()),
    "prompt_index": ("prompt_indices", pa.int64()),
    "policy_version": ("policy_versions", pa.int64()),
    "newest_version": ("newest_versions", pa.int64()),
    "reward": ("rewards", pa.float32()),
    "cost": ("costs", pa.float32()),
    "reference_logprob": ("reference_logprobs", pa.float64()),
    "engine": ("engines", pa.int32()),
    "began": ("began", pa.float64()),
    "ended": ("ended", pa.float64()),
}
"""Columns with one value a sample: the column of a `SampleBatch` that each is, and its type."""
_OF_RESPONSES = {
    "logprobs": pa.float32(),
    "response_mask": pa.bool_(),
    "token_versions": pa.int32(),
    "turns": pa.int32(),
    "turn_returns": pa.float32(),
}
"""Columns of responses, which a `SampleBatch` has under the same names, and the types of their values."""
_INTEGERS = ("token_versions", "turns")
"""Names among these whose column is int64 in a `SampleBatch`."""
_ROUTES = pa.int16()
"""Routes of a sample, token by token: as the batch has them, where uint8 has 255 and int16 has -1 for those that are
missing. The last token's are missing, which gives the dtype.
"""
DATA_ROW = "data_row"
ANSWER = "answer"
"""The column with the names of the rows that prompts are of."""
_TOKEN = pa.int32()
_REASONS = [reason.name.lower() for reason in FinishReason]


@dataclass(frozen=True, eq=False)
class ByName:
    """A value of some samples, such as the reward of one function.

    Args:
        sample_ids: (n,) int64.
        values: (n,) float32.
    """

    sample_ids: Tensor
    values: Tensor

    def of(self, sample_ids: Tensor) -> pa.Array:
        """Return the (B,) values of these samples, null for samples without one."""
        if not len(self.sample_ids):
            return pa.nulls(len(sample_ids), pa.float32())
        order = self.sample_ids.argsort()
        known = self.sample_ids[order]
        index = torch.searchsorted(known, sample_ids).clamp(max=len(known) - 1)
        unknown = known[index] != sample_ids
        return pa.array(self.values[order][index].numpy(), pa.float32(), mask=unknown.numpy())


@dataclass(frozen=True, eq=False)
class ScoreColumns:
    """Scores, advantages and data rows of samples, next to the columns of their batch.

    Args:
        by_name: such as "reward/exact_match", "reward/model" or "cost/length".
        advantages: of samples whose tokens share one.
        data_rows: the row of the data that a prompt is of, by the index of the prompt, where rows have names.
        answers: the reference answer of a prompt as text, by the index of the prompt.
    """

    by_name: Mapping[str, ByName] = field(default_factory=dict)
    advantages: ByName | None = None
    data_rows: Mapping[int, str] = field(default_factory=dict)
    answers: Mapping[int, str] = field(default_factory=dict)


def sample_schema(names: tuple[str, ...] = ()) -> pa.Schema:
    """Return the columns, with one for each name of rewards and costs."""
    fields = [pa.field("step", pa.int64(), nullable=False)]
    fields += [pa.field(name, kind) for name, (_, kind) in _OF_SAMPLES.items()]
    fields += [pa.field(name, pa.float32()) for name in names]
    fields += [pa.field("advantage", pa.float32()), pa.field("finish_reason", pa.string())]
    fields += [pa.field(DATA_ROW, pa.string()), pa.field(ANSWER, pa.string())]
    fields += [pa.field(name, pa.list_(_TOKEN)) for name in ("prompt_tokens", "response_tokens")]
    fields += [pa.field(name, pa.list_(kind)) for name, kind in _OF_RESPONSES.items()]
    fields += [pa.field(ROUTES, pa.list_(_ROUTES))]
    return pa.schema(fields)


def table_of(batch: SampleBatch, scored: ScoreColumns, step: int) -> pa.Table:
    """Return the samples of a batch as rows, in its order.

    Args:
        batch: with the tokens.
        scored: further columns of them.
        step: that was trained on them.

    Raises:
        pyarrow.ArrowInvalid: a token or a version is beyond 32 bits.
    """
    ids, is_response = batch.sample_ids, batch.is_response
    columns: dict[str, pa.Array] = {"step": pa.array(np.full(len(batch), step), pa.int64())}
    for name, (column, kind) in _OF_SAMPLES.items():
        values = getattr(batch, column)
        columns[name] = pa.nulls(len(batch), kind) if values is None else pa.array(values.numpy()).cast(kind)
    columns |= {name: by_name.of(ids) for name, by_name in scored.by_name.items()}
    advantages = scored.advantages
    columns["advantage"] = pa.nulls(len(batch), pa.float32()) if advantages is None else advantages.of(ids)
    columns["finish_reason"] = pa.array([_REASONS[reason] for reason in batch.finish_reasons.tolist()])
    prompts = batch.prompt_indices.tolist()
    columns[DATA_ROW] = pa.array([scored.data_rows.get(prompt) for prompt in prompts], pa.string())
    columns[ANSWER] = pa.array([scored.answers.get(prompt) for prompt in prompts], pa.string())
    columns["prompt_tokens"] = _lists(batch.prompt_lengths, batch.tokens[~is_response], _TOKEN)
    columns["response_tokens"] = _lists(batch.response_lengths, batch.tokens[is_response], _TOKEN)
    for name, kind in _OF_RESPONSES.items():
        values = getattr(batch, name)
        lists = pa.nulls(len(batch), pa.list_(kind))
        columns[name] = lists if values is None else _lists(batch.response_lengths, values, kind)
    columns[ROUTES] = pa.nulls(len(batch), pa.list_(_ROUTES))
    if batch.routes is not None:
        columns[ROUTES] = _lists(batch.sequence_lengths * batch.routes.shape[1], batch.routes.flatten(), _ROUTES)
    return pa.table(columns, sample_schema(tuple(scored.by_name)))


def batch_of(table: pa.Table) -> SampleBatch:
    """Return the samples of rows, with every column that `table_of` has taken from a batch, bit for bit.

    Raises:
        ValueError: rows that are no samples.
        KeyError: a column is not there.
    """
    prompt_lengths, prompts = _values(table["prompt_tokens"])
    response_lengths, responses = _values(table["response_tokens"])
    lengths = torch.stack([prompt_lengths, response_lengths], dim=1).flatten()
    is_response = torch.tensor([False, True]).repeat(len(prompt_lengths)).repeat_interleave(lengths)
    tokens = torch.empty(len(is_response), dtype=torch.int64)
    tokens[~is_response], tokens[is_response] = prompts.long(), responses.long()
    of_responses = {name: _values(table[name])[1] for name in _OF_RESPONSES if not _is_null(table[name])}
    of_responses |= {name: of_responses[name].long() for name in _INTEGERS if name in of_responses}
    of_samples = {
        column: None if _is_null(table[name]) else _tensor(table[name].combine_chunks())
        for name, (column, _) in _OF_SAMPLES.items()
    }
    engines = of_samples["engines"]
    reasons = [_REASONS.index(reason) for reason in table["finish_reason"].to_pylist()]
    known = {"engines": None if engines is None else engines.long(), "finish_reasons": torch.tensor(reasons).long()}
    return SampleBatch(
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        routes=_routes(table, prompt_lengths + response_lengths),
        **(of_samples | of_responses | known),  # type: ignore[arg-type]
    )


def _routes(table: pa.Table, lengths: Tensor) -> Tensor | None:
    """Return the (T, C) routes of samples of these lengths; None where they have none, as in an earlier version's file.

    Raises:
        ValueError: they are not as many for each token.
    """
    if ROUTES not in table.column_names or _is_null(table[ROUTES]) or not len(lengths):
        return None
    counts, routes = _values(table[ROUTES])
    columns = int(counts[0]) // max(1, int(lengths[0]))
    if not torch.equal(counts, columns * lengths):
        raise ValueError(f"{int(counts.sum())} routes for {int(lengths.sum())} tokens, expected {columns} for each")
    narrow = bool(len(routes)) and int(routes[-1]) == missing(torch.uint8) and int(routes.min()) >= 0
    return routes.to(torch.uint8 if narrow else torch.int16).view(-1, columns)


def _lists(lengths: Tensor, values: Tensor, kind: pa.DataType) -> pa.Array:
    ends = np.concatenate([[0], lengths.cumsum(0).numpy()])
    return pa.ListArray.from_arrays(pa.array(ends).cast(pa.int32()), pa.array(values.numpy()).cast(kind))


def _values(column: pa.ChunkedArray) -> tuple[Tensor, Tensor]:
    """Return the number of values of each row, and all values end to end."""
    rows = column.combine_chunks()
    return _tensor(rows.value_lengths()).long(), _tensor(rows.flatten())


def _tensor(array: pa.Array) -> Tensor:
    if array.null_count:
        raise ValueError(f"{array.null_count} of {len(array)} values are null, expected none")
    return torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())


def _is_null(column: pa.ChunkedArray) -> bool:
    return len(column) > 0 and column.null_count == len(column)
