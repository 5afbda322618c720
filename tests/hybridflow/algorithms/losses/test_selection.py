"""Selection of the first tokens, shard by shard."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridflow.algorithms.losses.selection import Keys, SelectionLimit, share_of, token_numbers, uniform_ranks


def keys_of(ranks: list[float], sample_ids: list[int], tokens: list[int]) -> Keys:
    return Keys(np.array(ranks, dtype=np.float64), np.array(sample_ids), np.array(tokens))


def test_equal_ranks_are_ordered_by_sample_and_token() -> None:
    keys = keys_of([1.0, 0.0, 0.0, 0.0, -np.inf], [1, 7, 3, 3, 9], [0, 0, 5, 2, 0])
    first = keys.first(4)
    assert list(zip(first.ranks, first.sample_ids, first.tokens, strict=True)) == [
        *((-np.inf, 9, 0), (0.0, 3, 2), (0.0, 3, 5), (0.0, 7, 0)),
    ]
    assert keys.within(SelectionLimit(0.0, 3, 5)).tolist() == [False, False, True, True, True]
    assert not keys.within(None).any()
    assert len(keys.first(9).ranks) == 5


@pytest.mark.parametrize("count", [1, 3, 10, 40, 100])
def test_what_is_chosen_in_pieces_is_what_comes_first_of_all(count: int) -> None:
    """However few of them a piece has, and with many equal ranks."""
    generator = np.random.default_rng(1)
    positions = [(sample, token) for sample in range(8) for token in range(5)]
    keys = keys_of(
        generator.integers(0, 4, len(positions)).tolist(),
        [sample for sample, _ in positions],
        [token for _, token in positions],
    )
    expected = sorted(zip(keys.ranks, keys.sample_ids, keys.tokens, strict=True))[:count]
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(positions))
        shards = [keys.take(shard) for shard in np.array_split(order, [1, 2, 30])]
        limit = SelectionLimit.of([shard.first(count) for shard in shards], count)
        chosen = [shard.take(shard.within(limit)) for shard in shards]
        results = [key for entry in chosen for key in zip(entry.ranks, entry.sample_ids, entry.tokens, strict=True)]
        assert sorted(results) == expected
    assert SelectionLimit.of([keys.take(np.array([], dtype=np.int64))], count) is None


def test_a_fraction_is_the_decimal_that_was_written() -> None:
    assert int(0.29 * 100) == 28
    assert share_of(0.29, 100) == 29
    assert [share_of(2e-4, count) for count in (0, 1, 4999, 5000, 9999, 10000)] == [0, 1, 1, 1, 1, 2]
    assert share_of(1.0, 7) == 7
    assert share_of(1e-5, 10**6) == 10


def test_drawn_ranks_are_a_tokens_own_and_uniform() -> None:
    samples, tokens = torch.arange(400).repeat_interleave(50), torch.arange(50).repeat(400)
    ranks = uniform_ranks(5, samples, tokens)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(1))
    assert (uniform_ranks(5, samples[order], tokens[order]) == ranks[order.numpy()]).all()
    assert 0 <= ranks.min() < 1e-3
    assert 1 - 1e-3 < ranks.max() < 1
    counts, _ = np.histogram(ranks, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-square with 19 degrees of freedom: above it once in 8000
    assert len(np.unique(ranks)) == len(ranks)
    other = uniform_ranks(6, samples, tokens)
    for pair in ((ranks, other), (ranks[1:], ranks[:-1]), (ranks[50:], ranks[:-50])):
        assert abs(np.corrcoef(*pair)[0, 1]) < 0.03
    assert uniform_ranks(-(2**62), samples[:1], tokens[:1])[0] != ranks[0]


def test_numbers_of_tokens() -> None:
    assert token_numbers(torch.tensor([3, 0, 2])).tolist() == [0, 1, 2, 0, 1]
    assert token_numbers(torch.tensor([], dtype=torch.int64)).tolist() == []
