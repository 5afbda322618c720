"""Covariances of tokens, by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch

from hybridflow.algorithms.losses.covariance import CovarianceMeans, sample_sums, token_covariances


def test_covariances_by_hand() -> None:
    """Two likely tokens of a good response, an unlikely and a likely one of a bad response."""
    logprobs, advantages = torch.tensor([-1.0, -1.0, -4.0, -2.0]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    means = CovarianceMeans.of([-2.0, -6.0], [2.0, -2.0], [2, 2])
    assert means == CovarianceMeans(-2.0, 0.0, 4)
    assert token_covariances(logprobs, advantages, means).tolist() == [1.0, 1.0, 2.0, 0.0]
    assert (
        token_covariances(logprobs, advantages, means).mean().item()
        == torch.cov(torch.stack([logprobs, advantages]), correction=0)[0, 1].item()
    )
    with pytest.raises(ValueError, match=r"token_covariances: advantages has shape \(1,\)"):
        token_covariances(logprobs, advantages[:1], means)


def test_sums_of_samples_are_exact_and_leave_out_what_does_not_count() -> None:
    column = torch.tensor([1e8, 1.0, -1e8, torch.nan, 2.0, 3.0])
    loss_mask = torch.tensor([True, True, True, False, True, True])
    assert sample_sums(column, loss_mask, torch.tensor([4, 0, 2])).tolist() == [1.0, 0.0, 5.0]
    assert sample_sums(column[:0], loss_mask[:0], torch.tensor([], dtype=torch.int64)).tolist() == []


def test_means_are_the_same_bits_in_any_order() -> None:
    random.seed(1)
    sums = [random.gauss(0, 10.0 ** random.randint(-8, 8)) for _ in range(200)]
    counts = [random.randint(0, 9) for _ in sums]
    means = CovarianceMeans.of(sums, sums, counts)
    for _ in range(5):
        order = random.sample(range(200), 200)
        shuffled = [sums[index] for index in order]
        assert CovarianceMeans.of(shuffled, shuffled, [counts[index] for index in order]) == means
    assert means.logprob == math.fsum(sums) / sum(counts)
    assert CovarianceMeans.of([], [], []) == CovarianceMeans(0.0, 0.0, 0)
