"""Statistics of pieces, put together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from hybridflow.algorithms.losses.statistics import Statistics


def test_statistics_merge_and_mean_over_mini_batches() -> None:
    first = Statistics(
        sums={"loss": torch.tensor(1.0)},
        means={"ratio": (torch.tensor(3.0), torch.tensor(1.0))},
        maxima={"most": torch.tensor(5.0)},
    )
    second = replace(
        first, means={"ratio": (torch.tensor(5.0), torch.tensor(3.0))}, maxima={"most": torch.tensor(-7.0)}
    )
    merged = Statistics.merge([first, second])
    assert merged.values() == {"loss": 2.0, "ratio": 2.0, "most": 5.0}
    assert merged.values(mini_batches=2) == {"loss": 1.0, "ratio": 2.0, "most": 5.0}


def test_statistics_reduce_over_ranks() -> None:
    store = torch.distributed.HashStore()

    def reduce_on(rank: int) -> dict[str, float]:
        group = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        mine = Statistics(
            sums={"a": torch.tensor(1.0 + rank), "b": torch.tensor(10.0)},
            means={"c": (torch.tensor(2.0 * rank), torch.tensor(3.0)), "d": (torch.tensor(1.0), torch.tensor(1.0))},
            maxima={"e": torch.tensor(float(-rank))},
        )
        return mine.all_reduce(group).values()  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as ranks:
        for values in ranks.map(reduce_on, range(2)):
            assert values == pytest.approx({"a": 3.0, "b": 20.0, "c": 2.0 / 6.0, "d": 1.0, "e": 0.0})
