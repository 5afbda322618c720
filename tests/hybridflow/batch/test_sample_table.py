"""Samples as rows of a table, and back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_table import ByName, ScoreColumns, batch_of, table_of


def random_samples(count: int, **columns: Any) -> SampleBatch:
    generator = torch.Generator().manual_seed(count)

    def numbers(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    lengths = [0, *numbers(1, 40, count - 1)]
    return SampleBatch.from_generations(
        prompts=[numbers(0, 1 << 18, 1 + sample % 5) for sample in range(count)],
        responses=[numbers(0, 1 << 18, length) for length in lengths],
        logprobs=[(-torch.rand(length, generator=generator) * 30).tolist() for length in lengths],
        response_masks=[[bool(number) for number in numbers(0, 2, length)] for length in lengths],
        sample_ids=[(1 << 40) + 3 * sample for sample in range(count)],
        group_ids=numbers(0, 1 << 40, count),
        prompt_indices=numbers(0, 1 << 40, count),
        policy_versions=numbers(0, 1 << 40, count),
        finish_reasons=[("stop", "length", "abort")[sample % 3] for sample in range(count)],
        **columns,
    )


def same(one: SampleBatch, other: SampleBatch) -> bool:
    """Bit for bit: nan is nan."""
    columns = one.columns(), other.columns()
    return list(columns[0]) == list(columns[1]) and all(
        column.dtype == columns[1][name].dtype
        and torch.equal(column.contiguous().view(torch.uint8), columns[1][name].contiguous().view(torch.uint8))
        for name, column in columns[0].items()
    )


def test_every_column_comes_back_bit_for_bit(tmp_path: Path) -> None:
    plain = random_samples(30)
    lengths = plain.response_lengths.tolist()
    full = random_samples(
        30,
        token_versions=[[token % 3 for token in range(length)] for length in lengths],
        engine=5,
        times=[(1e9 + sample / 7, 1e9 + sample / 3) for sample in range(30)],
    ).replace(
        rewards=torch.tensor([math.nan, math.inf, *torch.rand(28).tolist()]),
        costs=torch.rand(30),
        reference_logprobs=torch.rand(30).double(),
    )
    routes = [torch.randint(0, 9, (len(tokens), 6), dtype=torch.uint8).numpy() for tokens in plain.prompts()]
    narrow = random_samples(30, routes=routes)
    assert narrow.routes is not None and narrow.routes.dtype == torch.uint8
    wide = narrow.replace(routes=torch.where(narrow.routes == 255, -1, narrow.routes.short() + 250))
    for number, batch in enumerate((plain, full, narrow, wide)):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(table_of(batch, ScoreColumns(), 12), path, row_group_size=7)
        assert same(batch_of(pq.read_table(path)), batch)
    table = table_of(full, ScoreColumns(), 12)
    assert table["step"].to_pylist() == [12] * 30
    assert table["finish_reason"].to_pylist()[:3] == ["stop", "length", "abort"]
    assert table["response_tokens"].to_pylist()[1] == full.responses()[1]
    assert table["prompt_tokens"].to_pylist() == full.prompts()


def test_what_samples_were_given_stands_beside_their_ids_and_is_null_for_others() -> None:
    batch = random_samples(4)
    ids = batch.sample_ids
    exact = ByName(ids[[3, 1, 0]], torch.tensor([3.0, math.nan, 0.5]))
    scored = ScoreColumns(
        {"reward/exact": exact, "cost/none": ByName(ids[:0], ids[:0].float())},
        advantages=ByName(ids, torch.tensor([0.1, 0.2, 0.3, 0.4])),
    )
    table = table_of(batch, scored, 1)
    given = table["reward/exact"]
    assert given.null_count == 1 and given[2].as_py() is None
    assert [given[row].as_py() for row in (0, 3)] == [0.5, 3.0] and math.isnan(given[1].as_py())
    assert table["cost/none"].to_pylist() == [None] * 4
    assert torch.equal(torch.tensor(table["advantage"].to_pylist()), torch.tensor([0.1, 0.2, 0.3, 0.4]))


def test_what_does_not_fit_is_refused() -> None:
    batch = random_samples(3)
    with pytest.raises(pa.ArrowInvalid):
        table_of(batch.replace(tokens=batch.tokens + (1 << 31)), ScoreColumns(), 1)
    table = table_of(batch, ScoreColumns(), 1)
    holes = pa.array([1, None, 3], pa.int64())
    with pytest.raises(ValueError, match="1 of 3 values are null"):
        batch_of(table.set_column(table.column_names.index("sample_id"), "sample_id", holes))
