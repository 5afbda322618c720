"""Moments of pieces, put together, and whitening with them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hybridflow.algorithms.advantages.whitening import Moments, moments, sample_moments, whiten
from tests.support.columns import mask_with_holes, soiled


def test_moments_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0, 50.0], [6.0, 50.0, 50.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    result = moments(values, mask)
    assert result == Moments(3, 3.0, 4.0 + 1.0 + 9.0)
    assert result.variance == 14 / 3
    assert moments(values, torch.zeros_like(mask)) == Moments.merge([]) == Moments(0, 0.0, 0.0)
    assert Moments(0, 0.0, 0.0).variance == 0.0
    assert Moments.merge([Moments(1, 6.0, 0.0), Moments(0, 0.0, 0.0), Moments(2, 1.5, 0.5)]) == result


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_merged_moments_are_those_of_all_values_together(offset: float) -> None:
    torch.manual_seed(0)
    values, mask = torch.randn(20, 7) + offset, mask_with_holes(20, 7)
    shards = [moments(values[rows], mask[rows]) for rows in torch.randperm(20).tensor_split([3, 4, 11])]
    result = Moments.merge(shards)
    variance, mean = torch.var_mean(values[mask].double(), correction=0)
    assert result.count == int(mask.sum())
    assert result.mean == pytest.approx(mean.item(), rel=1e-14)
    assert result.variance == pytest.approx(variance.item(), rel=1e-12)
    nested = Moments.merge([Moments.merge(shards[:2]), Moments.merge(shards[2:])])
    assert nested.variance == pytest.approx(result.variance, rel=1e-12)


def test_moments_merge_to_the_same_bits_in_any_order() -> None:
    torch.manual_seed(2)
    mask = torch.ones(7, dtype=torch.bool)
    for _ in range(20):
        shards = [moments(torch.randn(7).double() / 3 + torch.randn(1), mask) for _ in range(5)]
        assert len({Moments.merge(order) for order in itertools.permutations(shards)}) == 1


def test_whitened_pieces_are_the_whitened_whole() -> None:
    torch.manual_seed(1)
    advantages, mask = 3 * torch.randn(16, 9) + 5, mask_with_holes(16, 9)
    dirty = soiled(advantages, mask)
    assert moments(dirty, mask) == moments(advantages, mask)
    shards = torch.arange(16).tensor_split([2, 9])
    merged = Moments.merge(moments(dirty[rows], mask[rows]) for rows in shards)
    whitened = torch.cat([whiten(dirty[rows], mask[rows], merged) for rows in shards])
    variance, mean = torch.var_mean(advantages[mask].double(), correction=0)
    torch.testing.assert_close(whitened[mask].double(), (advantages[mask].double() - mean) / (variance.sqrt() + 1e-6))
    assert whitened[~mask].count_nonzero() == 0
    assert whitened.dtype == torch.float32
    again = moments(whitened, mask)
    assert again.mean == pytest.approx(0.0, abs=1e-6)
    assert math.sqrt(again.variance) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("counted", [0, 1, 7])
def test_equal_advantages_become_exactly_zero(counted: int) -> None:
    mask = torch.arange(9)[None] < counted
    values = torch.full((1, 9), 0.1)
    shards = [moments(values[:, :4], mask[:, :4]), moments(values[:, 4:], mask[:, 4:])]
    assert whiten(values, mask, Moments.merge(shards)).tolist() == [[0.0] * 9]


def test_masks_of_integers_and_moments_that_are_no_numbers_are_refused() -> None:
    values, mask = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1, 0, 1]])
    for call in (moments, lambda values, mask: whiten(values, mask, Moments(1, 0.0, 1.0))):
        with pytest.raises(ValueError, match=r"the mask is torch\.int64, expected torch\.bool"):
            call(values, mask)
        with pytest.raises(ValueError, match=r"mask has shape \(1, 1\) and (values|advantages) \(1, 3\)"):
            call(values, mask[:, :1].bool())
    with pytest.raises(ValueError, match="whiten: advantages of mean nan"):
        whiten(values, mask.bool(), moments(torch.tensor([[torch.nan, 0.0, 1.0]]), mask.bool()))


def test_moments_of_samples_are_those_of_their_tokens() -> None:
    values, counts = torch.tensor([0.5, -1.0, 7.0]), torch.tensor([3, 1, 0])
    of_tokens = moments(values.repeat_interleave(counts), torch.ones(4, dtype=torch.bool))
    result = sample_moments(values, counts)
    assert (result.count, result.mean) == (4, of_tokens.mean) == (4, 0.125)
    assert result.squared_deviations == pytest.approx(of_tokens.squared_deviations)
    assert sample_moments(values, torch.zeros(3, dtype=torch.int64)) == Moments(0, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"sample_moments: counts has shape \(2,\) and values \(3,\)"):
        sample_moments(values, counts[:2])
